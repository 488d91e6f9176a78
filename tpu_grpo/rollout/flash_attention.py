"""sglang-jax's flash attention for heads of any width: the kernel's are multiples of 128, narrower ones are padded.

Zeros appended to queries and keys add nothing to their products; those appended to values are cut off again. The cache
keeps heads as wide as the kernel's.

Suffixes: T new tokens of all rows, H heads of any kind, D head width.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention

KERNEL_WIDTH = 128


def kernel_width(head_dim: int) -> int:
    """The narrowest the kernel takes: ``kernel_width(64) == 128``."""
    return -(-head_dim // KERNEL_WIDTH) * KERNEL_WIDTH


class PaddedFlashAttention(FlashAttention):
    """FlashAttention built with the kernel's head width, called with the model's."""

    def __call__(
        self, q: Array, k: Array, v: Array, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "T H*D"], Array]:
        """As the library's: (output, updated cache)."""
        width = layer.head_dim
        q, k, v = (self._padded(x.reshape(len(x), -1, width)) for x in (q, k, v))
        output, cache = super().__call__(q, k, v, layer, *args, **kwargs)
        return output.reshape(len(q), -1, self.head_dim)[..., :width].reshape(len(q), -1), cache

    def _padded(self, heads_THD: Float[Array, "T H D"]) -> Float[Array, "T H kernel"]:
        return jnp.pad(heads_THD, ((0, 0), (0, 0), (0, self.head_dim - heads_THD.shape[-1])))
