"""An abstract model is the loaded one without values: same names, shapes, dtypes and shardings, for every family."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models.forward import trainer_mesh
from tests.models.random_checkpoint import write_random
from tpu_grpo.config import LoraSection
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.lora import adapted_modules, apply_lora
from tpu_grpo.models.tunix_model import abstract_model, is_abstract, load_model
from tpu_grpo.records.errors import CheckpointError

LORA = LoraSection(rank=4)


def leaves(model: nnx.Module) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        leaf = variable.get_raw_value()
        parts = str(leaf.sharding.devices_indices_map(leaf.shape))
        found[".".join(map(str, path))] = (type(variable), leaf.shape, leaf.dtype, leaf.sharding.mesh, parts)
    return found


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        *(
            pytest.param(jnp.bfloat16, family, marks=pytest.mark.slow if family in ("qwen2", "llama") else ())
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


def test_a_model_needs_its_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        abstract_checkpoint(tmp_path)
