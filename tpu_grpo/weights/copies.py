"""Checks that all copies of a replicated parameter have the same bits, on whichever hosts they lie.

The sampler's leaves are replicated over the engines, and the trainer's norms over all devices. The same program writes
every copy, so copies differ only if a host computes differently or its memory was corrupted. Nothing else would notice.

    check = CopyCheck("sampler", weights)     # once per layout
    check(weights, hosts)                     # reads every copy once; raises on every host

The check compares checksums: the elements of a shard are read as unsigned integers and added modulo 2^32, so that a
single flipped bit changes the sum.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from tpu_grpo.hosts import Hosts, hosts_of
from tpu_grpo.hosts.leaf_numbers import bit_sum
from tpu_grpo.records.errors import LockstepError


class CopyCheck:
    """Compares the copies of every leaf that has more than one.

    Args:
        whose: "trainer" or "sampler", for messages.
        leaves: arrays by name, all on one mesh.
    """

    def __init__(self, whose: str, leaves: Mapping[str, Array]):
        self._whose = whose
        groups = {name: _replication_groups(leaf) for name, leaf in leaves.items()}
        self._groups = {name: found for name, found in groups.items() if found}
        if not self._groups:
            return
        shardings = {name: _named(leaves[name]) for name in self._groups}
        mesh = next(iter(shardings.values())).mesh
        specs = {name: sharding.spec for name, sharding in shardings.items()}
        summed = jax.shard_map(_checksums, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
        self._devices = _devices(next(iter(shardings.values())))
        self._checksums = jax.jit(summed)

    def __call__(self, leaves: Mapping[str, Array], hosts: Hosts) -> None:
        """Compare the copies of all leaves; every host must call this.

        Raises:
            LockstepError: if copies differ; it names the first such leaf and the hosts.
        """
        if not self._groups:
            return
        sums_DL = self._checksums({name: leaves[name] for name in self._groups})
        table = self._table(sums_DL, hosts)
        for column, (name, groups) in enumerate(self._groups.items()):
            for group in groups:
                values = table[group, column]
                if (values != values[0]).any():
                    where = {f"{value:#010x}": [] for value in values}
                    for position, value in zip(group, values, strict=True):
                        where[f"{value:#010x}"].append(self._devices[position])
                    raise LockstepError(self._differs(name, where))

    def _table(self, sums_DL: Array, hosts: Hosts) -> UInt32[np.ndarray, "D L"]:
        """Collect the checksums of all devices from all hosts, with rows in the order of the mesh."""
        position = {device: index for index, device in enumerate(self._devices)}
        own = {position[shard.device]: np.asarray(shard.data)[0] for shard in sums_DL.addressable_shards}
        mine = np.asarray([[row, *sums] for row, sums in own.items()], np.uint32)
        everyone = [
            np.frombuffer(part, np.uint32).reshape(-1, 1 + len(self._groups))
            for part in hosts.gather(f"copies of the {self._whose}'s parameters", mine.tobytes())
        ]
        rows = np.concatenate(everyone)
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
    """Group the devices that hold the same shard of a leaf, by their positions in the mesh.

    A shard that only one device holds has no group.
    """
    sharding = _named(leaf)
    held = sharding.devices_indices_map(leaf.shape)
    groups: dict[str, list[int]] = {}
    for position, device in enumerate(_devices(sharding)):
        groups.setdefault(str(held[device]), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def _named(leaf: Array) -> NamedSharding:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding


def _devices(sharding: NamedSharding) -> list[Any]:
    """List the devices in the order of the mesh."""
    return list(np.asarray(sharding.mesh.devices).flat)
