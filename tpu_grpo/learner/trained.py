"""Which of a model's parameters are trained, told by their type, so that Tunix and everyone else sees the same.

nnx.LoRAParam   adapters: they alone are trained where there are any
nnx.Param       trained in a model without adapters
Frozen          never trained
"""

from collections.abc import Collection
from typing import Any

from flax import nnx

from tpu_grpo.config import RunConfig, parse_layers


class Frozen(nnx.Variable[Any]):
    """Is used and not trained: it gets no gradient, and the optimizer keeps no state for it."""


def freeze_all_but(model: nnx.Module, layers: Collection[int]) -> None:
    """Freeze, in place, every parameter outside of these layers."""
    for path, module in list(nnx.iter_modules(model)):
        if path[:1] == ("layers",) and len(path) > 1 and path[1] in layers:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, Frozen(value.get_raw_value(), **value.get_metadata()))


def freeze_untrained(model: nnx.Module, config: RunConfig) -> None:
    """Freeze, in place, what ``model.train_layers`` leaves out; nothing when it is unset."""
    if config.model.train_layers is not None:
        freeze_all_but(model, parse_layers(config.model.train_layers))


def has_adapters(model: nnx.Module) -> bool:
    """Say whether adapters are what is trained."""
    return bool(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))


def trained_type(model: nnx.Module) -> type[nnx.Variable[Any]]:
    """Return the type of what is trained."""
    return nnx.LoRAParam if has_adapters(model) else nnx.Param


def parameters(model: nnx.Module) -> nnx.State:
    """Return all of a model's parameters, trained or not."""
    return nnx.state(model, nnx.Any(nnx.Param, Frozen))


def frozen_leaves(params: nnx.State) -> frozenset[str]:
    """Return the dotted names of the leaves that no update changes."""
    leaves = {".".join(map(str, path)): type(leaf) for path, leaf in nnx.to_flat_state(params)}
    adapters = nnx.LoRAParam in leaves.values()
    return frozenset(
        name for name, kind in leaves.items() if kind is Frozen or (adapters and kind is not nnx.LoRAParam)
    )
