"""The transport of a group of leaves from the trainer's devices to the sampler's, by one compiled program.

On the same devices, the program takes the trainer's arrays and returns the sampler's. Between disjoint devices no such
program exists in multi-controller jax, because all arrays of a program must lie on the same devices. We therefore join
both sets of devices in one mesh with a leading axis "role" of size 2. On this mesh, the trainer's array is the first
half of an array twice as large, and zeros on the sampler's devices are the second half:

    trainer's array x         on T0 T1          shape [8, 4], sharded over fsdp
    joined with zeros         on T0 T1 S0 S1    shape [2, 8, 4], sharded over (role, fsdp)
    the program's result      on T0 T1 S0 S1    transform(joined[0]) in the sampler's sharding, replicated over role
    the sampler's array       on S0 S1          the shards of the result that lie on S0 S1
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tpu_grpo.models.families.leaves import InputsFirst, Transform, transpose
from tpu_grpo.weights.plan import LeafMove, Spec, bytes_per_device, named_sharding

Axes = tuple[str, ...]

# The intermediate sharding of a leaf whose target is replicated.
#
# For replicated targets we go through a fully sharded layout: all-to-all first, all-gather last, so that no device
# holds a full parameter that it will then slice. XLA's partitioner does not find this route by itself: going from four
# row shards to two copies of two column shards, for example, it would gather the whole leaf on every device.
#
#     trainer's sharding        P(fsdp, -)         rows 0 | rows 1 | rows 2 | rows 3
#     intermediate sharding     P(data, tensor)    each device holds a quarter: half of the rows of half of the columns
#     sampler's sharding        P(-, tensor)       each device holds all rows of half of the columns


def intermediate_sharding(
    transform: Transform,
    source_shape: tuple[int, ...],
    source: NamedSharding,
    target_shape: tuple[int, ...],
    target: NamedSharding,
) -> NamedSharding | None:
    """Choose a sharding over the sampler's mesh in which no two devices hold the same elements.

    The mesh axes over which ``target`` is replicated are added to one dimension of the leaf. We take the dimension that
    the trainer shards, because then the fewest elements move, or else the first one whose size these axes divide. The
    mesh of the result has the sampler's axes as automatic ones, which XLA partitions, as on the trainer's mesh.

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
            mesh = Mesh(np.asarray(target.mesh.devices), target.mesh.axis_names)  # constraints take no explicit axes
            return NamedSharding(mesh, P(*(entry or None for entry in spec)))
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


Program = Callable[[Sequence[Array]], tuple[Array, ...]]
"""A function that takes the trainer's leaves of a group, move after move, and returns the sampler's, one per move."""


def compile_moves(group: Sequence[LeafMove]) -> tuple[Program, int]:
    """Compile the program that moves a group of leaves, between meshes on the same devices or on disjoint ones.

    Returns the program, and the bytes per device that it needs in addition to its arguments and results.
    """
    source, target = group[0].source_specs[0], group[0].spec
    on_same_devices = named_sharding(source).device_set == named_sharding(target).device_set
    return _compile_in_place(group) if on_same_devices else _compile_across(group)


def _compile_in_place(group: Sequence[LeafMove]) -> tuple[Program, int]:
    """Compile one program; replicated targets go through an intermediate sharding."""
    intermediates = [
        intermediate_sharding(
            move.transform,
            move.source_specs[0].shape,
            named_sharding(move.source_specs[0]),
            move.spec.shape,
            named_sharding(move.spec),
        )
        for move in group
    ]

    def transform(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        results = zip(_results(group, leaves), intermediates, strict=True)
        return tuple(jax.lax.with_sharding_constraint(leaf, by) if by else leaf for leaf, by in results)

    shardings = [named_sharding(move.spec) for move in group]
    compiled = _compiled(transform, shardings, _sources(group))
    is_virtual = any(device.platform == "cpu" for device in shardings[0].device_set)

    def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
        moved = compiled(tuple(leaves))
        if is_virtual:  # virtual devices share threads: two programs' collectives could take all and wait forever
            jax.block_until_ready(moved)
        return moved

    return run, _temporary_bytes(compiled)


def _compile_across(group: Sequence[LeafMove]) -> tuple[Program, int]:
    """Compile the program over both sets of devices (of equal size), and the two programs that make its arguments."""
    sources = _sources(group)
    trainer, sampler = named_sharding(sources[0]).mesh, named_sharding(group[0].spec).mesh
    own, other = np.asarray(trainer.devices), np.asarray(sampler.devices)
    padding = Mesh(other.reshape(own.shape), trainer.axis_names)
    both_in = Mesh(np.stack([own, other.reshape(own.shape)]), ("role", *trainer.axis_names))
    both_out = Mesh(np.stack([own.reshape(other.shape), other]), ("role", *sampler.axis_names))
    specs = [named_sharding(source).spec for source in sources]
    expand = _compiled(
        lambda leaves: tuple(leaf[None] for leaf in leaves),
        [NamedSharding(trainer, P(None, *spec)) for spec in specs],
        sources,
    )
    zeros = _compiled(
        lambda: tuple(jnp.zeros((1, *source.shape), source.dtype) for source in sources),
        [NamedSharding(padding, P(None, *spec)) for spec in specs],
    )
    arguments = tuple(
        Spec((2, *source.shape), source.dtype, sharding=NamedSharding(both_in, P("role", *spec)))
        for source, spec in zip(sources, specs, strict=True)
    )
    across = _compiled(
        lambda leaves: _results(group, [leaf[0] for leaf in leaves]),
        [NamedSharding(both_out, named_sharding(move.spec).spec) for move in group],
        arguments,
    )

    def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
        parts = zip(arguments, expand(tuple(leaves)), zeros(), strict=True)
        moved = across(tuple(from_shards(spec, *halves) for spec, *halves in parts))
        jax.block_until_ready(moved)  # also on the trainer's devices, where nobody would wait for the result later
        return tuple(from_shards(move.spec, array) for array, move in zip(moved, group, strict=True))

    joined_bytes = sum(bytes_per_device(argument) for argument in arguments)  # the arguments are temporary, too
    return run, joined_bytes + _temporary_bytes(across)


def from_shards(spec: Spec, *arrays: Array) -> Array:
    """Make an array with the sharding of ``spec`` from the shards of others, without a copy."""
    sharding = named_sharding(spec)
    shards = [shard for array in arrays for shard in array.addressable_shards if shard.device in sharding.device_set]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, [shard.data for shard in shards])


def _compiled(function: Callable[..., Any], shardings: Sequence[NamedSharding], *arguments: Any) -> Any:
    return jax.jit(function, out_shardings=tuple(shardings)).lower(*arguments).compile()


def _sources(group: Sequence[LeafMove]) -> tuple[Spec, ...]:
    return tuple(spec for move in group for spec in move.source_specs)


def _results(group: Sequence[LeafMove], leaves: Sequence[Array]) -> tuple[Array, ...]:
    rest = iter(leaves)
    return tuple(move.result([next(rest) for _ in move.sources]) for move in group)


def _temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes
