"""What a plan knows of a chip.

Memory is what libtpu's compiler allows programs. Speeds are those that the Cloud TPU documentation gives per chip:
bfloat16 products, memory, and links to other chips (all of them together, one direction).
"""

from dataclasses import dataclass

from tpu_grpo.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One generation; as many devices as chips."""

    topology: str
    """libtpu's name."""
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float


CHIPS = {
    "v5e": Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 200e9),
    "v5p": Chip("v5p", int(95.74 * GIB), 459e12, 2765e9, 600e9),
    "v6e": Chip("v6e", int(31.25 * GIB), 918e12, 1640e9, 448e9),
}


def chip_of(generation: str) -> Chip:
    """A generation's chip.

    Raises:
        ConfigError: for one that cannot be planned.
    """
    if generation not in CHIPS:
        raise ConfigError(
            f"--slice must be of a generation that libtpu describes as jax runs it ({', '.join(CHIPS)}), got "
            f"{generation}; libtpu takes a v4 chip for two devices, jax for one: try the run with run.max_steps=2"
        )
    return CHIPS[generation]
