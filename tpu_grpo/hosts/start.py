"""Brings the processes of a run together."""

import os
import re
from collections.abc import MutableMapping

from tpu_grpo.hosts.agreement import Hosts
from tpu_grpo.hosts.ending import here
from tpu_grpo.hosts.platform import choose_threads, cpu_devices
from tpu_grpo.records.errors import ConfigError


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

    One process with several CPU devices starts a service for itself, on the loopback interface: gloo needs one, and
    with gloo it computes what several processes with as many devices compute (see platform.py).

    Args:
        coordinator: host:port where host 0 listens; None for one process, and on a TPU slice, which knows its own.
        count: number of processes.
        index: which of them this is.
        run: the name of the run; a host of another one is sent away.
        timeout_seconds: how long the slowest host may take to come.
        environment: where the choice of ``choose_platform`` is found.

    Raises:
        ConfigError: the three do not describe one of several processes, or jax has devices before several could meet,
            or the coordinator's port is another run's, or another program's.
        LockstepError: some hosts did not come; says which.
    """
    _check(coordinator, count, index)
    if coordinator is None and "cpu" not in environment.get("JAX_PLATFORMS", ""):
        coordinator, count, index = _tpu_slice(timeout_seconds)
    choose_threads(count, environment)
    if count == 1 and cpu_devices(environment) <= 1:
        return Hosts()
    from tpu_grpo.hosts.service import connect, serve_alone

    if coordinator is None or count == 1:
        serve_alone()
        return Hosts()
    here.index = index
    return Hosts(index, count, connect(coordinator, count, index, timeout_seconds, run))


def _check(coordinator: str | None, count: int, index: int) -> None:
    if count < 1:
        raise ConfigError(f"hosts.count must be >= 1, got {count}; it is the number of processes")
    if not 0 <= index < count:
        raise ConfigError(
            f"hosts.index must be from 0 to hosts.count - 1 = {count - 1}, got {index}; every process has its own"
        )
    if coordinator is None:
        if count > 1:
            raise ConfigError(
                f"hosts.count={count} needs hosts.coordinator=ADDRESS:PORT, where host 0 listens; "
                "leave all three out for one process, and on a TPU slice"
            )
        return
    address, _, port = coordinator.rpartition(":")
    if not address or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(
            f"hosts.coordinator must be ADDRESS:PORT of host 0, got {coordinator!r}; for example 127.0.0.1:8476"
        )


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
