"""Chooses the trainer's attention: dot attention, or Tunix's flash attention (splash, a Pallas kernel of jax).

Flash attention works on square blocks of a multiple of 128 tokens, so rows are padded to whole blocks.
For every head, dot attention stores the scores of all pairs of tokens; flash attention stores none.
"""

from typing import Literal

from tpu_grpo.models.families.family import Family
from tpu_grpo.records.errors import ConfigError

LANES = 128
BLOCKS = range(3 * LANES, 8 * LANES + 1, LANES)
"""The block sizes for rows of over 384 tokens; larger blocks exceed a chip's vector memory in the backward pass."""


def flash_block(name: Literal["auto", "flash", "dot"], family: Family, platform: str, row_tokens: int) -> int | None:
    """Return flash attention's block size in tokens, for rows of ``row_tokens`` tokens, or None for dot attention.

    A row is a prompt and a completion. ``platform`` (tpu, cpu, gpu) is that of the trainer's devices.

    Raises:
        ConfigError: for flash without a TPU, or for a family whose model in Tunix has no flash attention.
    """
    on_tpu = platform == "tpu"
    if name == "flash":
        if not family.flash_attention:
            raise ConfigError(
                f"model.attention=flash needs a family that has it in Tunix, got {family.model_type}; use dot or auto"
            )
        if not on_tpu:
            raise ConfigError(
                f"model.attention=flash needs a TPU, the trainer's devices are {platform}; use dot (any device) or auto"
            )
    if name == "dot" or not on_tpu or not family.flash_attention:
        return None
    return block_for(row_tokens)


def block_for(row_tokens: int) -> int:
    """Return the block size (tokens) that pads rows least; of several, the largest. Rows up to 384 are one block."""
    if row_tokens <= BLOCKS[0]:
        return whole_blocks(row_tokens, LANES)
    return min(reversed(BLOCKS), key=lambda block: whole_blocks(row_tokens, block))


def whole_blocks(row_tokens: int, block: int | None) -> int:
    """Round a row's tokens up to whole blocks: ``whole_blocks(1000, 512) == 1024``; ``block=None`` keeps them."""
    return row_tokens if block is None else -(-row_tokens // block) * block
