"""A checkpoint directory -> a Tunix model; which families exist; tokenizers."""

from tpu_grpo.models.checkpoint import Checkpoint, check_mesh, load_model, read_checkpoint

__all__ = ["Checkpoint", "check_mesh", "load_model", "read_checkpoint"]
