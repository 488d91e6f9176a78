"""Rollout tokens per second: python -m benchmarks.rollout [samplers | launches] [--rounds N]

One model (4-layer, 256-wide Qwen3, random weights, float32), 8 prompts of 30 tokens x 8 samples, on the CPU; every
contender samples the same workload in turn, round after round in one process, and the medians are compared.

``samplers``:

    gather        this package's engine as it runs off TPU
    native 64     the library's scheduler with its native attention, 64 rows at a time (inside our step: the library's
                  own sampler does not trace off TPU)
    native 16     the same with 16 rows at a time, which suits its rows x rows attention better
    tunix         Tunix's own sampler: one compiled loop for the whole batch, up to the longest row

``launches``: this package's engine with 1, 4, 16 and 64 decode steps in a launch, for all rows at once and, so that
requests wait, for 16 at a time; each with the host's time per token by stage.

Workloads: *even*, 64 tokens each; *uneven*, lengths from a long tail up to 256, the same for every contender (each
request has its own limit; Tunix's sampler has none, so it runs to the longest row and only the wanted tokens count).
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table
from tunix.generate.sampler import CacheConfig, Sampler

from tests.models.random_checkpoint import write_random_qwen3
from tests.rollout.building import engine_options
from tpu_grpo.models import load_model, read_checkpoint
from tpu_grpo.rollout.engine import Engine, engine_mesh
from tpu_grpo.types import Request, SampleKey, SamplingParams
from tpu_grpo.weights.plan import named_leaves
from tpu_grpo.weights.sync import WeightSync

PROMPTS, GROUP, PROMPT_TOKENS, LONGEST, VOCABULARY = 8, 8, 30, 256, 512
LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 32
Workload = Callable[[int], int]
"""One generation, numbered for its keys; returns how many tokens it sampled."""


def uneven_lengths() -> list[int]:
    """64 lengths from a log-normal tail, the longest exactly 256."""
    drawn = np.random.default_rng(0).lognormal(3.6, 0.9, PROMPTS * GROUP)
    lengths = np.clip(drawn.round().astype(int), 4, LONGEST)
    lengths[lengths.argmax()] = LONGEST
    return lengths.tolist()


WORKLOADS = {"even": [64] * PROMPTS * GROUP, "uneven": uneven_lengths()}


def prompt_ids(prompt: int) -> tuple[int, ...]:
    """The ids of a prompt; all differ from the first token on."""
    return tuple(range(10 + prompt, 10 + prompt + PROMPT_TOKENS))


def engine_workload(engine: Engine, lengths: Sequence[int]) -> Workload:
    """Our engine, prefixes forgotten before each generation as after a weight sync."""

    def run(number: int) -> int:
        engine.forget_prefixes()
        requests = [
            Request(
                prompt_ids(row // GROUP),
                SamplingParams(max_new_tokens=length, ignore_stop=True),
                SampleKey(0, number, row // GROUP, row % GROUP),
            )
            for row, length in enumerate(lengths)
        ]
        return sum(len(completion.token_ids) for completion in engine.generate(requests))

    return run


class IdTokenizer:
    """Tunix's sampler takes strings: decimal ids, separated by spaces."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Ids of a string."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Nothing reads the texts."""
        return ""

    def bos_id(self) -> int:
        """None is added: the id is the first of no prompt."""
        return 2

    def eos_id(self) -> int:
        """Beyond the vocabulary: never sampled."""
        return VOCABULARY

    def pad_id(self) -> int:
        """Fills prompts on the left."""
        return 0


def tunix_workload(model: nnx.Module, lengths: Sequence[int]) -> Workload:
    """Tunix's sampler with a cache no larger than this workload needs."""
    longest = max(lengths)
    width = PROMPT_TOKENS + 2
    cache = CacheConfig(cache_size=width + longest, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sampler = Sampler(model, IdTokenizer(), cache)
    texts = [" ".join(map(str, prompt_ids(row // GROUP))) for row in range(PROMPTS * GROUP)]

    def run(number: int) -> int:
        out = sampler(
            texts,
            max_generation_steps=longest,
            max_prompt_length=width,
            temperature=1.0,
            top_p=1.0,
            seed=number,
            eos_tokens=[VOCABULARY],
        )
        assert all(len(tokens) == longest for tokens in out.tokens)
        return sum(lengths)

    return run


def build_engine(directory: Path, model: nnx.Module, attention: str, rows: int, steps: int | None = None) -> Engine:
    """An engine with the model's weights, everything compiled."""
    context = PROMPT_TOKENS + LONGEST
    options = engine_options(
        context_tokens=context,
        attention=attention,
        max_running_requests=rows,
        prefill_tokens=512,
        steps_per_launch=steps,
    )
    engine = Engine.build(directory, engine_mesh(jax.devices()[:1]), options)
    leaves = named_leaves(nnx.state(model, nnx.Param))
    engine.install_weights(WeightSync(read_checkpoint(directory).weight_rules, leaves, engine.weight_specs)(leaves)[0])
    engine.compile_all()
    return engine


def stage_times(engine: Engine, run: Workload) -> str:
    """Microseconds per sampled token of one more generation, by what the host spent them on."""
    before = engine.use
    tokens, use = run(10_000), engine.use - before
    parts = (f"{stage} {1e6 * getattr(use, stage) / tokens:.1f}" for stage in ("schedule", "launch", "wait", "collect"))
    return f"{use.prefills} prefills, {use.steps} steps in {use.launches} launches; us per token: {', '.join(parts)}"


def measure(contenders: dict[str, Workload], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contender in each round, after one round that is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run(number)
            if number:
                speeds[name].append(tokens / (time.perf_counter() - start))
    return speeds


def main() -> None:
    """Build everything, measure both workloads, print a table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="?", choices=("samplers", "launches"), default="samplers")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as temporary:
        directory = write_random_qwen3(
            Path(temporary) / "model",
            layers=LAYERS,
            hidden=256,
            heads=8,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            intermediate=768,
            vocab=VOCABULARY,
        )
        mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        model = load_model(read_checkpoint(directory), mesh, dtype=jnp.float32, remat="none")
        if asked.contenders == "samplers":
            compare_samplers(directory, model, asked.rounds, console)
        else:
            compare_launches(directory, model, asked.rounds, console)


def compare_samplers(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Our engine beside the library's scheduler and Tunix's sampler."""
    engines = {
        "gather": build_engine(directory, model, "gather", 64),
        "native 64": build_engine(directory, model, "native", 64),
        "native 16": build_engine(directory, model, "native", 16),
    }
    for workload, lengths in WORKLOADS.items():
        contenders = {name: engine_workload(engine, lengths) for name, engine in engines.items()}
        contenders["tunix"] = tunix_workload(model, lengths)
        console.print(report(workload, lengths, measure(contenders, rounds)))
        console.print(f"gather: {stage_times(engines['gather'], contenders['gather'])}\n")


def compare_launches(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Our engine with more and more decode steps in a launch."""
    for rows in (64, 16):
        engines = {
            f"{steps} steps": build_engine(directory, model, "gather", rows, steps=steps) for steps in (1, 4, 16, 64)
        }
        for workload, lengths in WORKLOADS.items():
            contenders = {name: engine_workload(engine, lengths) for name, engine in engines.items()}
            console.print(report(f"{workload}, {rows} rows at a time", lengths, measure(contenders, rounds)))
            for name, engine in engines.items():
                console.print(f"{name}: {stage_times(engine, contenders[name])}")
            console.print()


def report(workload: str, lengths: Sequence[int], speeds: dict[str, list[float]]) -> Table:
    """Medians, and the median over rounds of each contender's speed against the first's."""
    title = f"{workload}: {sum(lengths)} tokens, median length {median(lengths):.0f}, longest {max(lengths)}"
    first = next(iter(speeds))
    table = Table("contender", "tokens/s (median)", "min", "max", f"times {first}", title=title)
    for name, values in speeds.items():
        ratios = [theirs / ours for ours, theirs in zip(speeds[first], values, strict=True)]
        figures = (f"{median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}", f"{median(ratios):.2f}")
        table.add_row(name, *figures)
    return table


if __name__ == "__main__":
    main()
