"""Prompts are read as records, rendered, and drawn from an endless stream of batches whose position is the step.

sources.py      a source of any kind -> records;  files.py, hub.py, functions.py: by kind
messages.py     a record -> a conversation;  rendering.py: -> the prompt as the model sees it
order.py        in which order prompts come;  stream.py: batches, mixed from several sources
drawing.py      which of them a step samples, by what the history.py knows
opening.py      all of it, from the config
"""

from tpu_grpo.prompts.opening import open_evaluation_prompts, open_prompts
from tpu_grpo.prompts.rendering import PromptRenderer
from tpu_grpo.prompts.sources import Source, read_records
from tpu_grpo.prompts.stream import Part, PromptStream, prompts_digest

__all__ = [
    "Part",
    "PromptRenderer",
    "PromptStream",
    "Source",
    "open_evaluation_prompts",
    "open_prompts",
    "prompts_digest",
    "read_records",
]
