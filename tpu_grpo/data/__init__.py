"""Prompts are read as records, rendered, and drawn from an endless stream of batches whose position is the step.

sources.py      a source of any kind -> records;  files.py, hub.py, functions.py: by kind
locations.py    what a path names: files, patterns, addresses;  formats.py: how each format is read
records.py      records that lie on disk until they are asked for;  reading.py: a bar while much is read
messages.py     a record -> a conversation;  turns.py: messages as data has them
rendering.py    a conversation -> the prompt as the model sees it
rendered.py     all prompts of a source, checked, and rendered again when they are asked for
order.py        in which order prompts come;  stream.py: batches, mixed from several sources
drawing.py      which of them a step samples, by what the history.py knows
opening.py      all of it, from the config
"""

from tpu_grpo.data.messages import record_of
from tpu_grpo.data.opening import open_evaluation_prompts, open_prompts
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.data.sources import Source, read_records
from tpu_grpo.data.stream import Part, PromptStream, prompts_digest
from tpu_grpo.data.turns import Message

__all__ = [
    "Message",
    "Part",
    "PromptRenderer",
    "PromptStream",
    "Source",
    "open_evaluation_prompts",
    "open_prompts",
    "prompts_digest",
    "read_records",
    "record_of",
]
