"""The loaded model's numbers against an independent implementation, where they lie, and the model without values."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from tests.models.forward import compiled_logprobs, trainer_mesh
from tests.models.random_checkpoint import edit_tensors, write_random, write_random_qwen3
from tpu_grpo.config import LoraSection
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.lora import adapted_modules, apply_lora
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tunix_model import abstract_model, check_finite, is_abstract, load_model
from tpu_grpo.records.errors import CheckpointError, ConfigError

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, theta 5e5": {"tied": False, "rope_theta": 5e5},
    "two files, wide heads, theta 5e6": {"shards": 2, "head_dim": 32, "rope_theta": 5e6},
    "one key head per query head": {"tied": False, "kv_heads": 4, "layers": 1},
    "two files in bfloat16": {"dtype": ml_dtypes.bfloat16, "shards": 2},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_random_qwen3(tmp_path / "model")


@pytest.mark.parametrize(
    "sizes", [pytest.param((1, 1), marks=pytest.mark.slow), (2, 2)], ids=["1 device", "2 x 2 devices"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_the_reference(
    tmp_path: Path, tokens_BT: np.ndarray, variant: str, sizes: tuple[int, int]
) -> None:
    directory = write_random_qwen3(tmp_path, **VARIANTS[variant])
    model = load_model(read_checkpoint(directory), trainer_mesh(*sizes), dtype=jnp.float32, remat="none")
    np.testing.assert_allclose(
        compiled_logprobs(model, tokens_BT), reference_logprobs(directory, tokens_BT), atol=3e-5, rtol=0
    )


def test_parameters_are_split_over_the_mesh(directory: Path) -> None:
    mesh = trainer_mesh(2, 2)
    model = load_model(read_checkpoint(directory), mesh, dtype=jnp.float32, remat="none")
    leaves: dict[str, jax.Array] = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    }
    assert all(isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh for leaf in leaves.values())
    gate = leaves["layers.0.mlp.gate_proj.kernel"]
    assert gate.sharding == NamedSharding(mesh, PartitionSpec("fsdp", "tp"))
    stored = load_file(directory / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    shards = {shard.device.id: np.asarray(shard.data) for shard in gate.addressable_shards}
    np.testing.assert_array_equal(shards[mesh.devices[1, 0].id], stored.T[32:, :64])


def test_a_tied_checkpoint_may_still_hold_its_head(directory: Path, tokens_BT: np.ndarray) -> None:
    expected = reference_logprobs(directory, tokens_BT)
    edit_tensors(directory, **{"lm_head.weight": np.full((300, 64), 7, np.float32)})
    model = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    np.testing.assert_allclose(compiled_logprobs(model, tokens_BT), expected, atol=3e-5)


def test_load_refuses_meshes_that_do_not_fit(directory: Path) -> None:
    checkpoint = read_checkpoint(directory)
    with pytest.raises(ConfigError, match=r"tp must divide num_key_value_heads=2 .* got 4"):
        load_model(checkpoint, trainer_mesh(1, 4), dtype=jnp.float32, remat="none")
    with pytest.raises(ConfigError, match="must have axes fsdp and tp, got \\('tensor',\\)"):
        load_model(checkpoint, Mesh(np.array(jax.devices()), ("tensor",)), dtype=jnp.float32, remat="none")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_found_and_named(directory: Path, value: float) -> None:
    check_finite(load_model(read_checkpoint(directory), trainer_mesh(2, 2), dtype=jnp.float32, remat="none"), directory)
    broken = np.ones((64,), np.float32)
    broken[17] = value
    edit_tensors(directory, **{"model.layers.1.input_layernorm.weight": broken})
    model = load_model(read_checkpoint(directory), trainer_mesh(2, 2), dtype=jnp.float32, remat="none")
    with pytest.raises(
        CheckpointError, match=r"finite numbers, got NaN or infinity in 1 of \d+ .*layers\.1\.input_layern"
    ):
        check_finite(model, directory)


LORA = LoraSection(rank=4)


def leaves(model: nnx.Module) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        leaf = variable.get_raw_value()
        parts = str(leaf.sharding.devices_indices_map(leaf.shape))
        found[".".join(map(str, path))] = (type(variable), leaf.shape, leaf.dtype, leaf.sharding.mesh, parts)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        *(
            pytest.param(jnp.bfloat16, family, marks=() if family == "gemma2" else pytest.mark.slow)
            for family in FAMILIES
        ),
        *(
            pytest.param(jnp.float32, family, marks=() if family == "qwen3" else pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_an_abstract_model_is_the_loaded_one_without_values(tmp_path: Path, family: str, dtype: Any) -> None:
    directory, mesh = write_random(family, tmp_path / "model"), trainer_mesh(2, 2)
    loaded = load_model(read_checkpoint(directory), mesh, dtype=dtype, remat="decoder")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    checkpoint = abstract_checkpoint(directory)
    abstract = abstract_model(checkpoint, mesh, dtype=dtype, remat="decoder")
    assert leaves(abstract) == leaves(loaded)
    assert is_abstract(nnx.state(abstract))
    assert not is_abstract(nnx.state(loaded))
    modules = adapted_modules(checkpoint, LORA)
    adapted = apply_lora(abstract, modules, LORA, seed=0)
    assert leaves(adapted) == leaves(apply_lora(loaded, modules, LORA, seed=0))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(adapted)))
