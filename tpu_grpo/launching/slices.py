"""TPU slices by name: what the Cloud TPU API calls them, what they consist of, and the environment they run best in.

    v5e-16 -> accelerator type v5litepod-16, runtime version v2-alpha-tpuv5-lite, 16 chips on 4 workers

The number in a name counts chips for v5e and v6e, and TensorCores (two a chip) for v4 and v5p. Runtime versions are
those that the Cloud TPU documentation lists for JAX.
"""

import re
from dataclasses import dataclass

from tpu_grpo.errors import ConfigError

CHIPS_PER_HOST = 4
"""Of a slice that spans hosts."""

OVERLAP_COLLECTIVES = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
"""Gather the next layer's shards while this one computes."""


@dataclass(frozen=True)
class Family:
    """One generation of TPUs."""

    name: str
    """As people say it."""
    prefix: str
    """As accelerator types begin."""
    runtime: str
    """Software version of the machines."""
    counted_per_chip: int
    """What the number in an accelerator type counts of each chip: 1 for chips, 2 for TensorCores."""
    chips_on_one_host: tuple[int, ...]
    """Sizes, in chips, that come on a single host."""
    sizes: tuple[int, ...] = ()
    """All sizes, in chips; any number of whole hosts when empty."""
    libtpu_args: tuple[str, ...] = OVERLAP_COLLECTIVES
    """Default LIBTPU_INIT_ARGS."""


_TORUS_2D = (1, 4, 8, 16, 32, 64, 128, 256)
FAMILIES = (
    Family("v4", "v4", "tpu-ubuntu2204-base", 2, (4,)),
    Family("v5p", "v5p", "v2-alpha-tpuv5", 2, (4,)),
    Family("v5e", "v5litepod", "v2-alpha-tpuv5-lite", 1, (1, 4, 8), _TORUS_2D),
    Family(
        "v6e",
        "v6e",
        "v2-alpha-tpuv6e",
        1,
        (1, 4, 8),
        _TORUS_2D,
        (*OVERLAP_COLLECTIVES, "--xla_tpu_scoped_vmem_limit_kib=98304"),  # of 128 MiB; the default is 16
    ),
)


@dataclass(frozen=True)
class Slice:
    """TPU chips that are connected with each other, and the hosts they hang on."""

    family: Family
    chips: int

    @property
    def accelerator_type(self) -> str:
        """As ``--accelerator-type`` takes it."""
        return f"{self.family.prefix}-{self.chips * self.family.counted_per_chip}"

    @property
    def hosts(self) -> int:
        """Workers."""
        return 1 if self.chips in self.family.chips_on_one_host else self.chips // CHIPS_PER_HOST


def parse_slice(name: str, flag: str = "--type") -> Slice:
    """The slice of an accelerator type, or of the same with the generation's common name (v5e-16, v5litepod-16).

    ``flag`` is for messages.

    Raises:
        ConfigError: for a generation or a size that does not exist.
    """
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    family = next((f for f in FAMILIES if match and match[1] in (f.name, f.prefix)), None)
    if match is None or family is None:
        known = ", ".join(f"{f.name}-N" for f in FAMILIES)
        raise ConfigError(f"{flag} must be one of {known}, got {name!r}; for example v5e-16")
    number = int(match[2])
    chips, rest = divmod(number, family.counted_per_chip)
    if family.sizes and chips not in family.sizes:
        raise ConfigError(f"{flag} {family.name}-N must count chips, N one of {list(family.sizes)}, got {name}")
    if not family.sizes and (rest or chips < CHIPS_PER_HOST or chips % CHIPS_PER_HOST):
        raise ConfigError(
            f"{flag} {family.name}-N must count TensorCores, eight a host: {family.name}-8, -16, -32, ...; got {name}"
        )
    return Slice(family, chips)
