"""The plan of a weight sync, and the one compiled function that carries it out.

    sync = WeightSync(checkpoint.weight_rules, named_leaves(trainer_params), engine.weight_specs)
    weights, result = sync(named_leaves(trainer_params))
    engine.install_weights(weights)

A leaf whose shape, type and layout are the same on both sides is shared, not copied; that is safe because the trainer
never donates its parameters. All others are computed by one jitted function with the sampler's shardings as outputs:
no disk, no host copy, and one compilation for the whole run.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from tpu_grpo.errors import WeightsError
from tpu_grpo.families import Transform, WeightRule, same
from tpu_grpo.types import SyncResult

Leaves = Mapping[str, Array]
Spec = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class LeafMove:
    """How one sampler leaf comes about."""

    source: str
    target: str
    transform: Transform
    spec: Spec
    shared: bool

    @property
    def bytes(self) -> int:
        """Size of the sampler's leaf; 0 when it is shared."""
        return 0 if self.shared else int(np.prod(self.spec.shape)) * self.spec.dtype.itemsize


def named_leaves(params: nnx.State) -> dict[str, Array]:
    """The arrays of a trainer's state by dotted path, e.g. ``layers.0.attn.q_proj.w``."""
    return {".".join(map(str, path)): leaf.value for path, leaf in nnx.to_flat_state(params)}


def plan_sync(
    rules: Sequence[WeightRule], source: Leaves | Mapping[str, Spec], target: Mapping[str, Spec]
) -> tuple[LeafMove, ...]:
    """Match every leaf of the trainer with a leaf of the sampler.

    Raises:
        WeightsError: listing the names that match on one side only, or leaves whose shapes do not correspond.
    """
    found = {name: _match(name, rules) for name in source}
    filled_by = {match[1]: (name, match[0]) for name, match in found.items() if match is not None}
    unknown = sorted(name for name, match in found.items() if match is None)
    missing, extra = sorted(target.keys() - filled_by.keys()), sorted(filled_by.keys() - target.keys())
    if unknown or missing or extra:
        raise WeightsError(
            f"trainer and sampler parameters do not correspond: trainer leaves without a rule {unknown}, "
            f"sampler leaves that nothing fills {missing}, rules whose target the sampler lacks {extra}"
        )
    pairs = ((name, spec, *filled_by[name]) for name, spec in target.items())
    return tuple(_move(source_name, source[source_name], rule, name, spec) for name, spec, source_name, rule in pairs)


def _match(name: str, rules: Sequence[WeightRule]) -> tuple[WeightRule, str] | None:
    for rule in rules:
        if found := re.fullmatch(re.escape(rule.source).replace(r"\*", r"(\d+)"), name):
            return rule, rule.target.replace("*", found.group(1)) if found.groups() else rule.target
    return None


def _move(name: str, leaf: Array | Spec, rule: WeightRule, target: str, spec: Spec) -> LeafMove:
    try:
        shape = jax.eval_shape(lambda x: rule.transform(x, spec.shape), leaf).shape
    except (TypeError, ValueError, IndexError) as error:
        raise WeightsError(f"{name} {list(leaf.shape)} cannot become {list(spec.shape)}: {error}") from error
    if shape != spec.shape:
        raise WeightsError(f"{name} {list(leaf.shape)} becomes {list(shape)}, the sampler wants {list(spec.shape)}")
    shared = (
        rule.transform is same and leaf.dtype == spec.dtype and _same_layout(leaf.sharding, spec.sharding, leaf.ndim)
    )
    return LeafMove(name, target, rule.transform, spec, shared)


def _same_layout(source: Any, target: Any, rank: int) -> bool:
    return source is not None and source.is_equivalent_to(target, rank)


def _relabelled(leaf: Array, spec: Spec) -> Array:
    """The same buffers under the sampler's axis names."""
    shards = [shard.data for shard in leaf.addressable_shards]
    assert spec.sharding is not None
    return jax.make_array_from_single_device_arrays(leaf.shape, spec.sharding, shards)  # pyright: ignore[reportArgumentType]


class WeightSync:
    """Turns the trainer's parameters into the sampler's; compiled at the first call."""

    def __init__(self, rules: Sequence[WeightRule], source: Leaves, target: Mapping[str, Spec]):
        self.moves = plan_sync(rules, source, target)
        moving = [move for move in self.moves if not move.shared]

        def transform(leaves: dict[str, Array]) -> dict[str, Array]:
            return {m.target: m.transform(leaves[m.source], m.spec.shape).astype(m.spec.dtype) for m in moving}

        self._moving = moving
        self._transform = jax.jit(transform, out_shardings={m.target: m.spec.sharding for m in moving})

    @property
    def bytes_moved(self) -> int:
        """Bytes written for the sampler at every sync."""
        return sum(move.bytes for move in self.moves)

    def __call__(self, source: Leaves) -> tuple[dict[str, Array], SyncResult]:
        """The sampler's leaves, in its own order, and what they cost."""
        start = time.perf_counter()
        moved = self._transform({move.source: source[move.source] for move in self._moving})
        weights = {m.target: _relabelled(source[m.source], m.spec) if m.shared else moved[m.target] for m in self.moves}
        jax.block_until_ready(moved)
        return weights, SyncResult(time.perf_counter() - start, self.bytes_moved)
