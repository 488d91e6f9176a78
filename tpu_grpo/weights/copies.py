"""That all copies of a parameter are the same bits, wherever on the run's hosts they lie.

A sampler's leaf has a copy in every replica, a trainer's norm one on every device. They come about by the same program
everywhere, so they can differ only if a host computes otherwise or its memory was changed; nothing else would notice.

    check = CopyCheck("sampler", weights)     # once, for the layout
    check(weights, hosts)                     # reads every copy once; raises on every host

Compared are sums: a shard's elements, read as unsigned integers, added modulo 2^32. A single changed bit changes one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from tpu_grpo.errors import LockstepError
from tpu_grpo.hosts import Hosts, hosts_of


class CopyCheck:
    """Compares the copies of those leaves that have any.

    Args:
        whose: for messages: trainer or sampler.
        leaves: by name, all on one mesh.
    """

    def __init__(self, whose: str, leaves: Mapping[str, Array]):
        self._whose = whose
        groups = {name: _copies(leaf) for name, leaf in leaves.items()}
        self._groups = {name: found for name, found in groups.items() if found}
        if not self._groups:
            return
        shardings = {name: _named(leaves[name]) for name in self._groups}
        mesh = next(iter(shardings.values())).mesh
        specs = {name: sharding.spec for name, sharding in shardings.items()}
        summed = jax.shard_map(_sums, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False)
        self._devices = _devices(next(iter(shardings.values())))
        self._sums = jax.jit(summed)

    def __call__(self, leaves: Mapping[str, Array], hosts: Hosts) -> None:
        """Compare; every host calls it.

        Raises:
            LockstepError: naming the first leaf with copies that differ, and the hosts.
        """
        if not self._groups:
            return
        sums_DL = self._sums({name: leaves[name] for name in self._groups})
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
        """The sums of all devices: rows in the order of the mesh."""
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


def _sums(leaves: Mapping[str, Array]) -> UInt32[Array, "1 L"]:
    """Of this device's shards."""
    return jnp.stack([_bit_sum(leaf) for leaf in leaves.values()])[None]


def _bit_sum(value: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _copies(leaf: Array) -> list[list[int]]:
    """Positions in the mesh of the devices that hold the same part of a leaf; parts with one holder are left out."""
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
    """In the order of the mesh."""
    return list(np.asarray(sharding.mesh.devices).flat)
