"""Carrying out a weight sync: the trainer's parameters become the sampler's, in memory.

    sync = WeightSync(checkpoint.weight_rules, named_leaves(trainer_params), replicas.weight_specs)
    weights, result = sync(named_leaves(trainer_params))
    replicas.install_weights(weights)

Groups of leaves move one after the other, each by one compiled program with the sampler's shardings as outputs: no
disk, no host copy, and no compilation after the first call. A group's old leaves are freed before its new ones are
made, and a group is so small that its program's temporary memory stays within the bound; so beside the parameters
themselves a sync never needs more than that. What no update changes moves once, in groups of its own.
"""

import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

from tpu_grpo.errors import ConfigError
from tpu_grpo.families import WeightRule
from tpu_grpo.types import SyncResult
from tpu_grpo.weights.plan import LeafMove, Leaves, Spec, describe_plan, group_moves, plan_sync
from tpu_grpo.weights.transport import Program, choose_transport

TEMPORARY_BYTES = 512 * 2**20
GROUP_BYTES = 32 * 2**20
"""Of a group's results per device: benchmarks/weights.py takes longer with larger groups, and no less with smaller."""


class WeightSync:
    """Turns the trainer's parameters into the sampler's.

    Args:
        rules: of the model's family.
        source: the trainer's leaves, or their specs.
        target: the sampler's, by name.
        temporary_bytes: what a program may need per device beside parameters.
        lora_alpha: of the adapters among the trainer's leaves.
        frozen: names of the trainer's leaves that no update changes.

    Raises:
        WeightsError: for leaves that do not correspond.
        ConfigError: for a bound that the largest leaf does not keep.
    """

    def __init__(
        self,
        rules: Sequence[WeightRule],
        source: Leaves | Mapping[str, Spec],
        target: Mapping[str, Spec],
        *,
        temporary_bytes: int = TEMPORARY_BYTES,
        lora_alpha: float = 0.0,
        frozen: Collection[str] = (),
    ):
        self._plan = functools.partial(plan_sync, rules, lora_alpha=lora_alpha, frozen=frozen)
        self.moves = self._plan(source, target)
        self._limit = temporary_bytes
        self._programs: dict[tuple[Any, ...], tuple[Program, int]] = {}
        self._alone: dict[tuple[Any, ...], Program] = {}
        self._held: dict[str, Array] = {}
        moving = [move for move in self.moves if not move.shared]
        self._transport = choose_transport(moving) if moving else None
        alike = ([move for move in moving if move.frozen == frozen] for frozen in (False, True))
        planned = [group for moves in alike for group in group_moves(moves, min(temporary_bytes, GROUP_BYTES))]
        self.groups = [group for wanted in planned for group in self._within_bound(wanted)]

    @property
    def bytes_moved(self) -> int:
        """Bytes written for the sampler at the first sync; later ones leave out what is frozen."""
        return sum(move.bytes for move in self.moves)

    @property
    def temporary_bytes(self) -> int:
        """What the most demanding program needs per device beside its arguments and results."""
        return max((temporary for _, temporary in self._programs.values()), default=0)

    def describe(self) -> list[str]:
        """The plan, a line per kind of leaf."""
        return describe_plan(self.moves, len(self.groups))

    def __call__(self, source: Leaves) -> tuple[dict[str, Array], SyncResult]:
        """The sampler's leaves, in its own order, and what they cost; those of the call before are freed."""
        start, due = time.perf_counter(), [group for group in self.groups if not self._stays(group)]
        for group in due:
            self._free(group)
            program, _ = self._program(group)
            moved = program(_values(group, source))
            self._held |= {move.target: array for move, array in zip(group, moved, strict=True)}
        weights = {
            move.target: _relabelled(source[move.source], move.spec) if move.shared else self._held[move.target]
            for move in self.moves
        }
        jax.block_until_ready(self._held)
        bytes_moved = sum(move.bytes for group in due for move in group)
        return weights, SyncResult(time.perf_counter() - start, bytes_moved)

    def expected(self, source: Leaves) -> Iterator[tuple[LeafMove, Array]]:
        """What each of the sampler's leaves should be, one at a time, by the rules and nothing of this sync's programs.

        The plan is made anew, and a leaf is computed by itself; in which order, every host does alike.
        """
        target = {move.target: move.spec for move in self.moves}
        for move in self._plan(source, target):
            if move.signature not in self._alone:
                self._alone[move.signature], _ = choose_transport([move]).compile([move])
            yield move, self._alone[move.signature](_values([move], source))[0]

    def release(self) -> None:
        """Free the sampler's leaves of the last call, except those it shares with the trainer."""
        for group in self.groups:
            self._free(group)

    def _stays(self, group: Sequence[LeafMove]) -> bool:
        return all(move.frozen and move.target in self._held for move in group)

    def _free(self, group: Sequence[LeafMove]) -> None:
        for move in group:
            if (old := self._held.pop(move.target, None)) is not None:
                old.delete()

    def _within_bound(self, group: tuple[LeafMove, ...]) -> list[tuple[LeafMove, ...]]:
        """The group, or parts of it whose programs keep the bound: by the compiled programs' own account."""
        _, temporary = self._program(group)
        if temporary <= self._limit:
            return [group]
        if len(group) == 1:
            raise ConfigError(
                f"meshes.sync_temporary_mib must hold what moving {group[0].source} needs, {temporary / 2**20:.1f} MiB "
                f"per device, got {self._limit / 2**20:g}; raise it"
            )
        del self._programs[_signature(group)]
        half = len(group) // 2
        return [part for side in (group[:half], group[half:]) for part in self._within_bound(side)]

    def _program(self, group: tuple[LeafMove, ...]) -> tuple[Program, int]:
        signature = _signature(group)
        if signature not in self._programs:
            assert self._transport is not None
            self._programs[signature] = self._transport.compile(group)
        return self._programs[signature]


def _values(group: Sequence[LeafMove], source: Leaves) -> list[Array]:
    return [source[name] for move in group for name in move.sources]


def _signature(group: Sequence[LeafMove]) -> tuple[Any, ...]:
    return tuple(move.signature for move in group)


def _relabelled(leaf: Array, spec: Spec) -> Array:
    """The same buffers under the sampler's axis names."""
    shards = [shard.data for shard in leaf.addressable_shards]
    assert isinstance(spec.sharding, jax.sharding.NamedSharding)
    return jax.make_array_from_single_device_arrays(leaf.shape, spec.sharding, shards)
