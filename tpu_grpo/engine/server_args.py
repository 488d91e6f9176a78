"""What sglang-jax is started with."""

from pathlib import Path

import jax
from jax.sharding import Mesh
from sgl_jax.srt.server_args import ServerArgs

from tpu_grpo.engine.options import EngineOptions

CONTEXT_MARGIN_TOKENS = 8
"""sglang-jax refuses prompts within six tokens of its context length."""


def server_args(checkpoint: Path, mesh: Mesh, options: EngineOptions) -> ServerArgs:
    """Return what sglang-jax is told of an engine: no port, thread or clock takes part in what it does."""
    shapes = options.shapes
    return ServerArgs(
        model_path=str(checkpoint),
        device=jax.default_backend(),
        dtype=options.dtype,
        tp_size=mesh.size,
        nnodes=1,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_precompile=True,
        disable_radix_cache=not options.prefix_cache,
        schedule_policy="fcfs",
        random_seed=0,
        context_length=options.context_tokens + CONTEXT_MARGIN_TOKENS,
        page_size=options.page_size,
        max_total_tokens=options.cache_tokens,
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=shapes.prefill[-1],
        chunked_prefill_size=shapes.prefill[-1],
        mem_fraction_static=0.5,
        attention_backend="native",
        log_level="warning",
    )
