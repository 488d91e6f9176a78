"""What may help with an exception of a reward that was written for another trainer, or for other settings."""

import re

from tpu_grpo.rewards.batches import Call
from tpu_grpo.rewards.protocol import EXTRAS

_WANTED_MESSAGES = re.compile(
    r"string indices must be integers|string index out of range|'str' object has no attribute '(get|items|keys|values)'"
)
"""Code for lists of messages, such as completion[0]["content"], raises so when it gets a text."""
_WANTED_TEXTS = re.compile(r"'?\blist\b'?")
"""Code for texts, such as completion.strip() or re.search(pattern, completion), names the list that it got."""


def hint(call: Call, error: BaseException) -> str:
    """Return what to try, as the end of a message about the error; nothing if nothing comes to mind."""
    text = str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in EXTRAS:
        return f"; it comes to a function that declares it: add {error.args[0]} to its parameters"
    if not isinstance(error, TypeError | AttributeError | IndexError):
        return ""
    if not call.messages and _WANTED_MESSAGES.search(text):
        return (
            "; prompts and completions are texts here: if it expects lists of messages, as in TRL's conversational "
            "form, set messages: true for this reward"
        )
    if call.messages and _WANTED_TEXTS.search(text):
        return (
            "; with messages: true prompts and completions are lists of messages: if it expects texts, leave messages "
            "out for this reward"
        )
    return ""
