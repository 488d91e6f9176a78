"""Gemma 3 and 4 in the engine, against the trainer and float64, over more layers than their patterns are long."""

from pathlib import Path
from typing import Any

import jax
import pytest
from sgl_jax.srt.models.registry import ModelRegistry

from tests.engine.building import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    build_engine,
    check_against_float64,
    engine_options,
    policy,
    requests,
    tokens,
)
from tests.models import gemma3, gemma4
from tpu_grpo.engine.engine import Engine, engine_mesh

SIZES: dict[str, Any] = {"batch_paddings": (8,), "prefill_tokens": 64}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "shape", "tensor"),
    [
        (gemma3, "4b", 4),
        (gemma4, "31b", 2),
        pytest.param(gemma3, "1b", 1, marks=pytest.mark.slow),
        pytest.param(gemma3, "27b", 2, marks=pytest.mark.slow),
        pytest.param(gemma4, "26b", 4, marks=pytest.mark.slow),
        pytest.param(gemma4, "values", 1, marks=pytest.mark.slow),
    ],
)
def test_engine_trainer_and_float64_agree(tmp_path: Path, family: Any, shape: str, tensor: int) -> None:
    """Sampled log-probabilities, and the greedy tokens of every prompt."""
    directory = family.write_shape(tmp_path, shape)
    model = policy(directory)
    engine = build_engine(directory, model, tensor, **SIZES)
    for sampling in (SAMPLED, GREEDY):
        check_against_float64(directory, model, engine, requests(PROMPTS, sampling))


@pytest.mark.full
def test_a_window_longer_than_any_row_is_none(tmp_path: Path) -> None:
    """The longest that a config.json may have; the trainer's and the engine's comparisons do not overflow."""
    directory = gemma3.write_shape(
        tmp_path, "1b", layers=2, sliding_window=2**31 - 1, layer_types=["sliding_attention"] * 2
    )
    model = policy(directory)
    check_against_float64(directory, model, build_engine(directory, model, **SIZES), requests(PROMPTS[:2]))


def test_sglang_jax_still_has_no_gemma_3() -> None:
    """When this fails, take its model and remove engine/gemma3.py, if the other tests hold."""
    assert "Gemma2ForCausalLM" in ModelRegistry.get_supported_archs()
    assert "Gemma3ForCausalLM" not in ModelRegistry.get_supported_archs()


@pytest.mark.slow
def test_the_text_model_of_one_that_sees_images_samples_the_same(tmp_path: Path) -> None:
    """sglang-jax would serve such a checkpoint without its prefix cache and without chunks."""
    shape = {"layers": 7, "layer_types": None}
    plain, seeing = (gemma3.write_shape(tmp_path / name, "1b", **shape) for name in ("text", "images"))
    found = []
    for directory in (plain, gemma3.as_seen_with_images(seeing)):
        engine = build_engine(directory, **SIZES)
        first = engine.generate(requests())
        again = engine.generate(requests())
        found.append((tokens(first), tokens(again), [completion.cached_tokens for completion in again]))
    assert found[0] == found[1]
    assert max(found[1][2]) > 0


def test_layers_are_cached_in_the_shapes_of_their_own_heads(tmp_path: Path) -> None:
    """Of 8 layers two have no window: 1 head of 32 numbers, and not 2 of 16; keys and values alternate."""
    directory = gemma4.write_shape(tmp_path, "26b")
    specs = Engine.build(directory, engine_mesh(jax.devices()[:1]), engine_options(**SIZES)).cache_specs
    assert [spec.shape[2:] for spec in specs] == [(2, 2, 16), (1, 2, 32), *[(2, 2, 16)] * 5, (1, 2, 32)]
