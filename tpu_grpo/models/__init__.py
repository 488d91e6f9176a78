"""Turns a checkpoint directory into a Tunix model and its tokenizer, and back; also makes the built-in model."""

from tpu_grpo.models.checkpoint import (
    Checkpoint,
    check_mesh,
    check_sampler_mesh,
    load_model,
    read_checkpoint,
    sampler_sizes,
)

__all__ = ["Checkpoint", "check_mesh", "check_sampler_mesh", "load_model", "read_checkpoint", "sampler_sizes"]
