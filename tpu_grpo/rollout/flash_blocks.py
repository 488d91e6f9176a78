"""The block sizes of the flash-attention kernel on each generation of TPUs, in one table.

The kernel reads the cache of a row in blocks of keys and values, twice buffered, from the chip's large memory (HBM)
into its small one (VMEM). A decode step is bound by that reading, so its blocks are as long as VMEM allows.

A block is ``(queries fetched, keys fetched, queries computed at once, keys computed at once)``, in tokens.
"""

from dataclasses import dataclass

import numpy as np

from tpu_grpo.errors import ConfigError

Block = tuple[int, int, int, int]


@dataclass(frozen=True)
class Chip:
    """What limits the blocks on one generation of TPUs."""

    vmem_bytes: int
    """VMEM that the kernel may use: half of the chip's, as the library does, which leaves the rest to its compiler."""
    decode_keys: int
    """Keys of a decode block, where they fit."""
    prefill_keys: int
    """Keys of a prefill block, where they fit."""


MIB = 2**20
PREFILL_QUERIES = 32
CHIPS = {
    "TPU v4": Chip(8 * MIB, 512, 256),
    "TPU v5 lite": Chip(64 * MIB, 2048, 512),
    "TPU v5e": Chip(64 * MIB, 2048, 512),
    "TPU v5": Chip(32 * MIB, 2048, 512),
    "TPU v5p": Chip(32 * MIB, 2048, 512),
    "TPU v6 lite": Chip(64 * MIB, 2048, 512),
    "TPU v6e": Chip(64 * MIB, 2048, 512),
}
"""By jax's name of the device."""
BUFFERS_SHARE = 4
"""Buffers of keys and values may take one part in this many of the VMEM; scores and sums need the rest."""


@dataclass(frozen=True)
class Blocks:
    """The kernel's sizes for one engine."""

    decode: Block
    prefill: Block
    vmem_bytes: int


def choose_blocks(
    device_kind: str, *, kv_heads: int, head_dim: int, page_size: int, context_tokens: int, dtype: np.dtype
) -> Blocks:
    """Choose the blocks for ``kv_heads`` heads a device of width ``head_dim``, in whole pages of one row's context.

    Raises:
        ConfigError: if the devices are not TPUs of the table.
    """
    chip = CHIPS.get(device_kind)
    if chip is None:
        raise ConfigError(
            f"rollout.attention=flash needs a TPU out of {sorted(CHIPS)}, got {device_kind}; use gather on others"
        )
    bytes_per_token = 2 * kv_heads * head_dim * np.dtype(dtype).itemsize
    fitting = chip.vmem_bytes // BUFFERS_SHARE // (2 * bytes_per_token)

    def keys(wanted: int) -> int:
        tokens = min(wanted, _power_of_two(fitting), context_tokens)
        return max(page_size, tokens // page_size * page_size)

    decode, prefill = keys(chip.decode_keys), keys(chip.prefill_keys)
    return Blocks(
        (1, decode, 1, decode), (PREFILL_QUERIES, prefill, PREFILL_QUERIES, prefill), vmem_bytes=chip.vmem_bytes
    )


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)
