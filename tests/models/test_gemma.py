"""Gemma 3 and 4 against float64: what the models compute, and their gradients."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import gemma3, gemma4
from tests.models.forward import compiled_logprobs, logprobs, trainer_mesh
from tests.models.random_checkpoint import edit_config
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families.family import Remat
from tpu_grpo.models.reference import Weights, read_weights, reference_logprobs
from tpu_grpo.models.tunix_model import by_name, load_model

AGAINST_FLOAT64 = 6e-5
SLOW = pytest.mark.slow
SHORT: dict[str, Any] = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = gemma4.SHAPES["26b"]["rope_parameters"]


def loaded(directory: Path, remat: Remat = "none") -> Any:
    return load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat=remat)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "shape"), [(family, shape) for family in (gemma3, gemma4) for shape in family.SHAPES]
)
def test_the_model_computes_what_float64_does(tmp_path: Path, tokens_BT: np.ndarray, family: Any, shape: str) -> None:
    directory = family.write_shape(tmp_path, shape)
    expected = reference_logprobs(directory, tokens_BT)
    assert np.abs(compiled_logprobs(loaded(directory), tokens_BT) - expected).max() <= AGAINST_FLOAT64


CHANGED: dict[Any, list[dict[str, Any]]] = {
    gemma3: [
        {"sliding_window": 11},
        {"rope_theta": 1e4},
        {"rope_local_base_freq": 1e6},
        {"rope_scaling": None},
        {"query_pre_attn_scalar": 17},
        {"sliding_window_pattern": 5},
        {"layer_types": ["sliding_attention"] * 12},
        {"rms_norm_eps": 1e-2},
    ],
    gemma4: [
        {"sliding_window": 11},
        {"final_logit_softcapping": None},
        {"top_k_experts": 2},
        {"rms_norm_eps": 1e-2},
        *(
            {"rope_parameters": {**ROPE, kind: {**ROPE[kind], **rope}}}
            for kind, rope in (
                ("sliding_attention", {"rope_theta": 1e5}),
                ("full_attention", {"rope_theta": 1e3}),
                ("full_attention", {"partial_rotary_factor": 1.0}),
            )
        ),
    ],
}


@pytest.mark.parametrize(
    ("family", "changed"),
    [(family, changed) for family, each in CHANGED.items() for changed in each],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_setting_changes_what_is_compared(
    tmp_path: Path, tokens_BT: np.ndarray, family: Any, changed: dict[str, Any]
) -> None:
    directory = gemma3.write_shape(tmp_path, "4b") if family is gemma3 else gemma4.write_shape(tmp_path, "26b", **SHORT)
    before = reference_logprobs(directory, tokens_BT)
    edit_config(directory, **changed)
    assert np.abs(reference_logprobs(directory, tokens_BT) - before).max() > 20 * AGAINST_FLOAT64


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "shape", "changed"),
    [
        *(pytest.param(gemma3, shape, {"layers": 7}, marks=SLOW) for shape in ("1b", "4b")),
        (gemma3, "27b", {}),
        (gemma4, "26b", SHORT),
        pytest.param(gemma4, "31b", SHORT, marks=SLOW),
    ],
)
def test_its_gradients_are_the_slopes_of_float64(
    tmp_path: Path, tokens_BT: np.ndarray, family: Any, shape: str, changed: dict[str, Any]
) -> None:
    """Along a random direction for each kind of tensor; central differences in float64 have errors below 1e-7."""
    directory, tokens_BT = family.write_shape(tmp_path, shape, **changed), tokens_BT[:1, :24]
    checkpoint, weights = read_checkpoint(directory), read_weights(directory)

    def of(logps_BTV: Any) -> Any:
        return np.take_along_axis(logps_BTV[:, :-1], tokens_BT[:, 1:, None], -1).mean()

    def loss(model: nnx.Module) -> jax.Array:
        return jnp.take_along_axis(logprobs(model, tokens_BT)[:, :-1], tokens_BT[:, 1:, None], -1).mean()

    gradients = by_name(nnx.jit(nnx.grad(loss))(loaded(directory, "decoder")))
    slopes: Weights = {}
    for leaf in checkpoint.family.all_leaves(checkpoint.config):
        slopes |= leaf.publish(np.asarray(gradients[leaf.source], np.float64))
    assert slopes.keys() == weights.keys()
    kind = (lambda name: re.sub(r"\.\d+\.", ".*.", name)) if family is gemma3 else str  # Gemma 4's two layers differ
    rng = np.random.default_rng(0)
    for each in sorted({kind(name) for name in slopes}):
        way = {name: rng.standard_normal(slopes[name].shape) for name in slopes if kind(name) == each}

        def value(step: float, way: Weights = way) -> float:
            moved = {name: weights[name] + step * along for name, along in way.items()}
            return of(reference_logprobs(directory, tokens_BT, changed=weights | moved))

        expected = (value(1e-5) - value(-1e-5)) / 2e-5
        assert sum((slopes[name] * along).sum() for name, along in way.items()) == pytest.approx(
            expected, rel=2e-4, abs=2e-6
        ), each
