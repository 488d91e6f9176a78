"""Gemma 3 for the sampler, made from the parts of sglang-jax's Gemma 2, because sglang-jax 0.1.0rc0 has no Gemma 3.

Its config is transformers' config of the text model, with the values of `Gemma3Config` that `settings` returns.
"""

from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sgl_jax.srt.layers.embeddings import ParallelLMHead
from sgl_jax.srt.layers.layernorm import GemmaRMSNorm
from sgl_jax.srt.models.gemma2 import Gemma2Attention, Gemma2DecoderLayer, Gemma2ForCausalLM

from tpu_grpo.models.families.gemma2 import FULL, SLIDING
from tpu_grpo.models.families.gemma3 import Gemma3Config
from tpu_grpo.models.families.rope import inverse_timescales


def settings(config: Gemma3Config) -> dict[str, Any]:
    """Return what the model needs to know that transformers 4 may not read from a config.json."""
    return {
        "layer_types": [SLIDING if has_window else FULL for has_window in config.has_window],
        "rope_local_base_freq": config.rope_local_base_freq,
        "rope_factor": 1.0 if config.scaling is None else config.scaling.factor,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


class Gemma3Attention(Gemma2Attention):
    """The attention of Gemma 2, with norms of queries and keys, and positions that depend on the kind of layer."""

    def __init__(self, config: Any, layer_id: int, *, dtype: jnp.dtype, mesh: jax.sharding.Mesh):
        is_sliding = config.layer_types[layer_id] == SLIDING
        theta = config.rope_local_base_freq if is_sliding else config.rope_theta
        super().__init__(
            layer_id,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.max_position_embeddings,
            rope_theta=theta,
            query_pre_attn_scalar=config.query_pre_attn_scalar,
            sliding_window_size=config.sliding_window if is_sliding else 0,
            dtype=dtype,
            mesh=mesh,
        )
        frequencies = inverse_timescales(config.head_dim, theta) / (1.0 if is_sliding else config.rope_factor)
        rope: Any = self.rotary_emb
        rope._inv_freq_np = frequencies.astype(np.float32)
        self.q_norm, self.k_norm = (GemmaRMSNorm(config.head_dim, epsilon=config.rms_norm_eps) for _ in range(2))

    @override
    def __call__(self: Any, hidden_states: Any, forward_batch: Any, token_to_kv_pool: Any) -> Any:
        q, k, v = (project(hidden_states)[0] for project in (self.q_proj, self.k_proj, self.v_proj))
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim))
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim))
        v = v.reshape(-1, self.num_kv_heads, self.head_dim)
        q, k = self.rotary_emb(forward_batch.positions, q, k)
        mixed, kv_fused = self.attn(q, k, v, forward_batch=forward_batch, token_to_kv_pool=token_to_kv_pool)
        return self.o_proj(mixed)[0], kv_fused


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    """A layer of Gemma 2 with the attention of Gemma 3."""

    def __init__(self, config: Any, mesh: jax.sharding.Mesh, layer_id: int, dtype: jnp.dtype):
        super().__init__(config, mesh, layer_id, dtype)
        self.self_attn = Gemma3Attention(config, layer_id, dtype=dtype, mesh=mesh)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with the layers of Gemma 3 and, unless embeddings are tied, a head of its own."""

    def __init__(self, config: Any, mesh: jax.sharding.Mesh, dtype: jnp.dtype):
        super().__init__(config, mesh, dtype)
        model: Any = self.model
        model.layers = nnx.data([Gemma3DecoderLayer(config, mesh, i, dtype) for i in range(config.num_hidden_layers)])
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, mesh=mesh
            )

    @override
    def __call__(self: Any, forward_batch: Any, memory_pools: Any, logits_metadata: Any) -> Any:
        hidden_states, layers_kv_fused = self.model(forward_batch, memory_pools.token_to_kv_pool)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        output = self.logits_processor(hidden_states, head, logits_metadata)
        return output, {"token_to_kv_pool": layers_kv_fused}, True, None
