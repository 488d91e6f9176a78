"""Measures the compilations and the memory of this process.

After the second step of a run nothing should compile any more.
"""

import threading
from typing import Any

import jax.monitoring
import psutil

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""The event that jax (0.10.2) records when it makes an executable, but not when it reuses one from memory."""
GIB = 2**30


class CompilationCounter:
    """Counts compilations in a ``with`` block.

        with CompilationCounter() as counter:
            jitted(x)      # first call with this shape: counter.count rises by one
            jitted(x)      # does not rise

    Operations outside ``jax.jit`` count too: each eager op compiles a program of its own for each new shape, and
    making an array can take several (``jnp.ones(5) + 1`` takes three). A jitted function that is called inside
    another is part of the outer program. A program from the persistent compilation cache on disk counts like any
    other, because it delays the step as well.
    """

    def __init__(self) -> None:
        self.count = 0
        """How many programs were compiled so far, by any thread."""
        self._lock = threading.Lock()

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **attributes: Any) -> None:
        if event == BACKEND_COMPILE:
            with self._lock:
                self.count += 1


def memory_metrics() -> dict[str, float]:
    """Return ``memory/*`` in GiB: of this process now, and of its fullest device now and at the peak so far.

    Devices that report no memory, such as CPUs, are left out.
    """
    known = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    of_devices = {"memory/device_gib": "bytes_in_use", "memory/device_peak_gib": "peak_bytes_in_use"}
    return {"memory/host_gib": psutil.Process().memory_info().rss / GIB} | {
        name: max(found) / GIB
        for name, key in of_devices.items()
        if (found := [stats[key] for stats in known if key in stats])
    }
