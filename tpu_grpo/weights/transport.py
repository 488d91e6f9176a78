"""The transport of a group of leaves from the trainer's devices to the sampler's, by compiled programs.

If trainer and sampler share devices, one program takes the trainer's arrays and returns the sampler's. Between disjoint
devices no such program exists in multi-controller jax, because all arrays of a program must lie on the same devices. We
therefore join both sets of devices in one mesh of equal parts; a part's size is the greatest common divisor of the
sets' sizes. The trainer's first part sends the leaf to all parts. For three trainer hosts T and one sampler host S, of
two devices each:

    trainer's array x         on T0 ... T5          shape [8, 6], sharded over fsdp
    the sampler's leaf y      on T0 ... T5          transform(x), shape [6, 8], in two pieces on each of three parts
    joined with zeros         on T0 ... T5 S0 S1    shape [4, 6, 8], sharded over (part, unit)
    the program's result      on T0 ... T5 S0 S1    joined[0], in two pieces on each of four parts
    the sampler's array       on S0 S1              the result's shards on S0 S1, in the sampler's sharding

Only the programs on the joined mesh run on all hosts; the others run on the trainer's or the sampler's hosts.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from tpu_grpo.hosts import Hosts
from tpu_grpo.hosts.sharded_arrays import Spec, bytes_per_device, from_shards, mesh_axes, named_sharding
from tpu_grpo.models.families.leaves import InputsFirst, Transform, transpose
from tpu_grpo.weights.plan import LeafMove, Quantized

# The intermediate sharding of a leaf whose target is replicated.
#
# For replicated targets we go through a fully sharded layout: all-to-all first, all-gather last, so that no device
# holds a full parameter only to slice it. XLA's partitioner does not find this route by itself: going from four
# row shards to two copies of two column shards, for example, it would gather the whole leaf on every device.
#
#     trainer's sharding        P(fsdp, -)         rows 0 | rows 1 | rows 2 | rows 3
#     intermediate sharding     P(data, tensor)    each device holds a quarter: half of the rows of half of the columns
#     sampler's sharding        P(-, tensor)       each device holds all rows of half of the columns


def intermediate_sharding(transform: Transform, source: Spec, target: Spec) -> NamedSharding | None:
    """Choose a sharding over the sampler's mesh in which no two devices hold the same elements.

    The mesh axes over which ``target`` is replicated are added to one dimension of the leaf. We take a dimension that
    the trainer shards, because then the fewest elements move, or else the first dimension that these axes divide. The
    mesh of the result has the sampler's axes with the type Auto, like the trainer's mesh.

    Returns None if ``target`` is fully sharded already or no dimension can be divided.
    """
    given, wanted, shape = named_sharding(source), named_sharding(target), target.shape
    entries = mesh_axes(target)
    used = set(chain.from_iterable(entries))
    replicated = tuple(name for name, size in wanted.mesh.shape.items() if size > 1 and name not in used)
    if not replicated:
        return None
    sharded = [n for n, axes in enumerate(mesh_axes(source)) if prod(given.mesh.shape[name] for name in axes) > 1]
    preferred = [result_dimension(transform, source.shape, shape, dimension) for dimension in sharded]
    for dimension in (*preferred, *range(len(shape))):
        axes = entries[dimension] + replicated
        if shape[dimension] % prod(wanted.mesh.shape[name] for name in axes) == 0:
            spec = [axes if n == dimension else entry for n, entry in enumerate(entries)]
            mesh = Mesh(np.asarray(wanted.mesh.devices), wanted.mesh.axis_names)  # constraints take no explicit axes
            return NamedSharding(mesh, P(*(entry or None for entry in spec)))
    return None


def result_dimension(
    transform: Transform, source_shape: tuple[int, ...], target_shape: tuple[int, ...], dimension: int
) -> int:
    """Find the dimension of the transformed leaf in which a dimension of the original leaf ends up.

    A reshape keeps the order of the elements: leading dimensions merge into the first, trailing ones into the last.
    """
    if isinstance(transform, Quantized):
        dense = result_dimension(transform.dense, source_shape, transform.shape, dimension)
        return 1 - dense if len(target_shape) == 2 else 0  # [inputs, outputs] -> [outputs, inputs], or [outputs]
    if transform is transpose:
        return len(target_shape) - 1 - dimension
    if isinstance(transform, InputsFirst):
        return int(dimension != len(source_shape) - 2)
    merged_dimensions = len(source_shape) - len(target_shape)
    keeps_last = source_shape[-1] == target_shape[-1]
    return max(0, dimension - merged_dimensions) if keeps_last else min(dimension, len(target_shape) - 1)


Program = Callable[[Sequence[Array]], tuple[Array, ...]]
"""A function from the trainer's leaves of a group, move after move, to the sampler's leaves, one per move."""
Compiler = Callable[[jax.stages.Lowered, Sequence[Any]], tuple[Callable[..., Any], int]]
"""Compiles a lowered program for its devices; returns it, and the bytes per device of its temporary memory."""


def compiled(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> tuple[Callable[..., Any], int]:
    """Compile a program that is to run: the `Compiler` of runs."""
    program: Any = lowered.compile()
    return program, program.memory_analysis().temp_size_in_bytes


def compile_moves(group: Sequence[LeafMove], hosts: Hosts, compiler: Compiler) -> tuple[Program, int]:
    """Compile the program that moves a group of leaves, between meshes on the same devices or on disjoint ones.

    Returns the program, and the bytes per device that it needs in addition to its arguments and results (the maximum
    over hosts). On a host without devices of the sampler, the program returns arrays without shards.
    """
    source, target = group[0].source_specs[0], group[0].spec
    on_same_devices = named_sharding(source).device_set == named_sharding(target).device_set
    return _compile_in_place(group, compiler) if on_same_devices else _compile_across(group, hosts, compiler)


def _compile_in_place(group: Sequence[LeafMove], compiler: Compiler) -> tuple[Program, int]:
    """Compile the program of a move between meshes on the same devices; see `intermediate_sharding`."""
    intermediates = [intermediate_sharding(move.transform, move.source_specs[0], move.spec) for move in group]

    def transform(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        results = zip(_results(group, leaves), intermediates, strict=True)
        return tuple(jax.lax.with_sharding_constraint(leaf, by) if by else leaf for leaf, by in results)

    program, temporary = compiler(*_lowered(transform, [move.spec for move in group], _sources(group)))
    is_virtual = any(device.platform == "cpu" for device in named_sharding(group[0].spec).device_set)

    def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
        moved = program(tuple(leaves))
        if is_virtual:  # CPU devices share threads: collectives of two programs could occupy all of them and deadlock
            jax.block_until_ready(moved)
        return moved

    return run, temporary


def _compile_across(group: Sequence[LeafMove], hosts: Hosts, compiler: Compiler) -> tuple[Program, int]:
    """Compile the programs of a move between disjoint devices.

    In a run of several hosts, each host compiles the programs that use its devices; a plan, one process, compiles all.
    """
    trainer, sampler = named_sharding(group[0].source_specs[0]).mesh, named_sharding(group[0].spec).mesh
    unit = gcd(trainer.size, sampler.size)
    own, other = (np.asarray(mesh.devices).reshape(-1, unit) for mesh in (trainer, sampler))
    sends, receives, joined = (Mesh(parts, ("part", "unit")) for parts in (own, other, np.concatenate([own, other])))
    pieces = [_pieces(move.spec, unit) for move in group]

    def specs(mesh: Mesh, *first: Any) -> list[Spec]:
        """Return specs of the leaves, divided into pieces over a mesh.

        ``first`` adds a first axis with this sharding: "part" for one entry per part, None for a single entry.
        """
        size = [joined.shape["part"]] if first == ("part",) else [1] * len(first)
        shardings = [NamedSharding(mesh, P(*first, *entries)) for entries in pieces]
        return [Spec((*size, *m.spec.shape), m.spec.dtype, sharding=s) for m, s in zip(group, shardings, strict=True)]

    def made(*parts: Any) -> Callable[..., Any]:
        program, temporary = compiler(*_lowered(*parts))
        used.append(temporary)
        return program

    used, send, fill, settle = list[int](), None, None, None
    stacked, arrived = specs(joined, "part"), specs(receives)
    across = made(lambda stacks: tuple(stack[0] for stack in stacks), specs(joined), tuple(stacked))
    if hosts.count == 1 or trainer.local_devices:
        results = lambda leaves: tuple(leaf[None] for leaf in _results(group, leaves))  # noqa: E731
        send = made(results, specs(sends, None), _sources(group))
    if hosts.count == 1 or sampler.local_devices:
        zeros = lambda: tuple(jnp.zeros((1, *spec.shape), spec.dtype) for spec in arrived)  # noqa: E731
        fill = made(zeros, specs(receives, None))
        settle = made(lambda leaves: leaves, [move.spec for move in group], tuple(arrived))

    def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
        rows = [*([send(tuple(leaves))] if send else []), *([fill()] if fill else [])]
        moved = across(tuple(from_shards(spec, *parts) for spec, *parts in zip(stacked, *rows, strict=True)))
        jax.block_until_ready(moved)  # also on the trainer's devices, where nobody would wait for the result later
        if settle is None:
            return tuple(from_shards(move.spec) for move in group)
        received = tuple(from_shards(spec, array) for spec, array in zip(arrived, moved, strict=True))
        return jax.block_until_ready(settle(received))

    most = max(hosts.share("temporary memory of the weight sync", max(used), int))  # so that all hosts split alike
    return run, most + 2 * sum(map(bytes_per_device, arrived))  # the pieces as sent and as received


def _pieces(spec: Spec, unit: int) -> tuple[str | None, ...]:
    """Choose the dimension of a leaf that is divided into ``unit`` pieces: one that the sampler shards, or the first
    that ``unit`` divides; if there is none, every device gets the whole leaf."""
    entries = mesh_axes(spec)
    dimensions = sorted(range(len(spec.shape)), key=lambda dimension: not entries[dimension])
    chosen = next((dimension for dimension in dimensions if spec.shape[dimension] % unit == 0), None)
    return tuple("unit" if dimension == chosen else None for dimension in range(len(spec.shape)))


def _lowered(
    function: Callable[..., Any], results: Sequence[Spec], *arguments: Any
) -> tuple[jax.stages.Lowered, list[Any]]:
    """Lower a program whose results have these specs; returns it, and the devices of their mesh."""
    shardings = tuple(named_sharding(spec) for spec in results)
    return jax.jit(function, out_shardings=shardings).lower(*arguments), list(shardings[0].mesh.devices.flat)


def _sources(group: Sequence[LeafMove]) -> tuple[Spec, ...]:
    return tuple(spec for move in group for spec in move.source_specs)


def _results(group: Sequence[LeafMove], leaves: Sequence[Array]) -> tuple[Array, ...]:
    rest = iter(leaves)
    return tuple(move.result([next(rest) for _ in move.sources]) for move in group)
