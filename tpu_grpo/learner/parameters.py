"""A model's parameters: their names, which of them are trained, copies, casts, digests and checksums.

The type of a variable tells this package and Tunix whether the variable is trained:

nnx.LoRAParam   adapters; only these are trained in a model that has them
nnx.Param       trained in a model without adapters
Frozen          never trained
"""

import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tpu_grpo.config import ModelSection, parse_layers
from tpu_grpo.hosts.sharded_arrays import bit_sum, from_shards, leaf_numbers
from tpu_grpo.models.tunix_model import by_name, cast, dotted

Values = dict[str, Any]
"""Arrays, or their descriptions, by the dotted names of parameters."""


BUFFERS = ("skip_scale",)
"""Parameters in Tunix's models that are buffers in transformers, which are not trained: Gemma 4's layers."""


class Frozen(nnx.Variable[Any]):
    """A parameter that is not trained: it gets no gradient and no optimizer state."""


# --- which are trained -----------------------------------------------------------------------------------------------


def freeze_untrained(model: nnx.Module, section: ModelSection) -> None:
    """Freeze, in place, every parameter outside of ``model.train_layers``, if this is set, and those in BUFFERS."""
    layers = None if section.train_layers is None else parse_layers(section.train_layers)
    for path, module in list(nnx.iter_modules(model)):
        trained = layers is None or (path[:1] == ("layers",) and len(path) > 1 and path[1] in layers)
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param) and (not trained or name in BUFFERS):
                setattr(module, name, Frozen(value.get_raw_value(), **value.get_metadata()))


def trained_type(model: nnx.Module) -> type[nnx.Variable[Any]]:
    """Return the type of the trained parameters: nnx.LoRAParam if the model has adapters, else nnx.Param."""
    return nnx.LoRAParam if nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)) else nnx.Param


def parameters(model: nnx.Module) -> nnx.State:
    """Return all of a model's parameters, trained or not."""
    return nnx.state(model, nnx.Any(nnx.Param, Frozen))


def frozen_leaves(params: nnx.State) -> frozenset[str]:
    """Return the dotted names of the leaves that no update changes."""
    kinds = {dotted(path): type(leaf) for path, leaf in nnx.to_flat_state(params)}
    adapters = nnx.LoRAParam in kinds.values()
    return frozenset(name for name, kind in kinds.items() if kind is Frozen or (adapters and kind is not nnx.LoRAParam))


# --- casts and copies ------------------------------------------------------------------------------------------------


def cast_to_compute(model: nnx.Module, section: ModelSection) -> Values:
    """Cast all parameters to ``model.dtype``, in place. Return the trained parameters by name, in the type in which
    the optimizer updates them, ``model.param_dtype``."""
    compute, stepped_type = jnp.dtype(section.dtype), jnp.dtype(section.param_dtype)
    trained = by_name(nnx.state(model, trained_type(model)))
    stepped = {name: cast(leaf, stepped_type) for name, leaf in trained.items()}
    nnx.update(model, jax.tree.map(lambda leaf: cast(leaf, compute), parameters(model)))
    return stepped


def own_copy(model: nnx.Module, names: Collection[str]) -> nnx.Module:
    """Return a model with copies of the named parameters; it shares all other arrays with the given model."""
    copied = nnx.clone(model)
    state = nnx.to_flat_state(nnx.state(copied, nnx.Param))
    own = [(path, leaf.replace(_copy(leaf.get_raw_value()))) for path, leaf in state if dotted(path) in names]
    nnx.update(copied, nnx.from_flat_state(own))
    return copied


def copy_values(model: nnx.Module, source: nnx.Module, names: Collection[str]) -> None:
    """Set the named parameters to copies of those in ``source``, one by one to save memory."""
    values = by_name(nnx.state(source, nnx.Param))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if (name := dotted(path)) in names:
            nnx.update(model, nnx.from_flat_state([(path, leaf.replace(_copy(values[name])))]))


def _copy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.copy()


def placed(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return a sharded copy of an array that every host has in full."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


# --- sums ------------------------------------------------------------------------------------------------------------


def params_digest(leaves: Mapping[str, jax.Array]) -> str:
    """Compute the SHA-256, in hex, of the leaves in the order of their names: name, dtype, shape and bytes of each.

    Every host must call it, because leaves that are split over hosts are gathered, one at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(leaves):
        value = whole(leaves[name])
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Return the `bit_sum` of each leaf, by name. It is weaker than a digest, but is computed on the leaf's devices."""
    return {name: int(value) for name, value in leaf_numbers(bit_sum, leaves).items()}


def whole(value: jax.Array) -> np.ndarray:
    """Gather an array's values on every host; all hosts must call it for an array that is sharded over them.

    With ``np.asarray(value)``, jax would cache the values on the host for as long as ``value`` lives, so that reading
    a whole model would leave a second copy there. Here the values are freed with the returned array.
    """
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(from_shards(value, value))
    assert isinstance(value.sharding, NamedSharding)  # all that the trainer computes is on its mesh
    return np.asarray(_gathering(NamedSharding(value.sharding.mesh, PartitionSpec()))(value))


@functools.cache  # one jitted function per sharding, so that no program is compiled twice
def _gathering(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)
