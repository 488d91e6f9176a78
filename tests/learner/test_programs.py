"""Programs lowered without values are, to the letter, those that a learner runs; and the rows of a pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests.learner.toy import interpreted_flash, make_config, make_learner, make_mesh, make_model
from tpu_grpo.config import RunConfig
from tpu_grpo.learner import LearnerInputs, LearnerParts, build_parts
from tpu_grpo.learner.building import row_shape
from tpu_grpo.learner.forward import logprobs


def described(model: nnx.Module) -> nnx.Module:
    definition, state = nnx.split(model)
    return nnx.merge(definition, jax.tree.map(spec, state))


def spec(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def held(tree: Any) -> list[tuple[Any, ...]]:
    """Shape, type and, device by device, part of every leaf."""
    leaves = jax.tree.leaves_with_path(tree)
    return [(str(path), x.shape, x.dtype, str(x.sharding.devices_indices_map(x.shape))) for path, x in leaves]


def assert_lowers_the_same(config: RunConfig, mesh: Mesh, model: nnx.Module, inputs: LearnerInputs) -> LearnerParts:
    """Compare the programs of a learner with those of parts whose inputs are described, and return these parts."""
    learner, programs = make_learner(config, mesh, model=model), build_parts(config, inputs)
    shape, updater, shared = learner._parts.shape, learner._updater, {"final_norm.w"}
    batch = learner._parts.batches.place(shape.empty(shape.micro_batch))
    assert held(programs.batch) == held(batch)
    assert held(programs.updater.state) == held(updater.state)
    with interpreted_flash(), mesh:
        gradients, step = updater.lower_accumulate(batch), updater.lower_step(shared)
        lowered = logprobs.lower(*nnx.split(updater.model), batch.rows, temperature=1.0, mesh=mesh)
    with interpreted_flash():
        assert programs.lower_gradients().as_text() == gradients.as_text()
        assert programs.lower_step(shared).as_text() == step.as_text()
        assert programs.lower_logprobs().as_text() == lowered.as_text()
    return programs


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "flash_block"),
    [
        pytest.param({}, None, marks=pytest.mark.slow),
        ({"beta": 0.1, "micro_batch_prompts": 2}, None),
        pytest.param({"old_policy": "trainer", "iterations": 2}, None, marks=pytest.mark.slow),
        pytest.param({"old_policy": "trainer"}, None, marks=pytest.mark.slow),
        ({}, 128),
    ],
    ids=["plain", "reference and accumulation", "old policy", "own old policy", "flash attention"],
)
def test_a_described_learners_programs_are_the_learners(
    tmp_path: Path, algorithm: dict[str, Any], flash_block: int | None
) -> None:
    config, mesh = make_config(tmp_path, {"algorithm": {"group_size": 2, **algorithm}}), make_mesh()
    model, abstract = (make_model(mesh, flash_block=flash_block) for _ in range(2))
    reference = described(make_model(mesh)) if config.algorithm.beta else None
    assert_lowers_the_same(config, mesh, model, LearnerInputs(described(abstract), reference, mesh))


# --- the rows of a pass -----------------------------------------------------------------------------------------------


SMALL, LARGE = (1024, 4096), (1025, 4096)
"""A matrix of 4 x 2**20 parameters, and a larger one."""


def config_of(directory: Path, algorithm: dict[str, Any]) -> RunConfig:
    """64 rows of 96 tokens: an eighth are 8 rows."""
    tree = {"data": {"prompts_per_step": 8, "max_prompt_tokens": 32}, "rollout": {"max_new_tokens": 64}}
    return make_config(directory, tree | {"algorithm": {"group_size": 8, **algorithm}})


@pytest.mark.parametrize(
    ("matrix", "platform", "devices", "algorithm", "rows"),
    [
        (SMALL, "cpu", 1, {}, 2),
        (SMALL, "cpu", 2, {}, 4),
        (SMALL, "cpu", 1, {"row_tokens": 384}, 1),
        (SMALL, "cpu", 1, {"micro_batch_prompts": 1}, 8),
        (LARGE, "cpu", 1, {}, 8),
        (SMALL, "tpu", 1, {}, 8),
    ],
)
def test_rows_of_a_pass(
    tmp_path: Path, matrix: tuple[int, int], platform: str, devices: int, algorithm: dict[str, Any], rows: int
) -> None:
    """2 x 96 = 192 tokens a device for a small model on CPUs; a row of 384 cannot be less than a row."""
    model = nnx.eval_shape(lambda: nnx.Linear(*matrix, use_bias=False, rngs=nnx.Rngs(0)))
    mesh: Any = SimpleNamespace(
        shape={"fsdp": devices, "tp": 1}, devices=np.array([[SimpleNamespace(platform=platform)]] * devices)
    )
    assert row_shape(config_of(tmp_path, algorithm), model, mesh).micro_batch == rows
