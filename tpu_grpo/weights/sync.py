"""The compiled weight sync: it turns the trainer's parameters into the sampler's, in memory.

    sync = WeightSync(checkpoint.weight_rules, named_leaves(trainer_params), replicas.weight_specs)
    weights, result = sync(named_leaves(trainer_params))
    replicas.install_weights(weights)

Groups of leaves move one after the other, each by one compiled program whose outputs have the sampler's shardings.
Nothing passes through a disk or a host's memory, and nothing compiles after the first call. The old leaves of a group
are freed before its new ones are made, and a group is so small that the temporary memory of its program stays within
``temporary_bytes`` per device. A sync needs no memory besides this temporary memory and the parameters. Frozen
leaves, which no update changes, move only once, in separate groups.
"""

import functools
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32
from pydantic import Field

from tpu_grpo.hosts import Hosts, hosts_of
from tpu_grpo.hosts.sharded_arrays import Spec, bit_sum, from_shards, named_sharding
from tpu_grpo.models.families.leaves import WeightRule
from tpu_grpo.records.errors import ConfigError, LockstepError
from tpu_grpo.records.stages import SyncResult
from tpu_grpo.weights.plan import LeafMove, Leaves, group_moves, plan_sync, shared_leaves
from tpu_grpo.weights.transport import Compiler, Program, compile_moves, compiled

U32 = Annotated[int, Field(ge=0, lt=2**32)]
"""A checksum, or the position of a device in the mesh."""


class CopyCheck:
    """Checks, by checksums, that all copies of a replicated parameter are equal.

    ``leaves`` are parameter arrays by name on one mesh; ``whose`` ("trainer" or "sampler") names this mesh in errors.
    """

    def __init__(self, whose: str, leaves: Mapping[str, Array]):
        self._whose = whose
        groups = {name: _replication_groups(leaf) for name, leaf in leaves.items()}
        self._groups = {name: found for name, found in groups.items() if found}
        if not self._groups:
            return
        shardings = {name: named_sharding(leaves[name]) for name in self._groups}
        mesh = next(iter(shardings.values())).mesh
        specs = {name: sharding.spec for name, sharding in shardings.items()}
        summed = jax.shard_map(_checksums, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
        self._devices = list(np.asarray(mesh.devices).flat)
        """The devices in the order of the mesh."""
        self._checksums = jax.jit(summed)

    def __call__(self, leaves: Mapping[str, Array], hosts: Hosts) -> None:
        """Compare the copies of all leaves. Every host with devices of the leaves' mesh must call this; others may.

        Raises:
            LockstepError: if copies differ; the message names the first leaf that differs, and the hosts.
        """
        if not self._groups or hosts.index not in (members := hosts_of(self._devices)):
            return
        sums_DL = self._checksums({name: leaves[name] for name in self._groups})
        table = self._table(sums_DL, hosts.among(members))
        for column, (name, groups) in enumerate(self._groups.items()):
            for group in groups:
                where: dict[str, list[Any]] = {}
                for position, value in zip(group, table[group, column], strict=True):
                    where.setdefault(f"{value:#010x}", []).append(self._devices[position])
                if len(where) > 1:
                    raise LockstepError(self._differs(name, where))

    def _table(self, sums_DL: Array, hosts: Hosts) -> UInt32[np.ndarray, "D L"]:
        """Collect the checksums of all devices from all hosts, with rows in the order of the mesh."""
        mine = [[self._devices.index(shard.device), *np.asarray(shard.data)[0]] for shard in sums_DL.addressable_shards]

        def read(host: int, answer: list[list[int]]) -> UInt32[np.ndarray, "d columns"]:
            own = [place for place, device in enumerate(self._devices) if hosts_of([device]) == (host,)]
            rows = np.array(sorted(answer), np.uint32).reshape(len(own), 1 + len(self._groups))
            if rows[:, 0].tolist() != own:
                raise ValueError(f"host {host} has the devices {own}, got {rows[:, 0]}")
            return rows

        name = f"copies of the {self._whose}'s parameters"
        rows = np.concatenate(hosts.share(name, np.asarray(mine, np.uint32).tolist(), list[list[U32]], read))
        return rows[np.argsort(rows[:, 0]), 1:]

    def _differs(self, name: str, where: Mapping[str, list[Any]]) -> str:
        listed = "; ".join(
            f"sum {value} on {', '.join(f'host {hosts_of([d])[0]} device {d.id}' for d in on)}"
            for value, on in sorted(where.items(), key=lambda item: len(item[1]))
        )
        return (
            f"every copy of the {self._whose}'s {name} must be the same, got {listed}; the run goes no further on "
            "them: start it again from its last checkpoint, and replace a host that does this twice"
        )


def _checksums(leaves: Mapping[str, Array]) -> UInt32[Array, "1 L"]:
    """Return the checksums of the shards on this device."""
    return jnp.stack([bit_sum(leaf) for leaf in leaves.values()])[None]


def _replication_groups(leaf: Array) -> list[list[int]]:
    """For each shard of a leaf that several devices hold, list these devices by their positions in the mesh."""
    sharding = named_sharding(leaf)
    held = sharding.devices_indices_map(leaf.shape)
    groups: dict[str, list[int]] = {}
    for position, device in enumerate(np.asarray(sharding.mesh.devices).flat):
        groups.setdefault(str(held[device]), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


ALONE = Hosts()
TEMPORARY_BYTES = 512 * 2**20
"""The default bound on a program's temporary memory per device."""
GROUP_BYTES = 32 * 2**20
"""The most bytes per device that the results of a group take. In benchmarks/weights.py, larger groups are slower
and smaller ones no faster."""


class WeightSync:
    """Turns the trainer's parameters into the sampler's.

    Args:
        rules: the weight rules of the model's family.
        source: the trainer's leaves or their specs, by name.
        target: the specs of the sampler's leaves, by name.
        temporary_bytes: the most bytes per device that a program may need in addition to its arguments and results.
        lora_alpha: the alpha of the adapters among the trainer's leaves.
        frozen: names of the trainer's leaves that no update changes.
        hosts: the processes of the run. If trainer and sampler are on different hosts, all hosts must make every call;
            a host without the trainer's devices passes specs instead of the trainer's arrays.
        compiler: compiles the programs.

    Raises:
        WeightsError: if the trainer's and the sampler's leaves do not correspond.
        ConfigError: if the largest leaf alone needs more temporary memory than the bound.
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
        hosts: Hosts = ALONE,
        compiler: Compiler = compiled,
    ):
        self._compile = functools.partial(compile_moves, hosts=hosts, compiler=compiler)
        self._plan = functools.partial(plan_sync, rules, lora_alpha=lora_alpha, frozen=frozen)
        self.moves = self._plan(source, target)
        self._temporary_limit = temporary_bytes
        self._programs: dict[tuple[Any, ...], tuple[Program, int]] = {}
        self._single_leaf_programs: dict[tuple[Any, ...], Program] = {}
        self._written: dict[str, Array] = {}
        """The sampler's leaves that calls have written, by name, without aliased leaves; empty after ``release``."""
        moving = [move for move in self.moves if not move.aliased]
        trained, once = ([move for move in moving if move.frozen == is_frozen] for is_frozen in (False, True))
        limit = min(temporary_bytes, GROUP_BYTES)
        planned = [*group_moves(trained, limit), *group_moves(once, limit)]
        self.groups = [part for group in planned for part in self._split_to_bound(group)]

    @property
    def bytes_moved(self) -> int:
        """Bytes that the first sync writes, counting one copy of each leaf; later syncs leave out frozen leaves."""
        return sum(move.bytes for move in self.moves)

    @property
    def temporary_bytes(self) -> int:
        """The most bytes per device that a program needs in addition to its arguments and results."""
        return max((temporary for _, temporary in self._programs.values()), default=0)

    @property
    def shared_leaves(self) -> frozenset[str]:
        """The trainer's leaves whose arrays the sampler uses as well."""
        return shared_leaves(self.moves)

    def describe(self) -> list[str]:
        """Describe the plan: a line with the totals, then a line per kind of leaf, with the layers taken together."""
        kinds: dict[tuple[str, ...], list[LeafMove]] = {}
        for move in self.moves:
            names = (re.sub(r"\.\d+\.", ".*.", name) for name in (move.source, move.target))
            how = "shared" if move.aliased else getattr(move.transform, "__name__", str(move.transform))
            how = "merged, " * move.merges + how + ", once" * move.frozen
            types = f"{move.source_specs[0].dtype} -> {move.spec.dtype}"
            kinds.setdefault((*names, how, types), []).append(move)
        lines = [
            f"  {len(found):3d} x {source} -> {target}  {how}, {types}, {sum(m.bytes for m in found) / 2**20:,.1f} MiB"
            for (source, target, how, types), found in kinds.items()
        ]
        shared, moved = sum(move.aliased for move in self.moves), f"{self.bytes_moved / 2**20:,.1f} MiB"
        return [f"{len(self.moves)} leaves, {shared} shared, {moved} move in {len(self.groups)} programs", *lines]

    def __call__(self, source: Leaves) -> tuple[dict[str, Array], SyncResult]:
        """Make the sampler's leaves from the trainer's, and free the leaves of the previous call that are not frozen.

        Returns the leaves by name, in the sampler's order, and the seconds and bytes that the sync took.
        """
        start, due = time.perf_counter(), [group for group in self.groups if not self._is_done(group)]
        for group in due:
            self._free(group)
            program, _ = self._program(group)
            moved = program(_values(group, source))
            self._written |= {move.target: array for move, array in zip(group, moved, strict=True)}
        weights = {
            move.target: from_shards(move.spec, source[move.source]) if move.aliased else self._written[move.target]
            for move in self.moves
        }
        jax.block_until_ready(self._written)
        bytes_moved = sum(move.bytes for group in due for move in group)
        return weights, SyncResult(time.perf_counter() - start, bytes_moved)

    def expected(self, source: Leaves) -> Iterator[tuple[LeafMove, Array]]:
        """Compute the sampler's leaves again, one at a time, to compare them with those that a sync made.

        The method makes the plan again, and computes each leaf by a program of its own, in the same order on all hosts.
        """
        target = {move.target: move.spec for move in self.moves}
        for move in self._plan(source, target):
            if move.signature not in self._single_leaf_programs:
                self._single_leaf_programs[move.signature], _ = self._compile([move])
            yield move, self._single_leaf_programs[move.signature](_values([move], source))[0]

    def release(self) -> None:
        """Free the sampler's leaves that calls have written; aliased leaves belong to the trainer and stay."""
        for group in self.groups:
            self._free(group)

    def _is_done(self, group: Sequence[LeafMove]) -> bool:
        """Whether all leaves of a group are frozen and already moved."""
        return all(move.frozen and move.target in self._written for move in group)

    def _free(self, group: Sequence[LeafMove]) -> None:
        for move in group:
            if (old := self._written.pop(move.target, None)) is not None:
                old.delete()

    def _split_to_bound(self, group: tuple[LeafMove, ...]) -> list[tuple[LeafMove, ...]]:
        """Compile a group's program, and halve the group until temporary memory is within the bound."""
        _, temporary = self._program(group)
        if temporary <= self._temporary_limit:
            return [group]
        if len(group) == 1:
            raise ConfigError(
                f"meshes.sync_temporary_mib must hold what moving {group[0].source} needs, {temporary / 2**20:.1f} MiB "
                f"per device, got {self._temporary_limit / 2**20:g}; raise it"
            )
        del self._programs[_signature(group)]
        half = len(group) // 2
        return [part for side in (group[:half], group[half:]) for part in self._split_to_bound(side)]

    def _program(self, group: tuple[LeafMove, ...]) -> tuple[Program, int]:
        signature = _signature(group)
        if signature not in self._programs:
            self._programs[signature] = self._compile(group)
        return self._programs[signature]


def _values(group: Sequence[LeafMove], source: Leaves) -> list[Array]:
    return [source[name] for move in group for name in move.sources]


def _signature(group: Sequence[LeafMove]) -> tuple[Any, ...]:
    return tuple(move.signature for move in group)
