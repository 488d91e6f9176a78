"""How a process joins a run: its backend and threads, the other hosts, and which host has which devices.

On a machine without a TPU, libtpu (installed by a dependency) would look for a TPU at start-up and print errors about
missing hosts. If the CPU platform is chosen, jax does not load libtpu.

On a slice, the compiled program and the order of every sum depend only on the devices. With CPU devices, two things
would also depend on the number of processes, so that one process and several would differ in the last bits of results:

- XLA's matrix products split a sum by the number of threads: the machine's cores (or NPROC) or the process's devices,
  whichever is larger. ``choose_threads`` sets NPROC to the number of devices of the whole run.
- XLA sums over the devices of a process one by one; gloo sums in another order. ``start`` always uses gloo.

Both effects were seen with jaxlib 0.10.2.

A slice numbers its devices by position, not host by host: in a v5e-16, host 0 has devices 0, 1, 4 and 5. Meshes that
are divided between hosts take the devices in the order of ``by_host``.
"""

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.hosts.ending import this_process
from tpu_grpo.hosts.host_agreement import Hosts
from tpu_grpo.records.errors import ConfigError

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
TPU_DEVICE_FILES = ("accel*", "vfio/[0-9]*")
"""Device files of TPUs below /dev: the first with the drivers of v4 and older, the second with newer ones."""


def choose_platform(environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Set JAX_PLATFORMS=cpu on a machine without a TPU, unless it is set already; call this before importing jax."""
    if environment.get("JAX_PLATFORMS"):
        return
    if not any(any(devices.glob(pattern)) for pattern in TPU_DEVICE_FILES):
        environment["JAX_PLATFORMS"] = "cpu"


def cpu_devices(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's number of CPU devices, by JAX_NUM_CPU_DEVICES or XLA_FLAGS; 0 if jax does not use CPUs."""
    if "cpu" not in environment.get("JAX_PLATFORMS", ""):
        return 0
    flags = re.findall(rf"{DEVICE_COUNT_FLAG}=(\d+)", environment.get("XLA_FLAGS", ""))
    return int(environment.get("JAX_NUM_CPU_DEVICES") or (flags[-1] if flags else 1))


def may_have_others(count: int) -> bool:
    """Whether the run may have several hosts: with ``hosts.count`` > 1, or on TPUs, where jax finds the hosts."""
    return count > 1 or "cpu" not in os.environ.get("JAX_PLATFORMS", "")


def choose_threads(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set NPROC to the number of CPU devices of all ``count`` processes, if that is > 1; keep an existing value."""
    if (devices := count * cpu_devices(environment)) > 1:
        environment.setdefault("NPROC", str(devices))


def start(
    coordinator: str | None,
    count: int,
    index: int,
    *,
    run: str = "",
    timeout_seconds: float = 300.0,
    environment: MutableMapping[str, str] = os.environ,
) -> Hosts:
    """Connect to the other hosts of the run; call this after ``choose_platform``, before the first use of a device.

    One process with several CPU devices starts a coordination service for itself, on the loopback interface: gloo
    needs it, and with gloo the results equal those of several processes with as many devices.

    ``coordinator`` is the host:port on which host 0 listens. It is None for one process, and on a TPU slice, whose
    metadata has it. Hosts with another ``run`` name are refused. All hosts must join within ``timeout_seconds``.

    Raises:
        ConfigError: the coordinator is not an address, another run or program uses its port, or jax has created
            devices before the hosts met.
        LockstepError: some hosts did not join; the message names them.
    """
    address, _, port = (coordinator or "").rpartition(":")
    if coordinator is not None and not (address and re.fullmatch(r"\d{1,5}", port) and 0 < int(port) < 65536):
        raise ConfigError(
            f"hosts.coordinator must be ADDRESS:PORT of host 0, got {coordinator!r}; for example 127.0.0.1:8476"
        )
    if coordinator is None and "cpu" not in environment.get("JAX_PLATFORMS", ""):
        coordinator, count, index = _tpu_slice(timeout_seconds)
    choose_threads(count, environment)
    if count == 1 and cpu_devices(environment) <= 1:
        return Hosts()
    from tpu_grpo.hosts.coordination_service import connect, serve_alone  # with the hosts' meeting

    if coordinator is None or count == 1:
        serve_alone()
        return Hosts()
    this_process.index = index
    return Hosts(index, count, connect(coordinator, count, index, timeout_seconds, run))


def _tpu_slice(timeout_seconds: float) -> tuple[str | None, int, int]:
    """Return (coordinator, count, index) from the TPU machine's environment or metadata; (None, 1, 0) for one host."""
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if cluster.is_env_present():
            count = cluster.get_process_count()
            if count == 1:
                return None, 1, 0
            return cluster.get_coordinator_address(int(timeout_seconds), None), count, cluster.get_process_id()
    return None, 1, 0


def by_host(devices: Iterable[Any]) -> list[Any]:
    """Sort devices by host, and within a host by device number."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def hosts_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the hosts that own any of these devices, ascending."""
    return tuple(sorted({device.process_index for device in devices}))


def slices_of(devices: Iterable[Any], count: int) -> list[list[Any]]:
    """Divide devices into ``count`` slices, each listed host by host, and the slices by the numbers of their hosts.

    TPUs know their slice. Hosts with other devices are divided evenly, in their order.

    Raises:
        ConfigError: if TPUs are of another number of slices, or other hosts cannot be divided evenly.
    """
    devices = by_host(devices)
    hosts = hosts_of(devices)
    if devices[0].platform == "tpu":
        number = {device.process_index: getattr(device, "slice_index", 0) for device in devices}
    else:
        number = {host: place * count // len(hosts) for place, host in enumerate(hosts)}
    found = sorted(set(number.values()))
    slices = [[device for device in devices if number[device.process_index] == n] for n in found]
    of_hosts = list(number.values())
    if len(slices) != count or len({len(each) for each in slices}) > 1 or of_hosts != sorted(of_hosts):
        raise ConfigError(
            "meshes.slices must be the number of slices, of equal size, whose hosts are numbered slice by slice, got "
            f"{count} for hosts of the slices {of_hosts}; correct it, or start other hosts"
        )
    return slices


def own_slice(slices: Sequence[Sequence[Any]]) -> int:
    """Return which slice this process has devices of; 0 if it has none, as for the devices of a plan."""
    import jax

    mine = jax.process_index()
    return next((n for n, each in enumerate(slices) if mine in hosts_of(each)), 0)


def devices_per_host(devices: Sequence[Any]) -> int:
    """Return the number of devices of each host; raises ValueError if hosts have different numbers."""
    counts = {host: sum(device.process_index == host for device in devices) for host in hosts_of(devices)}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every host must have as many devices as the others, got {counts} by host")
    return next(iter(counts.values()))
