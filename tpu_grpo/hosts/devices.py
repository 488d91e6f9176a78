"""Says which devices belong to which host, and in which order meshes take them.

A slice numbers its devices along its wires, not host by host: of a v5e-16, host 0 has devices 0, 1, 4 and 5. Meshes
that are to be cut at the hosts' borders take them in the order of ``by_host``.
"""

from collections.abc import Iterable, Sequence
from typing import Any


def by_host(devices: Iterable[Any]) -> list[Any]:
    """Return the devices of host 0, then those of host 1, and so on; each host's in the order of their numbers."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def hosts_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the hosts that have any of the devices, ascending."""
    return tuple(sorted({device.process_index for device in devices}))


def devices_per_host(devices: Sequence[Any]) -> int:
    """Return how many of the devices each host has.

    Raises:
        ValueError: the hosts do not all have as many.
    """
    counts = {host: sum(device.process_index == host for device in devices) for host in hosts_of(devices)}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every host must have as many devices as the others, got {counts} by host")
    return next(iter(counts.values()))
