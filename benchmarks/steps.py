"""Measures whole GRPO steps and updates beside TRL and Tunix: python -m benchmarks.steps --trl PYTHON [--rounds N]

PYTHON is the interpreter of an environment with trl and torch, which need not have this package; else TRL is left out.

    uv venv /tmp/trl && uv pip install -p /tmp/trl/bin/python trl==1.16.0 torch
    python -m benchmarks.steps --trl /tmp/trl/bin/python
    python -m benchmarks.steps --trl /tmp/trl/bin/python --part update --prompt-tokens 256

The model of benchmarks.update (4-layer, 256-wide Qwen3, random weights, float32), 8 prompts x 8 completions of equal
length. Each contender has a process of its own; they make steps in turn, round after round. Shown are medians, and
medians over rounds of each contender's time divided by ours.

    --part whole    a rollout, rewards that cost nothing, the update, and what brings the new weights to the sampler
    --part update   the update alone, from completions that are given
    ours            the engine, `Learner.update` and the weight sync
    tunix           Tunix's sampler and Tunix's learner (algorithm.name=tunix:grpo); no weights are moved
    trl             TRL's ``GRPOTrainer`` on PyTorch
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

PROMPTS, GROUP, VOCABULARY = 8, 8, 512
FIRST_TOKEN = 3


def prompt_ids(number: int, tokens: int) -> list[int]:
    """Return the ids of a prompt; prompts differ from their first token on."""
    return [FIRST_TOKEN + (number + place) % (VOCABULARY - FIRST_TOKEN - 1) for place in range(tokens)]


def serve(step: Callable[[], None]) -> None:
    """Make two steps, which compile, and then one for each line of stdin; print the seconds of each."""
    step()
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - began), flush=True)


def jax_step(name: str, options: argparse.Namespace) -> Callable[[], None]:
    """Return the step of this package (ours) or of Tunix."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.generate.sampler import CacheConfig, Sampler

    from benchmarks.rollout.contenders import IdTokenizer, build_engines
    from benchmarks.update import SIZES, make_config, make_rollout
    from tests.engine.building import install
    from tpu_grpo.config import AlgorithmSection
    from tpu_grpo.learner import Learner, LearnerInputs
    from tpu_grpo.models.checkpoint import read_checkpoint
    from tpu_grpo.models.tunix_model import load_model
    from tpu_grpo.records.stages import Completion, Request, SampleKey, SamplingParams
    from tpu_grpo.tunix_loop.tunix_learner import TunixLearner

    prompt_tokens, new_tokens, rows = options.prompt_tokens, options.new_tokens, PROMPTS * GROUP
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model: Any = load_model(read_checkpoint(options.model), mesh, dtype=jnp.dtype("float32"), remat="none")
    config = make_config(options.model / "run", prompt_tokens, new_tokens)
    given = make_rollout([prompt_tokens] * PROMPTS, [new_tokens] * rows)
    numbers = iter(range(10**6))
    sample: Callable[[], tuple[Completion, ...]] = lambda: given.rollout.completions  # noqa: E731
    if name == "ours":
        learner: Any = Learner(config, LearnerInputs(model=model, reference=None, mesh=mesh))
        if options.part == "whole":
            engines = build_engines(options.model, model, context_tokens=prompt_tokens + new_tokens)

            def sample() -> tuple[Completion, ...]:
                step, limits = next(numbers), SamplingParams(new_tokens, ignore_stop=True)
                requests = [
                    Request(
                        tuple(prompt_ids(row // GROUP, prompt_tokens)),
                        limits,
                        SampleKey(0, step, row // GROUP, row % GROUP),
                    )
                    for row in range(rows)
                ]
                return tuple(engines.generate(requests))
    else:
        section = {"name": "tunix:grpo", "options": {"beta": 0.0}}
        algorithm = AlgorithmSection(group_size=GROUP, **section)
        config = config.model_copy(update={"algorithm": algorithm})
        width, texts = (
            prompt_tokens,
            [" ".join(map(str, prompt_ids(row // GROUP, prompt_tokens)[1:])) for row in range(rows)],  # it adds a BOS
        )
        cache = CacheConfig(width + new_tokens, SIZES["layers"], SIZES["kv_heads"], SIZES["head_dim"])
        sampler = Sampler(nnx.clone(model), IdTokenizer(), cache)
        learner = TunixLearner(config, LearnerInputs(model=model, reference=None, mesh=mesh))
        if options.part == "whole":

            def sample() -> tuple[Completion, ...]:
                limits = {"max_generation_steps": new_tokens, "max_prompt_length": width, "eos_tokens": [VOCABULARY]}
                out = sampler(texts, temperature=1.0, top_p=1.0, seed=next(numbers), **limits)
                assert all(len(tokens) == new_tokens for tokens in out.tokens)
                return given.rollout.completions

    def step() -> None:
        learner.update(replace(given, rollout=replace(given.rollout, completions=sample())))
        jax.block_until_ready(learner.params())
        if name == "ours" and options.part == "whole":
            install(engines, learner._updater.model, options.model)
            engines.forget_prefixes()

    return step


def serve_trl(options: argparse.Namespace) -> None:
    """Train with TRL, one step for each line of stdin after the first two."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2", unk_token="t1")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    prompts = [prompt_ids(number, options.prompt_tokens) for number in range(PROMPTS)]
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts]
    given = torch.randint(FIRST_TOKEN, VOCABULARY, (PROMPTS * GROUP, options.new_tokens)).tolist()
    began = 0.0

    def handed_on(asked: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [prompts[row // GROUP] for row in range(len(asked))]
        return {"prompt_ids": ids, "completion_ids": given, "logprobs": [[-6.2] * len(each) for each in given]}

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(number % 3) for number in range(len(completions))]

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal began
            if state.global_step == 2:
                print("ready", flush=True)
            if state.global_step >= 2 and not sys.stdin.readline():
                sys.exit(0)
            began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step > 2:
                print(json.dumps(time.perf_counter() - began), flush=True)

    settings = GRPOConfig(
        output_dir=str(options.model / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        max_steps=1000,
        learning_rate=1e-6,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    sampler = {"rollout_func": handed_on} if options.part == "update" else {}
    data = Dataset.from_dict({"prompt": texts})
    GRPOTrainer(model, rewards, settings, data, processing_class=tokenizer, callbacks=[Turns()], **sampler).train()


class Worker:
    """Drives the process of a contender."""

    def __init__(self, python: str, words: list[str]):
        command = [python, "-m", "benchmarks.steps", *words] if python == sys.executable else [python, __file__, *words]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self._answer() != "ready":
            pass

    def step(self) -> float:
        """Make a step in the process; returns its seconds."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        if line := self._process.stdout.readline():
            return line.strip()
        raise RuntimeError(f"the process of a contender ended with {self._process.wait()}")


def main() -> None:
    """Start all contenders, let them take turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python interpreter of an environment with trl")
    parser.add_argument("--part", choices=("whole", "update"), default="whole")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", choices=("ours", "tunix", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work == "trl":
        serve_trl(options)
        return
    if options.work:
        serve(jax_step(options.work, options))
        return
    from benchmarks.update import SIZES
    from tests.models.random_checkpoint import write_random_qwen3

    with tempfile.TemporaryDirectory() as directory:
        model = write_random_qwen3(Path(directory) / "model", vocab=VOCABULARY, **SIZES)
        sizes = [f"--prompt-tokens={options.prompt_tokens}", f"--new-tokens={options.new_tokens}"]
        words = [f"--part={options.part}", f"--model={model}", *sizes]
        pythons = {"ours": sys.executable, "tunix": sys.executable} | ({"trl": options.trl} if options.trl else {})
        workers = {name: Worker(python, [f"--work={name}", *words]) for name, python in pythons.items()}
        spent: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(options.rounds):
            for name, worker in workers.items():
                spent[name].append(worker.step())
        for name, seconds in spent.items():
            ratio = median(its / our for our, its in zip(spent["ours"], seconds, strict=True))
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            print(f"{options.part}  {name:6}  {median(seconds):.3f} s ({spread})  {ratio:.2f} times ours")


if __name__ == "__main__":
    main()
