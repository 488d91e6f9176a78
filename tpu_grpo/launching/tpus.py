"""The known generations of TPUs, a record for each, and the names of slices.

    v5e-16 -> accelerator type v5litepod-16, runtime version v2-alpha-tpuv5-lite, 16 chips on 4 hosts

The number in a name counts TensorCores: of v5e and v6e a chip has one, of v4 and v5p two. Runtime versions are those
that the Cloud TPU documentation lists for JAX.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpu_grpo.records.errors import ConfigError

GIB = 2**30
CHIPS_PER_HOST = 4
"""Every host of a slice with several hosts has this many chips."""

_SIDES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
}
"""These are the chips along each side of the default topologies, by the torus's dimensions."""

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
    """The memory and the speeds of one chip.

    The memory is that which libtpu's compiler lets programs use; the speeds are those of the Cloud TPU documentation.
    """

    memory_bytes: int
    flops_per_second: float
    """This counts bfloat16 products."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """All links of the chip together carry this in one direction; `Generation.sent_bytes_per_second` is what a slice
    can use of it."""


@dataclass(frozen=True)
class Rates:
    """How much of a chip's speeds programs reach, as plans assume it; `tpu-grpo check` measures them on a slice.

    The defaults come from published speeds, as planning/costs.py says.
    """

    memory: float = 0.8
    """Of the memory's speed, for weights in a decode step and for the optimizer's state: large matrices, read in
    order."""
    cache_bytes_per_second: float = 0.74e12
    """The keys and values that the attention kernel gets through on a chip, where its memory is not slower. Fitted,
    45 % of the memory's speed of v6e. It is not a share, because instructions limit the kernel: those that the compiler
    makes of it for v5e keep up with a memory half as fast. A number of 8 bits therefore counts as one of 16. The kernel
    of the published speeds was an earlier one, without the form for decode steps that engines have here."""
    prefill: float = 0.25
    """Of a chip's products, in a prefill. Fitted; the published times to first tokens alone give 14 to 28 %."""
    products: float = 0.5
    """Of a chip's products, in a learner's program. MaxText publishes 45 % for Llama-3.1-8B on v6e-256, what is
    computed again not counted."""
    links: float = 0.8
    """Of the links' speed: 90 of 112 GB/s a link on v6e ("How to scale your model", chapter 2)."""
    allreduce_seconds: float = 2e-6
    """The least time of one all-reduce: two hops of a microsecond each (the same chapter)."""
    host: float = 1.0
    """The host's time for a launch of an engine, in units of what planning/costs.py computes."""


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
    rates: Rates = Rates()

    @property
    def topologies(self) -> Mapping[int, tuple[int, ...]]:
        """Return the chips along each side of its default topologies, by the number of chips."""
        return {math.prod(sides): sides for sides in _SIDES[self.torus_dimensions]}

    def links(self, chips: int) -> int:
        """Return the links to other chips of a rectangle that the chip with the fewest links, one in a corner, has.

        Such a chip has a neighbour along every side, and a second one where the side is closed to a ring. That is so
        for the 16 chips of a whole side of a v5e or v6e pod, and for slices of v4 or v5p that are made of whole cubes
        of 4 x 4 x 4 (Cloud TPU documentation). A number of chips that is not a slice counts as a line.
        """
        sides = self.topologies.get(chips, (chips,))
        ring = (lambda side: side == 16) if self.torus_dimensions == 2 else (lambda _: not any(s % 4 for s in sides))
        return sum(1 + ring(side) for side in sides if side > 1)

    def sent_bytes_per_second(self, chips: int) -> float:
        """Return the bytes per second that every chip of a rectangle of ``chips`` can send to the others; 0 for a
        single chip."""
        return self.chip.link_bytes_per_second * self.links(chips) / (2 * self.torus_dimensions)


GENERATIONS = (
    Generation(
        *("v4", "v4", "tpu-ubuntu2204-base", 2, 3, (4,)),
        Chip(int(30.75 * GIB), 275e12, 1228e9, 300e9),
        libtpu_description={"chip_config_name": "megacore"},
    ),
    Generation("v5p", "v5p", "v2-alpha-tpuv5", 2, 3, (4,), Chip(int(95.74 * GIB), 459e12, 2765e9, 600e9)),
    Generation(
        *("v5e", "v5litepod", "v2-alpha-tpuv5-lite", 1, 2, (1, 4, 8)),
        Chip(int(15.75 * GIB), 197e12, 819e9, 200e9),
        libtpu_args=(*OVERLAP_COLLECTIVES, WHOLE_PRODUCTS),
    ),
    Generation(
        *("v6e", "v6e", "v2-alpha-tpuv6e", 1, 2, (1, 4, 8)),
        Chip(int(31.25 * GIB), 918e12, 1640e9, 448e9),
        libtpu_args=(*OVERLAP_COLLECTIVES, "--xla_tpu_scoped_vmem_limit_kib=98304"),  # of 128 MiB; the default is 16
    ),
)
DEVICE_KINDS = {
    "v4": ("TPU v4",),
    "v5p": ("TPU v5", "TPU v5p"),
    "v5e": ("TPU v5 lite", "TPU v5e"),
    "v6e": ("TPU v6 lite", "TPU v6e"),
}
"""These are jax's names of the devices of a generation."""


@dataclass(frozen=True)
class Slice:
    """Connected TPU chips and their hosts."""

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
    if found.torus_dimensions == 3:  # slices come in every number of hosts
        if rest or chips < CHIPS_PER_HOST or chips % CHIPS_PER_HOST:
            raise ConfigError(
                f"{flag} {found.name}-N must count TensorCores, eight a host: {found.name}-8, -16, -32, ...; got {name}"
            )
    elif chips not in found.topologies:
        raise ConfigError(f"{flag} {found.name}-N must count chips, N one of {list(found.topologies)}, got {name}")
    return Slice(found, chips)
