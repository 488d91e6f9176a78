"""Holds what is known of TPUs, a record for each generation, and reads the names of slices.

    v5e-16 -> accelerator type v5litepod-16, runtime version v2-alpha-tpuv5-lite, 16 chips on 4 hosts

The number in a name counts TensorCores: of v5e and v6e a chip has one, of v4 and v5p two. Runtime versions are those
that the Cloud TPU documentation lists for JAX.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpu_grpo.records.errors import ConfigError

GIB = 2**30
CHIPS_PER_HOST = 4
"""Every host of a slice with several hosts has this many chips."""

TOPOLOGIES: Mapping[int, Mapping[int, tuple[int, ...]]] = {
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
"""These are the chips along each side of the default topologies, by the torus's dimensions and the number of chips."""

OVERLAP_COLLECTIVES = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
"""With these, the next layer's shards are gathered while this layer computes."""

WHOLE_PRODUCTS = "--xla_tpu_enable_windowed_einsum_for_all_gather=false"
"""With this, a product runs whole once all shards are there, because it takes more cycles when it is cut into one for
each shard. Products whose sum is scattered stay cut: with whole ones the compiler adds up whole gradients on all
devices, and waits. This was seen in programs for v5e (docs/planning.md)."""


@dataclass(frozen=True)
class Chip:
    """Holds the memory and the speeds of one chip.

    The memory is what libtpu's compiler allows programs; the speeds are those of the Cloud TPU documentation.
    """

    memory_bytes: int
    flops_per_second: float
    """This counts bfloat16 products."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """All links of the chip together carry this in one direction; `Generation.sent_bytes_per_second` is what a slice
    can use of it."""


@dataclass(frozen=True)
class Generation:
    """Describes one generation of TPUs."""

    name: str
    """People and libtpu call it by this name."""
    accelerator_prefix: str
    """Its accelerator types begin with this."""
    runtime: str
    """Its machines get this software version unless another is asked for."""
    cores_per_chip: int
    torus_dimensions: int
    single_host_chips: tuple[int, ...]
    """Slices of these numbers of chips have one host."""
    chip: Chip
    libtpu_args: tuple[str, ...] = OVERLAP_COLLECTIVES
    """These are the default LIBTPU_INIT_ARGS."""
    libtpu_description: Mapping[str, str] = field(default_factory=dict)
    """libtpu must be told this to describe a chip as one device, as jax runs it."""

    @property
    def topologies(self) -> Mapping[int, tuple[int, ...]]:
        """Return the chips along each side of its default topologies, by the number of chips."""
        return TOPOLOGIES[self.torus_dimensions]

    def links(self, chips: int) -> int:
        """Return the links to other chips of a rectangle of ``chips`` that its worst placed chip, a corner, has.

        Such a chip has a neighbour along every side, and a second one where the side is closed to a ring. That is so
        for the 16 chips of a whole side of a v5e or v6e pod, and for slices of v4 or v5p that are made of whole cubes
        of 4 x 4 x 4 (Cloud TPU documentation). A number of chips that is not a slice counts as a line.
        """
        sides = self.topologies.get(chips, (chips,))
        ring = (lambda side: side == 16) if self.torus_dimensions == 2 else (lambda _: not any(s % 4 for s in sides))
        return sum(1 + ring(side) for side in sides if side > 1)

    def sent_bytes_per_second(self, chips: int) -> float:
        """Return what every chip of a rectangle of ``chips`` can send to others of it; 0 for a single chip."""
        return self.chip.link_bytes_per_second * self.links(chips) / (2 * self.torus_dimensions)

    @property
    def any_number_of_hosts(self) -> bool:
        """Say whether slices come in every number of hosts, and not only in the default topologies."""
        return self.torus_dimensions == 3


GENERATIONS = (
    Generation(
        name="v4",
        accelerator_prefix="v4",
        runtime="tpu-ubuntu2204-base",
        cores_per_chip=2,
        torus_dimensions=3,
        single_host_chips=(4,),
        chip=Chip(int(30.75 * GIB), 275e12, 1228e9, 300e9),
        libtpu_description={"chip_config_name": "megacore"},
    ),
    Generation(
        name="v5p",
        accelerator_prefix="v5p",
        runtime="v2-alpha-tpuv5",
        cores_per_chip=2,
        torus_dimensions=3,
        single_host_chips=(4,),
        chip=Chip(int(95.74 * GIB), 459e12, 2765e9, 600e9),
    ),
    Generation(
        name="v5e",
        accelerator_prefix="v5litepod",
        runtime="v2-alpha-tpuv5-lite",
        cores_per_chip=1,
        torus_dimensions=2,
        single_host_chips=(1, 4, 8),
        chip=Chip(int(15.75 * GIB), 197e12, 819e9, 200e9),
        libtpu_args=(*OVERLAP_COLLECTIVES, WHOLE_PRODUCTS),
    ),
    Generation(
        name="v6e",
        accelerator_prefix="v6e",
        runtime="v2-alpha-tpuv6e",
        cores_per_chip=1,
        torus_dimensions=2,
        single_host_chips=(1, 4, 8),
        chip=Chip(int(31.25 * GIB), 918e12, 1640e9, 448e9),
        libtpu_args=(*OVERLAP_COLLECTIVES, "--xla_tpu_scoped_vmem_limit_kib=98304"),  # of 128 MiB; the default is 16
    ),
)


@dataclass(frozen=True)
class Slice:
    """Consists of connected TPU chips and the hosts that they belong to."""

    generation: Generation
    chips: int

    @property
    def name(self) -> str:
        """Return the name with the generation's common name, such as v5e-16."""
        return f"{self.generation.name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def accelerator_type(self) -> str:
        """Return the name that ``--accelerator-type`` takes."""
        return f"{self.generation.accelerator_prefix}-{self.chips * self.generation.cores_per_chip}"

    @property
    def hosts(self) -> int:
        """Return the number of hosts, which gcloud calls workers."""
        return 1 if self.chips in self.generation.single_host_chips else self.chips // CHIPS_PER_HOST


def parse_slice(name: str, flag: str = "--type") -> Slice:
    """Return the slice of an accelerator type, or of a name with the generation's common name (v5litepod-16, v5e-16).

    Args:
        name: the name of the slice.
        flag: where the name comes from, for messages.

    Raises:
        ConfigError: the generation or the size does not exist.
    """
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    found = next((g for g in GENERATIONS if match and match[1] in (g.name, g.accelerator_prefix)), None)
    if match is None or found is None:
        known = ", ".join(f"{g.name}-N" for g in GENERATIONS)
        raise ConfigError(f"{flag} must be one of {known}, got {name!r}; for example v5e-16")
    chips, rest = divmod(int(match[2]), found.cores_per_chip)
    if found.any_number_of_hosts:
        if rest or chips < CHIPS_PER_HOST or chips % CHIPS_PER_HOST:
            raise ConfigError(
                f"{flag} {found.name}-N must count TensorCores, eight a host: {found.name}-8, -16, -32, ...; got {name}"
            )
    elif chips not in found.topologies:
        raise ConfigError(f"{flag} {found.name}-N must count chips, N one of {list(found.topologies)}, got {name}")
    return Slice(found, chips)
