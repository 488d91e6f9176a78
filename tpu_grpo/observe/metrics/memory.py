"""Measures how much memory this host's process and its devices hold."""

import jax
import psutil

GIB = 2**30


def memory_metrics() -> dict[str, float]:
    """Return ``memory/*`` in GiB: of this process, and of the fullest of its devices now and at its peak so far.

    Devices that do not say, such as CPUs, are left out.
    """
    known = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    of_devices = {"memory/device_gib": "bytes_in_use", "memory/device_peak_gib": "peak_bytes_in_use"}
    return {"memory/host_gib": psutil.Process().memory_info().rss / GIB} | {
        name: max(found) / GIB
        for name, key in of_devices.items()
        if (found := [stats[key] for stats in known if key in stats])
    }
