"""Measures an update: python -m benchmarks.update [--rounds N] [--prompt-tokens N] [--new-tokens N]

One model (4-layer, 256-wide Qwen3, random weights, float32, nothing recomputed), 8 prompts x 8 completions, on one CPU
device. Each contender has a process of its own; they learn from the same rows in turn, round after round. Shown are
medians, and medians over rounds of the ratios.

    ours          ``Learner.update``: from a scored rollout to the optimizer step, including work on the host
    tunix         the same with algorithm.name=tunix:grpo: Tunix's learner, the rows of the step at once (its default)
    tunix 8       the same in micro-batches of a prompt, which its trainer accumulates

Workloads: *full*, prompts and completions all as long as they may be; *uneven completions*, log-normal with a mean of a
third of the longest after prompts of full length; *uneven*, prompts as well.

    seconds       wall-clock time. If other programs run on the machine, CPU seconds are the better measure
    CPU seconds   of all threads of the process, the kernel's work for it included
    temporary     MiB, the largest of a contender's programs, by XLA's account
    FLOPs         of a whole update by XLA's account, over 6 x parameters x tokens that are no padding. XLA counts a
                  loop once: ours runs the output head in a loop of one round here
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.config import AlgorithmSection, RunConfig, parse_config
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.learner.building import build_parts, row_shape
from tpu_grpo.learner.rows import train_rows
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores
from tpu_grpo.tunix_loop.tunix_learner import TunixLearner

PROMPTS, GROUP, VOCABULARY = 8, 8, 512
SIZES = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 768}
RATE = 1e-6


@dataclass(frozen=True)
class Contender:
    """A learner that is compared."""

    prepare: Callable[[ScoredRollout], tuple[Callable[[], Any], int]]
    """Takes a rollout; returns a function that makes an update and waits for it, and the update's number of passes."""
    temporary: int
    """The temporary memory of its largest program, in bytes."""
    pass_flops: float
    step_flops: float = 0.0


def log_normal_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Draw log-normal lengths with a mean of ``longest / 3``; their scale is found by bisection.

    Lengths are cut at ``longest``, as by a limit of new tokens, and one of them is ``longest`` exactly.
    """
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.9, count)
    low, high, lengths = 0.0, float(longest), drawn
    while high - low > 1e-6:
        scale = (low + high) / 2
        lengths = np.clip((scale * drawn).round(), 1, longest).astype(int)
        lengths[drawn.argmax()] = longest
        low, high = (scale, high) if lengths.mean() < longest / 3 else (low, scale)
    return lengths.tolist()


def make_rollout(prompt_lengths: Sequence[int], lengths: Sequence[int]) -> ScoredRollout:
    """Make a scored rollout of random tokens, with log-probabilities near those of a uniform distribution."""
    rng = np.random.default_rng(0)
    prompts = tuple(Prompt("", tuple(rng.integers(3, VOCABULARY, n).tolist())) for n in prompt_lengths)
    logprobs = rng.normal(-np.log(VOCABULARY), 0.1, (len(lengths), max(lengths))).astype(np.float32)
    completions = tuple(
        Completion(rng.integers(3, VOCABULARY, n).astype(np.int32), line[:n], "length", 0)
        for n, line in zip(lengths, logprobs, strict=True)
    )
    rollout = Rollout(PromptBatch(1, prompts), GROUP, completions, ("",) * len(completions), 0.0)
    total = rng.normal(size=len(completions))
    return ScoredRollout(rollout, Scores(total, {"made_up": total}, 0.0))


def make_config(run_dir: Path, prompt_tokens: int, new_tokens: int) -> RunConfig:
    """Return the config of "ours"; settings that are not named have their defaults."""
    tree: dict[str, Any] = {"run": {"dir": str(run_dir)}, "rollout": {"max_new_tokens": new_tokens}}
    tree["data"] = {"prompts_per_step": PROMPTS, "max_prompt_tokens": prompt_tokens}
    return parse_config(tree | {"algorithm": {"group_size": GROUP}, "optimizer": {"learning_rate": RATE}})


def ours(model: nnx.Module, mesh: Mesh, config: RunConfig) -> Contender:
    """Build this package's learner as a run uses it."""
    inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
    learner, programs = Learner(config, inputs), build_parts(config, inputs)
    learner.share(())
    gradients, step = costs(programs.lower_gradients().compile()), costs(programs.lower_step(()).compile())
    shape = row_shape(config, model, mesh)

    def prepare(scored: ScoredRollout) -> tuple[Callable[[], Any], int]:
        prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
        packed, _ = train_rows(prompts, scored.rollout.completions, np.zeros(len(prompts)), shape)

        def run() -> None:
            learner.update(scored)
            jax.block_until_ready(learner.params())

        return run, len(packed.weights) // shape.micro_batch

    return Contender(prepare, max(gradients[0], step[0]), gradients[1], step[1])


def tunix(model: nnx.Module, mesh: Mesh, config: RunConfig, micro_prompts: int) -> Contender:
    """Build Tunix's learner as a run uses it, with micro-batches of ``micro_prompts`` prompts."""
    section = {"name": "tunix:grpo", "options": {"beta": 0.0}, "micro_batch_prompts": micro_prompts}
    algorithm = AlgorithmSection(group_size=GROUP, **section)
    config = config.model_copy(update={"algorithm": algorithm})
    learner = TunixLearner(config, LearnerInputs(model=model, reference=None, mesh=mesh))
    compiled = learner._parts.lower_train_step().compile()

    def prepare(scored: ScoredRollout) -> tuple[Callable[[], Any], int]:
        def run() -> None:
            learner.update(scored)
            jax.block_until_ready(learner.params())

        return run, PROMPTS // micro_prompts

    return Contender(prepare, *costs(compiled))


def costs(compiled: Any) -> tuple[int, float]:
    """Return the bytes of temporary memory and the FLOPs of one run of a program."""
    return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]


def workloads(config: RunConfig) -> dict[str, ScoredRollout]:
    """Return the rollouts of the workloads, by name."""
    prompt_tokens, new_tokens = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    rows, whole = PROMPTS * GROUP, [prompt_tokens] * PROMPTS
    uneven = log_normal_lengths(rows, new_tokens, seed=0)
    return {
        "full": make_rollout(whole, [new_tokens] * rows),
        "uneven completions": make_rollout(whole, uneven),
        "uneven": make_rollout(log_normal_lengths(PROMPTS, prompt_tokens, seed=1), uneven),
    }


def work(name: str, prompt_tokens: int, new_tokens: int) -> None:
    """Run a contender's process: print its figures, then make an update for each line of stdin, a workload's name."""
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = read_checkpoint(write_random_qwen3(Path(directory) / "model", vocab=VOCABULARY, **SIZES))
        model = load_model(checkpoint, mesh, dtype=jnp.dtype("float32"), remat="none")
        config = make_config(Path(directory) / "run", prompt_tokens, new_tokens)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        contender = CONTENDERS[name](model, mesh, config)
        runs, figures = {}, {}
        for workload, scored in workloads(config).items():
            runs[workload], passes = contender.prepare(scored)
            runs[workload]()  # compiles
            tokens = scored.rollout.total_tokens + sum(len(p.token_ids) for p in scored.rollout.row_prompts)
            share = (passes * contender.pass_flops + contender.step_flops) / (6 * parameters * tokens)
            figures[workload] = {"tokens": tokens, "temporary": contender.temporary / 2**20, "flops": share}
        print(json.dumps(figures), flush=True)
        for line in sys.stdin:
            began, worked = time.perf_counter(), time.process_time()
            runs[line.strip()]()
            print(json.dumps([time.perf_counter() - began, time.process_time() - worked]), flush=True)


CONTENDERS: dict[str, Callable[[nnx.Module, Mesh, RunConfig], Contender]] = {
    "ours": ours,
    "tunix": partial(tunix, micro_prompts=PROMPTS),
    f"tunix {GROUP}": partial(tunix, micro_prompts=1),
}


class Worker:
    """Drives the process of a contender."""

    def __init__(self, name: str, options: list[str]):
        command = [sys.executable, "-m", "benchmarks.update", "--work", name, *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.figures: dict[str, dict[str, float]] = json.loads(self._answer())

    def update(self, workload: str) -> tuple[float, float]:
        """Make an update in the process; returns its seconds and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        seconds, worked = json.loads(self._answer())
        return seconds, worked

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise RuntimeError(f"the process of a contender ended with {self._process.wait()}")


def report(workload: str, workers: dict[str, Worker], spent: dict[str, list[tuple[float, float]]]) -> Table:
    """Return a table of medians, and the median over rounds of the time of "ours" divided by each contender's."""
    columns = ("seconds", "ours / it", "CPU seconds", "ours / it", "temporary MiB", "FLOPs / 6 N tokens")
    tokens = workers["ours"].figures[workload]["tokens"]
    table = Table("update", *columns, title=f"{workload}: {tokens} tokens")
    for name, values in spent.items():
        cells = []
        for kind in range(2):
            ratios = [our[kind] / its[kind] for our, its in zip(spent["ours"], values, strict=True)]
            cells += [f"{median(value[kind] for value in values):.2f}", f"{median(ratios):.2f}"]
        figures = workers[name].figures[workload]
        table.add_row(name, *cells, f"{figures['temporary']:.0f}", f"{figures['flops']:.2f}")
    return table


def main() -> None:
    """Start all contenders, let them take turns on each workload, and print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.prompt_tokens, options.new_tokens)
        return
    sizes = [f"--prompt-tokens={options.prompt_tokens}", f"--new-tokens={options.new_tokens}"]
    workers = {name: Worker(name, sizes) for name in CONTENDERS}
    for workload in workers["ours"].figures:
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
        for number in range(options.rounds + 1):
            for name, worker in workers.items():
                took = worker.update(workload)
                if number:
                    spent[name].append(took)
        Console(width=120).print(report(workload, workers, spent))


if __name__ == "__main__":
    main()
