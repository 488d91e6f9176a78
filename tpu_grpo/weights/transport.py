"""How a group of leaves gets from the trainer's devices to the sampler's: one compiled program, and what is around it.

On the same devices a program takes the trainer's arrays and returns the sampler's. Between disjoint devices none can,
in multi-controller jax: a program's arrays must all lie on the same devices. So both sets are made one mesh with a
leading axis of two ("role"), on which a trainer's array is the first half of one twice as large:

    trainer's x            on T0 T1                      [8, 4] over fsdp
    with dummies beside it on T0 T1 S0 S1                [2, 8, 4] over (role, fsdp)
    the program's result   transform of its first half   on all four, in the sampler's layout
    the sampler's          what of it lies on S0 S1
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tpu_grpo.weights.plan import LeafMove, Spec, bytes_per_device
from tpu_grpo.weights.waypoints import waypoint

Program = Callable[[Sequence[Array]], tuple[Array, ...]]
"""Trainer leaves of a group (those of its moves, one after the other) -> the sampler's, in the order of its moves."""


class Transport(Protocol):
    """Compiles groups."""

    def compile(self, group: Sequence[LeafMove]) -> tuple[Program, int]:
        """The program of a group, and the bytes per device it needs beside its arguments and results."""
        ...


def choose_transport(moves: Sequence[LeafMove]) -> Transport:
    """By where both sides' leaves lie."""
    source, target = (_named(spec).device_set for spec in (moves[0].source_specs[0], moves[0].spec))
    return SameDevices() if source == target else DisjointDevices(moves[0])


class SameDevices:
    """Trainer and sampler on the same devices, in meshes of any two shapes."""

    def compile(self, group: Sequence[LeafMove]) -> tuple[Program, int]:
        """See Transport."""

        waypoints = [_waypoint(move) for move in group]

        def transform(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
            results = zip(_results(group, leaves), waypoints, strict=True)
            return tuple(jax.lax.with_sharding_constraint(leaf, way) if way else leaf for leaf, way in results)

        shardings = tuple(_named(move.spec) for move in group)
        compiled = jax.jit(transform, out_shardings=shardings).lower(_sources(group)).compile()
        is_virtual = any(device.platform == "cpu" for device in shardings[0].device_set)

        def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
            moved = compiled(tuple(leaves))
            if is_virtual:  # these share threads: exchanges of two programs could hold all, each waiting for a device
                jax.block_until_ready(moved)
            return moved

        return run, _temporary_bytes(compiled)


class DisjointDevices:
    """Trainer and sampler on as many devices each, none in common; ``example`` is any move between them."""

    def __init__(self, example: LeafMove):
        trainer, sampler = _named(example.source_specs[0]).mesh, _named(example.spec).mesh
        self._trainer, self._sampler = trainer, sampler
        own, other = np.asarray(trainer.devices), np.asarray(sampler.devices)
        self._dummies = Mesh(other.reshape(own.shape), trainer.axis_names)
        self._both_in = Mesh(np.stack([own, other.reshape(own.shape)]), ("role", *trainer.axis_names))
        self._both_out = Mesh(np.stack([own.reshape(other.shape), other]), ("role", *sampler.axis_names))

    def compile(self, group: Sequence[LeafMove]) -> tuple[Program, int]:
        """See Transport."""
        sources = _sources(group)
        specs = [P(None, *_named(source).spec) for source in sources]
        expand = self._compiled(
            lambda leaves: tuple(leaf[None] for leaf in leaves),
            [NamedSharding(self._trainer, spec) for spec in specs],
            sources,
        )
        dummies = self._compiled(
            lambda: tuple(jnp.zeros((1, *source.shape), source.dtype) for source in sources),
            [NamedSharding(self._dummies, spec) for spec in specs],
        )
        arguments = tuple(
            jax.ShapeDtypeStruct(
                (2, *source.shape),
                source.dtype,
                sharding=NamedSharding(self._both_in, P("role", *_named(source).spec)),
            )
            for source in sources
        )
        across = self._compiled(
            lambda leaves: _results(group, [leaf[0] for leaf in leaves]),
            [NamedSharding(self._both_out, _named(move.spec).spec) for move in group],
            arguments,
        )

        def run(leaves: Sequence[Array]) -> tuple[Array, ...]:
            parts = zip(arguments, expand(tuple(leaves)), dummies(), strict=True)
            moved = across(tuple(_joined(spec, halves) for spec, *halves in parts))
            jax.block_until_ready(moved)  # on the trainer's devices, too: nobody waits for what lies there later
            return tuple(self._sampler_part(array, move.spec) for array, move in zip(moved, group, strict=True))

        beside = sum(bytes_per_device(argument) for argument in arguments)  # the arguments are temporary, too
        return run, beside + _temporary_bytes(across)

    @staticmethod
    def _compiled(function: Callable[..., Any], shardings: Sequence[NamedSharding], *arguments: Any) -> Any:
        return jax.jit(function, out_shardings=tuple(shardings)).lower(*arguments).compile()

    @staticmethod
    def _sampler_part(array: Array, spec: Spec) -> Array:
        wanted = _named(spec)
        shards = [shard.data for shard in array.addressable_shards if shard.device in wanted.device_set]
        return jax.make_array_from_single_device_arrays(spec.shape, wanted, shards)


def _joined(spec: Spec, halves: Sequence[Array]) -> Array:
    """One array on both meshes' devices, of an array on each."""
    shards = [shard.data for half in halves for shard in half.addressable_shards]
    return jax.make_array_from_single_device_arrays(spec.shape, _named(spec), shards)


def _sources(group: Sequence[LeafMove]) -> tuple[Spec, ...]:
    return tuple(spec for move in group for spec in move.source_specs)


def _results(group: Sequence[LeafMove], leaves: Sequence[Array]) -> tuple[Array, ...]:
    rest = iter(leaves)
    return tuple(move.result([next(rest) for _ in move.sources]) for move in group)


def _waypoint(move: LeafMove) -> NamedSharding | None:
    source, *_ = move.source_specs
    return waypoint(move.transform, source.shape, _named(source), move.spec.shape, _named(move.spec))


def _temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def _named(spec: Spec) -> NamedSharding:
    assert isinstance(spec.sharding, NamedSharding)
    return spec.sharding
