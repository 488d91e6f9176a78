"""The layout a leaf takes between the trainer's and the sampler's, where the sampler holds copies.

The partitioner has no direct way from four shards by rows to two copies of two shards by columns: it would assemble the
whole leaf on every device. Through a layout without copies it exchanges shards first and copies them last:

    trainer   P(fsdp, -)        rows 0 | rows 1 | rows 2 | rows 3
    waypoint  P(data, tensor)   a quarter of the leaf on every device: half of the rows, half of the columns
    sampler   P(-, tensor)      both halves of the rows
"""

from itertools import chain
from math import prod

from jax.sharding import NamedSharding, PartitionSpec

from tpu_grpo.families import Transform
from tpu_grpo.families.layouts import transpose

Axes = tuple[str, ...]


def waypoint(
    transform: Transform,
    source_shape: tuple[int, ...],
    source: NamedSharding,
    shape: tuple[int, ...],
    to: NamedSharding,
) -> NamedSharding | None:
    """A layout over the sampler's mesh in which no two devices hold the same; None if ``to`` is one, or there is none.

    The axes over which ``to`` repeats the leaf split the dimension that the trainer has split, so that the fewest
    numbers move, or else the first that they divide.
    """
    named = [_axes(entry) for entry in (*to.spec, *[None] * (len(shape) - len(to.spec)))]
    used = set(chain.from_iterable(named))
    copies = tuple(name for name, size in to.mesh.shape.items() if size > 1 and name not in used)
    if not copies:
        return None
    split = [n for n, entry in enumerate(source.spec) if prod(source.mesh.shape[name] for name in _axes(entry)) > 1]
    first = [result_dimension(transform, source_shape, shape, dimension) for dimension in split]
    for dimension in (*first, *range(len(shape))):
        axes = named[dimension] + copies
        if shape[dimension] % prod(to.mesh.shape[name] for name in axes) == 0:
            spec = [axes if n == dimension else entry for n, entry in enumerate(named)]
            return NamedSharding(to.mesh, PartitionSpec(*(entry or None for entry in spec)))
    return None


def result_dimension(
    transform: Transform, source_shape: tuple[int, ...], shape: tuple[int, ...], dimension: int
) -> int:
    """Where a dimension of a leaf is found in what the transform makes of it.

    A reshape keeps the order of the elements, so that the first dimensions meet in the first and the last in the last.
    """
    if transform is transpose:
        return len(shape) - 1 - dimension
    heads_and_width = len(source_shape) - len(shape)  # dimensions that became one
    is_last_alone = source_shape[-1] == shape[-1]
    return max(0, dimension - heads_and_width) if is_last_alone else min(dimension, len(shape) - 1)


def _axes(entry: str | Axes | None) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
