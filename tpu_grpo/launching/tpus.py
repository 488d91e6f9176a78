"""The known generations of TPUs, and the names of slices.

    v5e-16 -> accelerator type v5litepod-16, runtime version v2-alpha-tpuv5-lite, 16 chips on 4 hosts

The number in a name counts TensorCores: one per chip of v5e and v6e, two per chip of v4, v5p and v7x. jax shows a chip
as one device, but a v7x chip as two, each with its own half of the memory. Runtime versions are those that the Cloud
TPU documentation lists for JAX; the version for v7x is that of Google's accelerator-microbenchmarks.

Topologies, machine types, chips a host and hosts a slice are those of "Plan TPUs in GKE" (Google Kubernetes Engine
documentation) and of xpk 1.9, as of June 2026. The planner and both launchers read them from here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpu_grpo.records.errors import ConfigError

GIB = 2**30
CHIPS_PER_HOST = 4
"""The chips of each host, in slices with several hosts."""

_SIDES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)),
}
"""Number of torus dimensions -> default topologies, each as the numbers of chips along its sides."""

OVERLAP_COLLECTIVES = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
"""With these flags, the next layer's parameter shards are gathered while this layer computes."""

SPARSE_CORES = (
    "--xla_tpu_scoped_vmem_limit_kib=61440",  # of 64 MiB
    "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true",
)
"""Flags for v7x, whose SparseCores gather parameters while the TensorCores compute. They come from Google's recipe for
Llama-3.1-70B (AI-Hypercomputer/tpu-recipes), without the flags for the type of vector operations and for
all-reduces."""

LAYOUT_OF_ARGUMENTS = "--xla_tpu_control_large_2nd_minor_layout_for_x16=false"
"""Without this flag, programs for v7x use tiles of 16 x 128 for bfloat16, while their arguments have tiles of 8 x 128:
each launch of decode steps would copy all weights, which takes 4 ms and as much memory as the weights of Qwen3-8B. By
the compiler's cycles, the flag costs decode steps 0.1 % and prefills 0.7 %, and makes updates 2 % faster."""

WHOLE_PRODUCTS = "--xla_tpu_enable_windowed_einsum_for_all_gather=false"
"""With this flag, a matrix product runs as a whole once its parameter shards are gathered; a product per shard takes
more cycles. Products before a reduce-scatter stay split per shard; otherwise the compiler would all-reduce the whole
gradients, and wait for the all-reduce. This was seen in programs for v5e, where a layer of Qwen3-8B takes 22.6 instead
of 26.5 ms by the compiler's estimate."""


@dataclass(frozen=True)
class Chip:
    """The memory and the speeds of one chip, or of one of its devices if it has two.

    The memory is the part that libtpu's compiler lets programs use; the speeds are from the Cloud TPU documentation.
    """

    memory_bytes: int
    flops_per_second: float
    """FLOP/s of bfloat16 matrix products."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """The sum over all links of the chip, one way; a slice can use `Generation.sent_bytes_per_second` of it. If a chip
    has two devices, each has half of the sum."""
    network_bytes_per_second: float
    """The speed of the data-center network, which joins slices, one way; for v4 it is assumed to be v5e's."""


@dataclass(frozen=True)
class Rates:
    """The shares of a chip's speeds that plans assume programs to reach; `tpu-grpo check` measures them on a slice.

    The defaults come from published speeds and compiled kernels; see tpu_grpo/planning/costs.py.
    """

    memory: float = 0.8
    """Share of the memory's speed for weights in a decode step and for the optimizer's state. Both are large matrices
    that are read sequentially."""
    cache_bytes_per_second: float = 0.74e12
    """Keys and values per second that the attention kernel processes on a chip, unless its memory is slower. This is
    not a share, because instructions limit the kernel: a block of 1,024 keys takes about 730 bundles (cycles) for one
    head on v5p, which is 1.26 TB/s at 1.75 GHz, and 1,200 for two heads on v6e, which is 1.5 TB/s. For the same reason
    an 8-bit number counts like a 16-bit number. The default is fitted to published speeds of an earlier kernel."""
    prefill: float = 0.25
    """Share of a chip's FLOP/s in a prefill. It is fitted; published times to first tokens alone give 14 to 28 %."""
    products: float = 0.5
    """Share of a chip's FLOP/s in the learner's programs for a model that is 4,096 wide, recomputation included."""
    links: float = 0.8
    """Share of the links' speed: 90 of 112 GB/s per link on v6e ("How to scale your model", chapter 2)."""
    allreduce_seconds: float = 13e-6
    """The minimum time of one all-reduce. It is v7x's: Google's table of all-gathers (accelerator-microbenchmarks,
    Ironwood/guides/collectives/all_gather.md) fits bytes / 180 GB/s plus 13 us. No table of another generation is
    published, so the others have it too; two hops alone take 2 us ("How to scale your model", chapter 2)."""
    host: float = 1.0
    """The host's time for a launch of an engine, as a multiple of the time that tpu_grpo/planning/costs.py computes."""


@dataclass(frozen=True)
class Generation:
    """One generation of TPUs."""

    name: str
    """The common name."""
    accelerator_prefix: str
    """The prefix of its accelerator types."""
    runtime: str
    """The default software version of its machines."""
    cores_per_chip: int
    torus_dimensions: int
    single_host_chips: tuple[int, ...]
    """The sizes, in chips, of slices with a single host."""
    gke_accelerator: str
    """The label cloud.google.com/gke-tpu-accelerator of its nodes."""
    machine: str
    """Its machine types without the number of chips, such as ct5lp-hightpu for ct5lp-hightpu-4t."""
    chip: Chip
    device_kinds: tuple[str, ...] = ()
    """jax's names of its devices; libtpu also knows the first name."""
    libtpu_args: tuple[str, ...] = OVERLAP_COLLECTIVES
    """The default LIBTPU_INIT_ARGS."""
    libtpu_description: Mapping[str, str] = field(default_factory=dict)
    """Options with which libtpu's description of a slice has the same devices as jax (tpu_grpo/planning/slices.py)."""
    rates: Rates = Rates()
    devices_per_chip: int = 1
    only_on_gke: bool = False
    """Whether gcloud's TPU VMs do not list it."""

    @property
    def topologies(self) -> Mapping[int, tuple[int, ...]]:
        """Number of chips -> default topology, as the chips along each side."""
        return {math.prod(sides): sides for sides in _SIDES[self.torus_dimensions]}

    def links(self, devices: int) -> int:
        """Return the number of links of a corner chip, which has the fewest, in a rectangle of ``devices`` devices.

        A corner chip has one neighbour along every side, and a second one if that side is closed to a ring. Sides of
        16 chips in v5e and v6e pods are rings, and so are all sides of v4, v5p and v7x slices made of whole cubes of
        4 x 4 x 4 (Cloud TPU documentation). A number of chips that is not a known slice is treated as a line. Two
        devices of one chip are joined as if each had six links of its own (the same documentation).
        """
        chips = max(1, devices // self.devices_per_chip)
        if 1 < devices <= self.devices_per_chip:
            return 6 * self.devices_per_chip
        sides = self.topologies.get(chips, (chips,))
        ring = (lambda side: side == 16) if self.torus_dimensions == 2 else (lambda _: not any(s % 4 for s in sides))
        return sum(1 + ring(side) for side in sides if side > 1)

    def sent_bytes_per_second(self, devices: int) -> float:
        """Return the bytes per second that each of ``devices`` devices in a rectangle can send; 0 for a single one."""
        return self.chip.link_bytes_per_second * self.links(devices) / (2 * self.torus_dimensions)


GENERATIONS = (
    Generation(
        *("v4", "v4", "tpu-ubuntu2204-base", 2, 3, (4,), "tpu-v4-podslice", "ct4p-hightpu"),
        Chip(int(30.75 * GIB), 275e12, 1228e9, 300e9, 3.125e9),
        ("TPU v4",),
        libtpu_description={"chip_config_name": "megacore"},
        rates=Rates(products=0.7),
    ),
    Generation(
        *("v5p", "v5p", "v2-alpha-tpuv5", 2, 3, (4,), "tpu-v5p-slice", "ct5p-hightpu"),
        Chip(int(95.74 * GIB), 459e12, 2765e9, 600e9, 6.25e9),
        ("TPU v5", "TPU v5p"),
        rates=Rates(products=0.75, cache_bytes_per_second=1.31e12),
    ),
    Generation(
        *("v5e", "v5litepod", "v2-alpha-tpuv5-lite", 1, 2, (1, 4, 8), "tpu-v5-lite-podslice", "ct5lp-hightpu"),
        Chip(int(15.75 * GIB), 197e12, 819e9, 200e9, 3.125e9),
        ("TPU v5 lite", "TPU v5e"),
        libtpu_args=(*OVERLAP_COLLECTIVES, WHOLE_PRODUCTS),
        rates=Rates(products=0.68, cache_bytes_per_second=1.12e12),
    ),
    Generation(
        *("v6e", "v6e", "v2-alpha-tpuv6e", 1, 2, (1, 4, 8), "tpu-v6e-slice", "ct6e-standard"),
        Chip(int(31.25 * GIB), 918e12, 1640e9, 448e9, 12.5e9),
        ("TPU v6 lite", "TPU v6e"),
        libtpu_args=(*OVERLAP_COLLECTIVES, "--xla_tpu_scoped_vmem_limit_kib=98304"),  # of 128 MiB; default 16 MiB
        rates=Rates(products=0.55, cache_bytes_per_second=1.31e12),
    ),
    Generation(
        *("v7x", "tpu7x", "v2-alpha-tpu7-ubuntu2404", 2, 3, (4,), "tpu7x", "tpu7x-standard"),
        Chip(int(94.75 * GIB), 1153.5e12, 3690e9, 300e9, 6.25e9),  # a device; the chip has twice that
        ("TPU7x",),
        libtpu_args=(*SPARSE_CORES, LAYOUT_OF_ARGUMENTS),
        rates=Rates(products=0.65, cache_bytes_per_second=1.31e12),  # the cache's is v6e's, not fitted
        devices_per_chip=2,
        only_on_gke=True,
    ),
)


@dataclass(frozen=True)
class Slice:
    """Connected TPU chips and their hosts."""

    generation: Generation
    chips: int

    @property
    def name(self) -> str:
        """The common name, such as v5e-16."""
        return f"{self.generation.name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def accelerator_type(self) -> str:
        """What gcloud's ``--accelerator-type`` takes, such as v5litepod-16."""
        return f"{self.generation.accelerator_prefix}-{self.chips * self.generation.cores_per_chip}"

    @property
    def devices(self) -> int:
        """The number of jax's devices."""
        return self.chips * self.generation.devices_per_chip

    @property
    def hosts(self) -> int:
        """The number of hosts, which gcloud calls workers."""
        return 1 if self.chips in self.generation.single_host_chips else self.chips // CHIPS_PER_HOST

    @property
    def machine_type(self) -> str:
        """The machine type of a host, such as ct5lp-hightpu-4t."""
        return f"{self.generation.machine}-{self.chips // self.hosts}t"

    def topology(self, flag: str = "--type") -> str:
        """Return the chips along its sides, such as 4x4; raises ConfigError, about this flag, if they are not known."""
        known = {chips: "x".join(map(str, sides)) for chips, sides in self.generation.topologies.items()}
        if self.chips not in known:
            names = ", ".join(Slice(self.generation, chips).name for chips in known)
            raise ConfigError(f"{flag} must be of a known topology, {names}, got {self.name}; choose the next larger")
        return known[self.chips]


def parse_slice(name: str, flag: str = "--type") -> Slice:
    """Parse the name of a slice: an accelerator type (v5litepod-16), or the common name (v5e-16).

    Args:
        name: the name of the slice.
        flag: the flag that the name comes from, for messages.

    Raises:
        ConfigError: the generation or the size does not exist.
    """
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    found = next((g for g in GENERATIONS if match and match[1] in (g.name, g.accelerator_prefix)), None)
    if match is None or found is None:
        known = ", ".join(f"{g.name}-N" for g in GENERATIONS)
        raise ConfigError(f"{flag} must be one of {known}, got {name!r}; for example v5e-16")
    chips, rest = divmod(int(match[2]), found.cores_per_chip)
    if found.torus_dimensions == 3:  # any number of hosts is possible
        if rest or chips < CHIPS_PER_HOST or chips % CHIPS_PER_HOST:
            raise ConfigError(
                f"{flag} {found.name}-N must count TensorCores, eight a host: {found.name}-8, -16, -32, ...; got {name}"
            )
    elif chips not in found.topologies:
        raise ConfigError(f"{flag} {found.name}-N must count chips, N one of {list(found.topologies)}, got {name}")
    return Slice(found, chips)
