"""How a process joins a run: its backend and threads, the other hosts, and which devices are whose.

Without a TPU in the machine, libtpu (installed for TPU machines by a dependency) would look for one at start-up and
print complaints about missing hosts; naming the CPU keeps it from being loaded.

On a slice the compiled program, and with it every sum's order, depends on the devices alone. On CPU devices two things
would depend on how they are spread over processes, so that one process and several computed different last bits:

- XLA's matrix products split a sum by the number of threads, which is the larger of the machine's cores (or NPROC)
  and the process's devices. ``choose_threads`` sets NPROC to the devices of the whole run.
- Devices of one process add up one after the other, those of several in gloo's order. ``start`` uses gloo for both.

Both were seen with jaxlib 0.10.2.

A slice numbers its devices along its wires, not host by host: of a v5e-16, host 0 has devices 0, 1, 4 and 5. Meshes
that are to be cut at the hosts' borders take them in the order of ``by_host``.
"""

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.hosts.coordination_service import connect, serve_alone
from tpu_grpo.hosts.ending import here
from tpu_grpo.hosts.host_agreement import Hosts
from tpu_grpo.records.errors import ConfigError

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
TPU_DEVICE_FILES = ("accel*", "vfio/[0-9]*")
"""TPUs have these files below /dev: with the drivers of v4 and older, and with those of v5e and newer."""


def choose_platform(environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Set JAX_PLATFORMS=cpu on a machine without a TPU, before jax is imported; a value that is already set is kept."""
    if environment.get("JAX_PLATFORMS"):
        return
    if not any(any(devices.glob(pattern)) for pattern in TPU_DEVICE_FILES):
        environment["JAX_PLATFORMS"] = "cpu"


def cpu_devices(environment: Mapping[str, str] = os.environ) -> int:
    """Return the virtual CPU devices that XLA_FLAGS or JAX_NUM_CPU_DEVICES ask for; 0 off the CPU."""
    if "cpu" not in environment.get("JAX_PLATFORMS", ""):
        return 0
    flags = re.findall(rf"{DEVICE_COUNT_FLAG}=(\d+)", environment.get("XLA_FLAGS", ""))
    return int(environment.get("JAX_NUM_CPU_DEVICES") or (flags[-1] if flags else 1))


def may_have_others(count: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a run with this ``hosts.count`` may have several processes: a TPU slice finds its hosts by itself."""
    return count > 1 or "cpu" not in environment.get("JAX_PLATFORMS", "")


def choose_threads(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set NPROC to the CPU devices of all ``count`` processes if there are several; a value that is set is kept."""
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
    """Meet the other hosts. Call it before the first use of a device, and after ``choose_platform``.

    One process with several CPU devices starts a coordination service for itself, on the loopback interface: gloo
    needs one, and with gloo the results equal those of several processes with as many devices.

    ``coordinator`` is host:port where host 0 listens; None for one process, and on a TPU slice, which knows its own. A
    host of a run of another name is sent away. The slowest may take ``timeout_seconds`` to come.

    Raises:
        ConfigError: the coordinator is no address, or its port is another run's, or another program's, or jax has
            devices before several could meet.
        LockstepError: some hosts did not come; says which.
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
    if coordinator is None or count == 1:
        serve_alone()
        return Hosts()
    here.index = index
    return Hosts(index, count, connect(coordinator, count, index, timeout_seconds, run))


def _tpu_slice(timeout_seconds: float) -> tuple[str | None, int, int]:
    """Return (coordinator, count, index) from the TPU machine's environment or metadata; no coordinator off a slice."""
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        if cluster.is_env_present():
            count = cluster.get_process_count()
            if count == 1:
                return None, 1, 0
            return cluster.get_coordinator_address(int(timeout_seconds), None), count, cluster.get_process_id()
    return None, 1, 0


def by_host(devices: Iterable[Any]) -> list[Any]:
    """Return the devices of host 0, then those of host 1, and so on; each host's in the order of their numbers."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def hosts_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the hosts that have any of the devices, ascending."""
    return tuple(sorted({device.process_index for device in devices}))


def devices_per_host(devices: Sequence[Any]) -> int:
    """Return the number of devices of each host; raises ValueError if hosts do not all have as many."""
    counts = {host: sum(device.process_index == host for device in devices) for host in hosts_of(devices)}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every host must have as many devices as the others, got {counts} by host")
    return next(iter(counts.values()))
