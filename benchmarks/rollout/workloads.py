"""The model and the workloads of the compared samplers: 8 prompts of 30 tokens x 8 samples, three kinds of lengths.

Each request has its own limit of tokens and ignores stop tokens, so that all samplers sample the same lengths.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.stages import Request, SampleKey, SamplingParams

PROMPTS, GROUP, PROMPT_TOKENS, LONGEST, VOCABULARY = 8, 8, 30, 256, 512
LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 32
SPREAD, GSM8K_SPREAD = 0.9, 0.49
"""Standard deviations of the logarithm of lengths: of a long tail, and of the published solutions of GSM8K."""
NO_FILTER = SamplingParams(max_new_tokens=LONGEST, ignore_stop=True)
Workload = Callable[[int], int]
"""Runs the generation of a given number, which seeds the sampling; returns how many tokens were sampled."""


def drawn_lengths(median: float, spread: float, rows: int = PROMPTS * GROUP) -> list[int]:
    """Draw log-normal lengths, cut at LONGEST; one of them is LONGEST exactly."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, rows)
    lengths = np.clip(drawn.round().astype(int), 4, LONGEST)
    lengths[lengths.argmax()] = LONGEST
    return lengths.tolist()


WORKLOADS = {
    "even": [64] * PROMPTS * GROUP,
    "uneven": drawn_lengths(36.6, SPREAD),
    "as GSM8K": drawn_lengths(90, GSM8K_SPREAD),
}


def prompt_ids(prompt: int) -> tuple[int, ...]:
    """Return the ids of a prompt; prompts differ in their first token."""
    return tuple(range(10 + prompt, 10 + prompt + PROMPT_TOKENS))


def make_requests(lengths: Sequence[int], number: int, sampling: SamplingParams = NO_FILTER) -> list[Request]:
    """Return the requests of generation ``number``, with GROUP samples of each prompt."""
    return [
        Request(
            prompt_ids(row // GROUP),
            SamplingParams(length, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, True),
            SampleKey(0, number, row // GROUP, row % GROUP),
        )
        for row, length in enumerate(lengths)
    ]


def make_model(directory: Path) -> nnx.Module:
    """Write a 4-layer, 256-wide Qwen3 with random weights, and load it in float32 on the first device."""
    write_random_qwen3(
        directory,
        layers=LAYERS,
        hidden=256,
        heads=8,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate=768,
        vocab=VOCABULARY,
    )
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return load_model(read_checkpoint(directory), mesh, dtype=jnp.float32, remat="none")
