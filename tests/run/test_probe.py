"""A planted error in the engines' weights ends the run with the leaf's name; a sound run passes the probe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.several.runs import lines, settings, train, write_files
from tpu_grpo.config import RolloutSection, RunConfig, parse_config
from tpu_grpo.models.families.leaves import WeightRule
from tpu_grpo.records.errors import WeightsError
from tpu_grpo.run.engines import probe_bound
from tpu_grpo.weights import plan
from tpu_grpo.weights.sync import WeightSync

LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("settings", "float32", "bfloat16"),
    [({}, 1e-3, 0.2), ({"kv_dtype": "fp8"}, 0.5, 0.5), ({"weights_dtype": "int8"}, 0.5, 0.5)],
)
def test_the_bound_follows_the_types_of_model_and_engine(
    settings: dict[str, Any], float32: float, bfloat16: float
) -> None:
    for dtype, bound in (("float32", float32), ("bfloat16", bfloat16)):
        assert probe_bound(dtype, RolloutSection(**settings)) == bound


Weights = dict[str, jax.Array]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(write_files(tmp_path / "files"))
    meshes = {"sampler": {"tensor": 4}, "probe_every": 2}
    return parse_config(settings(tmp_path / "run", run={"max_steps": 4}, meshes=meshes))


def plant(monkeypatch: pytest.MonkeyPatch, at_sync: int, change: Callable[[Weights, Weights], Weights]) -> None:
    """Let the sync numbered ``at_sync`` hand over other leaves: ``change(its leaves, those of the sync before)``."""
    original = WeightSync.__call__
    seen: list[Weights] = []

    def sync(self: WeightSync, source: Any) -> Any:
        before = {name: jnp.copy(array) for name, array in seen[-1].items()} if seen else {}
        weights, result = original(self, source)
        seen.append(weights)
        return (weights | change(weights, before) if len(seen) == at_sync + 1 else weights), result

    monkeypatch.setattr(WeightSync, "__call__", sync)


def swapped(weights: Weights, before: Weights) -> Weights:
    del before
    gate, up = f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"
    return {gate: weights[up], up: weights[gate]}


def transposed(weights: Weights, before: Weights) -> Weights:
    """Query heads and their width in the other order, in the same shape."""
    del before
    name = f"{LAYER}.self_attn.q_proj.weight"
    leaf = np.asarray(weights[name])
    turned = leaf.reshape(leaf.shape[0], 4, -1).transpose(0, 2, 1).reshape(leaf.shape)
    return {name: jax.device_put(turned, weights[name].sharding)}


def not_updated(weights: Weights, before: Weights) -> Weights:
    del weights
    name = f"{LAYER}.mlp.down_proj.weight"
    return {name: before[name]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "at_sync", "name"),
    [
        (swapped, 0, f"{LAYER}.mlp.(gate|up)_proj.weight"),
        pytest.param(transposed, 0, f"{LAYER}.self_attn.q_proj.weight", marks=pytest.mark.slow),
        pytest.param(not_updated, 2, f"{LAYER}.mlp.down_proj.weight", marks=pytest.mark.slow),
    ],
)
def test_a_planted_error_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, change: Any, at_sync: int, name: str
) -> None:
    plant(monkeypatch, at_sync, change)
    with pytest.raises(WeightsError, match=rf"after sync {at_sync} the engines must .* the sampler's {name} is off by"):
        train(config)


@pytest.mark.full
def test_a_rule_that_is_wrong_is_found_by_the_tokens(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the leaf comparison then say the same; what is sampled does not."""
    original = plan.plan_move

    def negated(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return -leaf.reshape(shape)

    def move(sources: Any, rule: WeightRule, target: str, *more: Any) -> Any:
        if target.endswith("o_proj.weight"):
            rule = replace(rule, transform=negated)
        return original(sources, rule, target, *more)

    monkeypatch.setattr(plan, "plan_move", move)
    with pytest.raises(WeightsError, match="every leaf is what the family's rules say, so the two sides compute"):
        train(config)


@pytest.mark.full
def test_a_sound_run_is_probed_and_compiles_no_more(config: RunConfig) -> None:
    train(config)
    steps = lines(config.run_dir)
    assert [line["step"] for line in steps if "agreement/probe" in line] == [2, 4]
    assert all(0.0 <= line.get("agreement/probe", 0.0) <= 1e-5 for line in steps)
    assert len({line["compile/count"] for line in steps}) == 1  # the first probe after an update, at step 2, neither
