"""The intermediate sharding of a leaf whose target is replicated.

For replicated targets we go through a fully sharded layout: all-to-all first, all-gather last, so no device ever holds
a full parameter that it will then slice. XLA's partitioner does not find this route by itself: going from four row
shards to two copies of two column shards, for example, it would gather the whole leaf on every device.

    trainer's sharding        P(fsdp, -)         rows 0 | rows 1 | rows 2 | rows 3
    intermediate sharding     P(data, tensor)    each device holds a quarter: half of the rows of half of the columns
    sampler's sharding        P(-, tensor)       each device holds all rows of half of the columns
"""

from itertools import chain
from math import prod

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_grpo.models.families.leaves import InputsFirst, Transform, transpose

Axes = tuple[str, ...]


def intermediate_sharding(
    transform: Transform,
    source_shape: tuple[int, ...],
    source: NamedSharding,
    target_shape: tuple[int, ...],
    target: NamedSharding,
) -> NamedSharding | None:
    """Choose a sharding over the sampler's mesh in which no two devices hold the same elements.

    The mesh axes over which ``target`` is replicated are added to one dimension of the leaf. We take the dimension that
    the trainer shards, because then the fewest elements move, or else the first one whose size they divide. The
    sharding's mesh has the sampler's axes, and leaves the partitioning to XLA, as the trainer's mesh does.

    Returns:
        The sharding, or None if ``target`` is fully sharded already or no dimension can be divided.
    """
    entries = [_axes(entry) for entry in (*target.spec, *[None] * (len(target_shape) - len(target.spec)))]
    used = set(chain.from_iterable(entries))
    replicated = tuple(name for name, size in target.mesh.shape.items() if size > 1 and name not in used)
    if not replicated:
        return None
    sharded = [n for n, entry in enumerate(source.spec) if prod(source.mesh.shape[name] for name in _axes(entry)) > 1]
    preferred = [result_dimension(transform, source_shape, target_shape, dimension) for dimension in sharded]
    for dimension in (*preferred, *range(len(target_shape))):
        axes = entries[dimension] + replicated
        if target_shape[dimension] % prod(target.mesh.shape[name] for name in axes) == 0:
            spec = [axes if n == dimension else entry for n, entry in enumerate(entries)]
            mesh = Mesh(np.asarray(target.mesh.devices), target.mesh.axis_names)  # constraints name no explicit axes
            return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))
    return None


def result_dimension(
    transform: Transform, source_shape: tuple[int, ...], target_shape: tuple[int, ...], dimension: int
) -> int:
    """Find the dimension of the transformed leaf in which a dimension of the original leaf ends up.

    A reshape keeps the order of the elements: leading dimensions merge into the first, trailing ones into the last.
    """
    if transform is transpose:
        return len(target_shape) - 1 - dimension
    if isinstance(transform, InputsFirst):
        return int(dimension != len(source_shape) - 2)
    merged_dimensions = len(source_shape) - len(target_shape)
    keeps_last = source_shape[-1] == target_shape[-1]
    return max(0, dimension - merged_dimensions) if keeps_last else min(dimension, len(target_shape) - 1)


def _axes(entry: str | Axes | None) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
