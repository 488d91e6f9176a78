"""The reference of the KL penalty: the initial policy, or a copy of the policy that is made anew every so many steps.

A reference shares with the policy what no update changes. With adapters the initial policy is the base model alone; one
that is made anew is the base model with adapters of its own, which start as the policy's, and its forward passes cost
what the policy's cost.
"""

from collections.abc import Collection
from typing import Any

import jax
from flax import nnx

from tpu_grpo.learner.update import by_name, dotted


def own_copy(model: nnx.Module, names: Collection[str]) -> nnx.Module:
    """Copy the parameters of these names, which updates of the policy change; the rest stays the same arrays."""
    copied = nnx.clone(model)
    state = nnx.to_flat_state(nnx.state(copied, nnx.Param))
    own = [(path, leaf.replace(_copy(leaf.get_raw_value()))) for path, leaf in state if dotted(path) in names]
    nnx.update(copied, nnx.from_flat_state(own))
    return copied


def reset(reference: nnx.Module, policy: nnx.Module, names: Collection[str]) -> None:
    """Make the parameters of these names copies of the policy's, one by one, so that little memory is held twice."""
    values = by_name(nnx.state(policy, nnx.Param))
    for path, leaf in nnx.to_flat_state(nnx.state(reference, nnx.Param)):
        if (name := dotted(path)) in names:
            nnx.update(reference, nnx.from_flat_state([(path, leaf.replace(_copy(values[name])))]))


def _copy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.copy()
