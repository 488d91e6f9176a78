"""Which backend jax uses, decided before it is imported.

Without a TPU in the machine, libtpu (installed for TPU machines by a dependency) would look for one at start-up and
print complaints about missing hosts; naming the CPU keeps it from being loaded.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

TPU_DEVICE_FILES = ("accel*", "vfio/[0-9]*")
"""Below /dev: v4 and older drivers, and v5e and newer."""


def choose_platform(environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/dev")) -> None:
    """Set JAX_PLATFORMS=cpu on a machine without a TPU; a value that is set already is kept."""
    if environment.get("JAX_PLATFORMS"):
        return
    if not any(any(devices.glob(pattern)) for pattern in TPU_DEVICE_FILES):
        environment["JAX_PLATFORMS"] = "cpu"
