"""Prompts: reading records, rendering them, and an endless stream of batches whose position is the step."""

from tpu_grpo.prompts.rendering import PromptRenderer
from tpu_grpo.prompts.sources import read_records
from tpu_grpo.prompts.stream import PromptStream, open_evaluation_prompts, open_prompts

__all__ = ["PromptRenderer", "PromptStream", "open_evaluation_prompts", "open_prompts", "read_records"]
