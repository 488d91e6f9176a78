"""A TPU slice that is not here: its devices, as libtpu describes them, for programs to be compiled for.

prepare("v5e-16")                     # before jax is imported
target = open_slice("v5e-16")         # 16 devices on 4 hosts
with target.pretended():              # libraries that ask which devices there are get these
    ...
"""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tpu_grpo.errors import ConfigError
from tpu_grpo.launching.slices import Slice, parse_slice
from tpu_grpo.planning.chips import Chip, chip_of

BOUNDS = {
    2: {
        1: (1, 1),
        4: (2, 2),
        8: (2, 4),
        16: (4, 4),
        32: (4, 8),
        64: (8, 8),
        128: (8, 16),
        256: (16, 16),
    },
    3: {
        4: (2, 2, 1),
        8: (2, 2, 2),
        16: (2, 2, 4),
        32: (2, 4, 4),
        64: (4, 4, 4),
        128: (4, 4, 8),
        256: (4, 8, 8),
        512: (8, 8, 8),
    },
}
"""Chips along each side of the default topologies, by dimensions and number of chips."""
DIMENSIONS = {"v5e": 2, "v6e": 2, "v5p": 3}


@dataclass(frozen=True)
class Target:
    """A slice and its devices."""

    slice: Slice
    chip: Chip
    devices: tuple[Any, ...]

    @property
    def name(self) -> str:
        """As it was asked for, in the common name of its generation."""
        return f"{self.slice.family.name}-{self.slice.chips * self.slice.family.counted_per_chip}"

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """``jax.devices()`` gives these devices.

        Reason: Tunix's models leave their shardings out, and the kernels choose their block sizes, by the first device
        they find. jax itself does not ask there.
        """
        import jax

        with mock.patch.object(jax, "devices", return_value=list(self.devices)):
            yield


def prepare(name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """What libtpu and jax have to find in the environment when they are loaded; for a command, not for a library.

    Raises:
        ConfigError: for a slice that does not exist or cannot be planned.
    """
    family = parse_slice(name, flag="--slice").family
    chip_of(family.name)
    environment["JAX_PLATFORMS"] = "cpu"  # nothing is computed, also where there is a TPU
    environment.setdefault("LIBTPU_INIT_ARGS", " ".join(family.libtpu_args))


def open_slice(name: str) -> Target:
    """Ask libtpu for the devices of a slice.

    Raises:
        ConfigError: for a slice that does not exist or cannot be planned.
    """
    found = parse_slice(name, flag="--slice")
    chip = chip_of(found.family.name)
    bounds = BOUNDS[DIMENSIONS[found.family.name]].get(found.chips)
    if bounds is None:
        known = [size * found.family.counted_per_chip for size in BOUNDS[DIMENSIONS[found.family.name]]]
        raise ConfigError(f"--slice {found.family.name}-N must have N in {known}, got {name}; choose the next larger")
    os.environ.update(  # where libtpu looks, instead of asking the machine that a TPU would hang on
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=found.accelerator_type,
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    from jax.experimental import topologies

    one_host = {"chips_per_host_bounds": [*bounds, 1][:3]} if found.hosts == 1 else {}
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip.topology}:{'x'.join(map(str, bounds))}", **one_host
    )
    return Target(found, chip, tuple(topology.devices))
