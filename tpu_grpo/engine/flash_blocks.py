"""The block sizes of the flash-attention kernel on each generation of TPUs, in one table.

The kernel reads the cache of a row in blocks of keys and values, from the chip's large memory (HBM) into two buffers in
its small one (VMEM), and computes on parts of a block, of which it skips those beyond the row's end. The sizes come
from programs compiled for each generation, for 2 and for 8 key-value heads a device and heads of 128 numbers:

- Every launch first fills the buffers of a decode step with zeros, one bundle (cycle) for each key and pair of heads:
  6,144 bundles for 1,024 keys of 2 heads, 18,432 for 8 heads. A block costs about 900 bundles, and a key about 1 for 2
  heads. So decode blocks are as long as the context, up to 1,024 keys, and shorter for many heads.
- Parts of 256 keys take the fewest bundles: 7,574 against 7,733 (512 keys) and 8,098 (1,024) on v5e, and a short row
  skips more of them.
- Buffers above half of the kernel's VMEM do not compile: on v4, 1,024 keys of 8 heads do not.

A block is ``(queries fetched, keys fetched, queries computed at once, keys computed at once)``, in tokens.
"""

from dataclasses import dataclass

import numpy as np

from tpu_grpo.records.errors import ConfigError

Block = tuple[int, int, int, int]
MIB = 2**20
VMEM_BYTES = {
    "TPU v4": 8 * MIB,
    "TPU v5": 32 * MIB,
    "TPU v5p": 32 * MIB,
    "TPU v5 lite": 64 * MIB,
    "TPU v5e": 64 * MIB,
    "TPU v6 lite": 64 * MIB,
    "TPU v6e": 64 * MIB,
}
"""The VMEM that the kernel may use, by jax's name of the device: half of the chip's, as the library takes."""
BUFFER_BYTES = 5 * MIB
"""The most that both buffers may take where there is VMEM enough; more would take too long to fill."""
DECODE_KEYS = 1024
PREFILL_QUERIES = 32
PREFILL_KEYS = 512
KEYS_AT_ONCE = 256


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
    vmem_bytes = VMEM_BYTES.get(device_kind)
    if vmem_bytes is None:
        raise ConfigError(
            f"rollout.attention=flash needs a TPU out of {sorted(VMEM_BYTES)}, got {device_kind}; use gather on others"
        )
    packing = 4 // np.dtype(dtype).itemsize  # keys and values share words of 32 bits
    words = -(-2 * kv_heads // packing)
    heads = words * packing + max(2, packing)  # with the gap that the kernel leaves against bank conflicts
    fitting = min(BUFFER_BYTES, vmem_bytes // 2) // (2 * heads * head_dim * np.dtype(dtype).itemsize)

    def sizes(queries: int, most_keys: int) -> Block:
        at_once = max(1, min(KEYS_AT_ONCE, _power_of_two(fitting)) // page_size) * page_size
        parts = min(most_keys, fitting, -(-context_tokens // at_once) * at_once) // at_once
        return queries, max(1, parts) * at_once, queries, at_once

    return Blocks(sizes(1, DECODE_KEYS), sizes(PREFILL_QUERIES, PREFILL_KEYS), vmem_bytes)


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)
