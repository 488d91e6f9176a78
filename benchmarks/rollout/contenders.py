"""The compared samplers: this package's engines, sglang-jax's scheduler with its own attention, and Tunix's sampler."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler

from benchmarks.rollout.workloads import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    LONGEST,
    NO_FILTER,
    PROMPT_TOKENS,
    VOCABULARY,
    Workload,
    make_requests,
    prompt_ids,
)
from tests.engine.building import engine_options, install
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.scheduler import total_use
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.stages import SamplingParams


def build_engines(
    directory: Path, model: nnx.Module, devices: Sequence[Any] | None = None, rows: int = 64, **changed: Any
) -> Replicas:
    """Build and compile an engine on each of ``devices``, with ``rows`` rows in all; by default two engines on one
    device, as a run on a CPU has."""
    devices = jax.devices()[:1] * 2 if devices is None else devices
    sizes = {"context_tokens": PROMPT_TOKENS + LONGEST, "prefill_tokens": 512} | changed
    options = engine_options(max_running_requests=rows // len(devices), **sizes)
    engines = Replicas.build(directory, devices, 1, options, Hosts())
    install(engines, model, directory)
    engines.compile_all()
    return engines


def engine_workload(engines: Replicas, lengths: Sequence[int], sampling: SamplingParams = NO_FILTER) -> Workload:
    """Return a workload that clears the prefix caches, as a weight sync does, and generates with our engines."""

    def run(number: int) -> int:
        engines.forget_prefixes()
        completions = engines.generate(make_requests(lengths, number, sampling))
        return sum(len(completion.token_ids) for completion in completions)

    return run


def host_times(engines: Replicas, run: Workload) -> str:
    """Run one more generation; returns the host's microseconds per sampled token by stage, as text."""
    before = total_use(engine.use for engine in engines.engines.values())
    tokens, use = run(10_000), total_use(engine.use for engine in engines.engines.values()) - before
    parts = (f"{stage} {1e6 * getattr(use, stage) / tokens:.1f}" for stage in ("schedule", "launch", "wait", "collect"))
    return f"{use.prefills} prefills, {use.steps} steps in {use.launches} launches; us per token: {', '.join(parts)}"


class IdTokenizer:
    """A tokenizer for Tunix's sampler, which takes strings; here they are decimal ids, separated by spaces."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the ids in a string."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return no text, because nothing reads it."""
        return ""

    def bos_id(self) -> int:
        """Return an id with which no prompt begins."""
        return 2

    def eos_id(self) -> int:
        """Return an id beyond the vocabulary, which is never sampled."""
        return VOCABULARY

    def pad_id(self) -> int:
        """Return the id that pads prompts on the left."""
        return 0


def tunix_workload(model: nnx.Module, lengths: Sequence[int]) -> Workload:
    """Return a workload of Tunix's sampler, which samples all rows to the longest length, with the least cache."""
    longest, width = max(lengths), PROMPT_TOKENS + 2
    cache = CacheConfig(cache_size=width + longest, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    sampler = Sampler(model, IdTokenizer(), cache)
    texts = [" ".join(map(str, prompt_ids(row // GROUP))) for row in range(len(lengths))]

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
