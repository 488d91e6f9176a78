"""Says which models have experts, and checks what Tunix's kernel for them needs of a batch.

On a TPU the kernel multiplies in tiles of 128 rows.
"""

from math import gcd

from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.families.qwen3_moe import MoeConfig
from tpu_grpo.records.errors import ConfigError

TILE_ROWS = 128


def has_experts(checkpoint: Checkpoint) -> bool:
    """Say whether the model has experts."""
    return isinstance(checkpoint.config, MoeConfig)


def check_expert_tokens(checkpoint: Checkpoint, fsdp: int, context_tokens: int) -> None:
    """Refuse a length of prompt and completion, padded, that the kernel does not take; other models take any length.

    For each token a device hands ``num_experts_per_tok`` rows to the kernel. With the experts split over ``fsdp``
    devices it hands over room for all that they could send: ``min(num_experts_per_tok, experts of a device) x fsdp``.

    Raises:
        ConfigError: for a length that does not give whole tiles, with lengths that do.
    """
    config = checkpoint.config
    if not isinstance(config, MoeConfig):
        return
    chosen = config.num_experts_per_tok
    per_token = min(chosen, config.num_experts // fsdp) * fsdp if fsdp > 1 else chosen
    if context_tokens * per_token % TILE_ROWS:
        step = TILE_ROWS // gcd(TILE_ROWS, per_token)
        below = context_tokens // step * step
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be a multiple of {step} for this model's experts on "
            f"a TPU ({per_token} rows per token in tiles of {TILE_ROWS}), got {context_tokens}; make it "
            + (f"{below} or {below + step}" if below else f"{step}")
        )
