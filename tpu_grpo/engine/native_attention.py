"""sglang-jax's reference attention, which pads heads as its cache does, with outputs as wide as the model's heads.

Suffix: T new tokens of all rows.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention

from tpu_grpo.records.errors import ConfigError


class CutNativeAttention(NativeAttention):
    """NativeAttention, which pads heads as the cache does, with outputs as wide as the model's heads."""

    def __call__(
        self, q: Array, k: Array, v: Array, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "T heads"], Array]:
        """Attend; returns the output and the updated cache, as the library's class does."""
        attend: Any = super().__call__  # which the library leaves without types
        output, cache = attend(q, k, v, layer, *args, **kwargs)
        return cut_heads(output, cache.shape[-1], layer.head_dim), cache


def check_soft_cap(hf_config: Any) -> None:
    """Refuse a model that caps its scores, because the library's native attention does not.

    Raises:
        ConfigError: if ``attn_logit_softcapping`` is set.
    """
    if (cap := getattr(hf_config, "attn_logit_softcapping", None)) is not None:
        raise ConfigError(
            f"rollout.attention=native needs a model without attn_logit_softcapping, got {cap:g}; use gather or auto"
        )


def cut_heads(heads: Float[Array, "T padded_heads"], padded: int, width: int) -> Float[Array, "T heads"]:
    """Keep the first ``width`` numbers of every head of ``padded``; heads stay sharded as they are."""

    def cut(own_heads: Array) -> Array:
        return own_heads.reshape(len(own_heads), -1, padded)[..., :width].reshape(len(own_heads), -1)

    by_head = P("data", "tensor")
    return jax.shard_map(cut, in_specs=by_head, out_specs=by_head)(jax.sharding.reshard(heads, by_head))
