"""A checkpoint directory -> a Tunix model; tokenizers."""

from tpu_grpo.models.checkpoint import (
    Checkpoint,
    check_mesh,
    check_sampler_mesh,
    load_model,
    read_checkpoint,
    sampler_sizes,
)

__all__ = ["Checkpoint", "check_mesh", "check_sampler_mesh", "load_model", "read_checkpoint", "sampler_sizes"]
