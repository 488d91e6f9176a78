"""Gemma 4 in the engine, against the trainer and float64, over more layers than its pattern is long."""

from pathlib import Path
from typing import Any

import jax
import pytest

from tests.engine.building import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    build_engine,
    check_against_float64,
    engine_options,
    policy,
    requests,
)
from tests.models.gemma4 import write_shape
from tpu_grpo.engine.engine import Engine, engine_mesh

SIZES: dict[str, Any] = {"batch_paddings": (8,), "prefill_tokens": 64}


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "tensor"),
    [("31b", 2), pytest.param("26b", 4, marks=pytest.mark.slow), pytest.param("values", 1, marks=pytest.mark.slow)],
)
def test_engine_trainer_and_float64_agree(tmp_path: Path, shape: str, tensor: int) -> None:
    """Sampled log-probabilities, and the greedy tokens of every prompt."""
    directory = write_shape(tmp_path, shape)
    model = policy(directory)
    engine = build_engine(directory, model, tensor, **SIZES)
    for sampling in (SAMPLED, GREEDY):
        check_against_float64(directory, model, engine, requests(PROMPTS, sampling))


def test_layers_are_cached_in_the_shapes_of_their_own_heads(tmp_path: Path) -> None:
    """Of 8 layers two have no window: 1 head of 32 numbers, and not 2 of 16; keys and values alternate."""
    directory = write_shape(tmp_path, "26b")
    specs = Engine.build(directory, engine_mesh(jax.devices()[:1]), engine_options(**SIZES)).cache_specs
    assert [spec.shape[2:] for spec in specs] == [(2, 2, 16), (1, 2, 32), *[(2, 2, 16)] * 5, (1, 2, 32)]
