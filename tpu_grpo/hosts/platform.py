"""Decides which backend jax uses and how it computes, before it is imported.

Without a TPU in the machine, libtpu (installed for TPU machines by a dependency) would look for one at start-up and
print complaints about missing hosts; naming the CPU keeps it from being loaded.

On a slice the compiled program, and with it every sum's order, depends on the devices alone. On CPU devices two things
would depend on how they are spread over processes, so that one process and several computed different last bits:

- XLA's matrix products split a sum by the number of threads, which is the larger of the machine's cores (or NPROC)
  and the process's devices. ``choose_threads`` sets NPROC to the devices of the whole run.
- Devices of one process add up one after the other, those of several in gloo's order. ``start`` uses gloo for both.

Both were seen with jaxlib 0.10.2.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
TPU_DEVICE_FILES = ("accel*", "vfio/[0-9]*")
"""TPUs have these files below /dev: with the drivers of v4 and older, and with those of v5e and newer."""


def choose_platform(environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Set JAX_PLATFORMS=cpu on a machine without a TPU; a value that is set already is kept."""
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


def choose_threads(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set NPROC to the CPU devices of all ``count`` processes if there are several; a value that is set is kept."""
    if (devices := count * cpu_devices(environment)) > 1:
        environment.setdefault("NPROC", str(devices))
