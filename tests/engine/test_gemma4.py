"""Gemma 4 in the engine, against the trainer and float64, over more layers than its pattern is long."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.building import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    build_engine,
    engine_options,
    policy,
    requests,
    trainer_logprobs,
)
from tests.models.gemma4 import write_shape
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.models.reference import reference_logprobs

AGAINST_TRAINER, AGAINST_FLOAT64 = 3e-5, 6e-5
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
        asked = requests(PROMPTS, sampling)
        completions = engine.generate(asked)
        for request, completion, trainer_TV in zip(
            asked, completions, trainer_logprobs(model, asked, completions), strict=True
        ):
            ids, first = [*request.token_ids, *completion.token_ids], len(request.token_ids) - 1
            float64_TV = reference_logprobs(directory, np.array([ids]))[0, first:-1]
            sampled = np.arange(len(completion.token_ids)), completion.token_ids
            assert np.abs(completion.logprobs - trainer_TV[sampled]).max() <= AGAINST_TRAINER
            assert np.abs(completion.logprobs - float64_TV[sampled]).max() <= AGAINST_FLOAT64
            assert np.abs(trainer_TV - float64_TV).max() <= AGAINST_FLOAT64
            if sampling is GREEDY:
                assert completion.token_ids.tolist() == float64_TV.argmax(-1).tolist()


def test_layers_are_cached_in_the_shapes_of_their_own_heads(tmp_path: Path) -> None:
    """Of 8 layers two have no window: 1 head of 32 numbers, and not 2 of 16; keys and values alternate."""
    directory = write_shape(tmp_path, "26b")
    specs = Engine.build(directory, engine_mesh(jax.devices()[:1]), engine_options(**SIZES)).cache_specs
    assert [spec.shape[2:] for spec in specs] == [(2, 2, 16), (1, 2, 32), *[(2, 2, 16)] * 5, (1, 2, 32)]
