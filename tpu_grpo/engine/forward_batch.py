"""A step's inputs as the library's models take them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from tpu_grpo.engine.step_arrays import StepInputs


def forward_batch(inputs: StepInputs, mode: ForwardMode, backend: Any) -> ForwardBatch:
    """Build the library's batch around the traced inputs of a step and the backend of its attention."""
    extend = mode == ForwardMode.EXTEND
    return ForwardBatch(
        bid=0,
        forward_mode=mode,
        batch_size=inputs.seq_lens.shape[0],
        input_ids=inputs.input_ids,
        req_pool_indices=inputs.seq_lens,  # read by no model or backend
        seq_lens=inputs.seq_lens,
        out_cache_loc=inputs.out_cache_loc,
        positions=inputs.positions,
        attn_backend=backend,
        cache_loc=inputs.cache_loc,
        extend_prefix_lens=inputs.prefix_lens if extend else None,
        extend_seq_lens=inputs.extend_lens if extend else None,
    )


def logits_metadata(inputs: StepInputs, mode: ForwardMode) -> LogitsMetadata:
    """Ask for the logits of each row's last token, which are those of all tokens in a decode step."""
    metadata = LogitsMetadata(forward_mode=mode, capture_hidden_mode=CaptureHiddenMode.NULL)
    if mode == ForwardMode.EXTEND:
        metadata.extend_seq_lens = inputs.extend_lens
        last = jnp.maximum(jnp.cumsum(inputs.extend_lens) - 1, 0)
        metadata.logits_indices = jax.sharding.reshard(last, P("data"))
    return metadata
