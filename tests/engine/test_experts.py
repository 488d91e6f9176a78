"""Mixture of experts: the layer against one token at a time in NumPy, and the experts that an engine returns against a
float64 router, under every way that a token is computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.engine.building import SAMPLED, build_engine, install, policy, requests
from tests.models.forward import reference_experts
from tests.models.random_checkpoint import write_random
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.engine.experts import AXIS, Experts
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, Request, routing_dtype

TOKENS, WIDTH, EXPERTS, PER_TOKEN, HIDDEN = 10, 6, 8, 3, 5


Arrays = dict[str, np.ndarray]


def drawn(*, crowded: bool) -> Arrays:
    """Tokens, the weights and numbers of their experts, and what these multiply with."""
    rng = np.random.default_rng(1)
    x, logits = rng.standard_normal((TOKENS, WIDTH)), rng.standard_normal((TOKENS, EXPERTS))
    if crowded:  # all tokens choose the same three, two of them on one device of four
        logits[:, [0, 1, 6]] += 10
    chosen, weights = np.argsort(-logits, axis=1)[:, :PER_TOKEN], rng.random((TOKENS, PER_TOKEN))
    gate, up = rng.standard_normal((2, EXPERTS, WIDTH, HIDDEN))
    down = rng.standard_normal((EXPERTS, HIDDEN, WIDTH))
    return {"x": x, "weights": weights, "chosen": chosen, "gate": gate, "up": up, "down": down}


def reference(
    x: np.ndarray, weights: np.ndarray, chosen: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    out = np.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], chosen[t], strict=True):
            gated = x[t] @ gate[e]
            out[t] += weight * ((gated / (1 + np.exp(-gated)) * (x[t] @ up[e])) @ down[e])
    return out


def computed(devices: int, given: Arrays) -> np.ndarray:
    """What a layer of experts makes of them on so many devices."""
    mesh = engine_mesh(jax.devices()[:devices])
    with jax.set_mesh(mesh):
        layer = Experts(
            hidden_size=WIDTH, num_experts=EXPERTS, intermediate_dim=HIDDEN, mesh=mesh, weight_dtype=jnp.float32
        )
        for param, name in ((layer.wi_0, "gate"), (layer.wi_1, "up"), (layer.wo, "down")):
            param.set_value(jax.device_put(given[name].astype(np.float32), NamedSharding(mesh, P(AXIS))))
        by_token, types = (
            NamedSharding(mesh, P("data", None)),
            {"x": "float32", "weights": "float32", "chosen": "int32"},
        )
        inputs = [jax.device_put(given[name].astype(dtype), by_token) for name, dtype in types.items()]
        return nnx.jit(lambda m, *inputs: m(*inputs, out_sharding=by_token))(layer, *inputs)


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_token_gets_its_experts(devices: int, crowded: bool) -> None:
    given = drawn(crowded=crowded)
    np.testing.assert_allclose(computed(devices, given), reference(**given), atol=1e-5)


# --- the experts that served each token -------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"batch_paddings": (8,), "prefill_tokens": 64, "return_experts": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 experts, 3 for a token."""
    return write_random("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", scale=0.3)


def asking(group: int = 3, **sampling: Any) -> list[Request]:
    return [replace(r, return_experts=True) for r in requests(sampling=replace(SAMPLED, **sampling), group=group)]


def sets(experts: np.ndarray) -> np.ndarray:
    return np.sort(experts, axis=-1)


def check_experts(checkpoint: Path, asked: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Every token that was computed has the experts of the float64 router, and the last sampled one has none."""
    for request, completion in zip(asked, completions, strict=True):
        ids = [*request.token_ids, *completion.token_ids][:-1]
        assert completion.experts is not None
        assert completion.experts.dtype == np.uint8
        np.testing.assert_array_equal(sets(completion.experts), sets(reference_experts(checkpoint, np.array([ids]))[0]))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"prefill_tokens": 16, "page_size": 4},  # prompts of 37 and 31 tokens are cut
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
        pytest.param({"page_size": 16, "max_running_requests": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_are_those_of_a_float64_router(checkpoint: Path, model: nnx.Module, options: dict[str, Any]) -> None:
    engine = build_engine(checkpoint, model, **(SMALL | options))
    asked = asking()
    completions = engine.generate(asked)
    assert (max(c.cached_tokens for c in completions) > 0) == options.get("prefix_cache", True)
    check_experts(checkpoint, asked, completions)
    again = engine.generate(asked)  # whole prompts are cached now
    for before, after in zip(completions, again, strict=True):
        np.testing.assert_array_equal(before.experts, after.experts)


@pytest.mark.full
def test_new_weights_bring_their_own_experts(checkpoint: Path, model: nnx.Module, tmp_path: Path) -> None:
    """And a table that kept those of the old weights would not go unnoticed."""
    other = write_random("qwen3_moe", tmp_path / "other", scale=0.3, seed=5)
    engine = build_engine(checkpoint, model, **SMALL)
    asked = asking(1)
    engine.generate(asked)
    install(engine, policy(other))
    check_experts(other, asked, engine.generate(asked))
    table = engine._scheduler._experts
    assert table is not None
    table.forget()
    with pytest.raises(AssertionError, match="never computed since the cache was emptied"):
        engine.generate(asked)


@pytest.mark.full
def test_who_does_not_ask_gets_none(checkpoint: Path, model: nnx.Module) -> None:
    engine = build_engine(checkpoint, model, **SMALL)
    mixed = [replace(request, return_experts=index % 2 == 0) for index, request in enumerate(asking(1))]
    completions = engine.generate(mixed)
    assert [c.experts is None for c in completions] == [False, True, False, True]
    check_experts(checkpoint, mixed[::2], completions[::2])


def test_an_engine_that_keeps_no_experts_refuses(checkpoint: Path, model: nnx.Module) -> None:
    engine = build_engine(checkpoint, model, batch_paddings=(8,))
    assert engine.expert_layout is None
    with pytest.raises(RequestError, match="request 0: this engine keeps no experts"):
        engine.generate(asking())


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_the_smallest_type_has_room_for_none(experts: int, dtype: type) -> None:
    assert routing_dtype(experts) == dtype
    assert np.iinfo(dtype).max >= experts  # experts are counted from 0, so that this one is none
