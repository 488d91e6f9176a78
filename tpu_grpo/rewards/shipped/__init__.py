"""The shipped rewards; each is in a module of this package, which is imported when the reward is first used.

An invalid option raises an error before any row is scored, so that loading can check the options on zero rows. A row
whose answer is missing (null or blank) gets None: the reward does not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal

Thinking = Literal["dropped", "dropped if opened", "counted", "kept"]
"""What a reward is given of a completion that thinks. dropped: what follows ``</think>``. dropped if opened: the same
if the prompt ends with ``<think>`` or the completion begins with it, else the whole text. counted: the whole text,
behind the opening tag with which the prompt ends. kept: the whole text."""


@dataclass(frozen=True)
class Shipped:
    """Where a shipped reward is found, and the defaults of its settings."""

    source: str
    """``module:function`` in this package."""
    workers: int = 0
    """The default number of worker processes; 0 for a reward that is quick and always returns."""
    deterministic: bool = True
    """Whether the same text always gets the same value; the config can override this."""
    messages: bool = False
    """If set, the reward is given messages in place of texts, whatever the config says."""
    library: str | None = None
    """A module that the reward needs, and that an extra of this package installs."""
    thinking: Thinking = "dropped if opened"
    """A reward of answers has this default, and takes the option after_thinking."""

    def load(self) -> Any:
        """Import the reward's module, and return its function or class."""
        return resolve_name(f"{__name__}.{self.source}")


SHIPPED: Mapping[str, Shipped] = MappingProxyType(
    {
        "environment": Shipped("correctness:environment", thinking="kept"),
        "exact_answer": Shipped("correctness:exact_answer"),
        "normalised_match": Shipped("correctness:normalised_match"),
        "multiple_choice": Shipped("correctness:multiple_choice"),
        "final_answer": Shipped("correctness:final_answer", workers=1, messages=True),
        "integer_answer": Shipped("correctness:integer_answer"),
        "gsm8k": Shipped("correctness:gsm8k"),
        "math": Shipped("mathematics:math", workers=1),
        "format": Shipped("form:matches_format", thinking="kept"),
        "regex": Shipped("form:regex_answer"),
        "think_answer": Shipped("form:think_answer", thinking="counted"),
        "xml_count": Shipped("form:xml_count", thinking="counted"),
        "length": Shipped("form:length", thinking="kept"),
        "overlong": Shipped("form:overlong", thinking="kept"),
        "cosine_length": Shipped("form:cosine_length", workers=1),
        "repetition": Shipped("form:repetition", thinking="kept"),
        "language": Shipped("instructions:language", library="py3langid", thinking="kept"),
        "instructions": Shipped("instructions:instructions", library="py3langid"),
        "json_schema": Shipped("structured:json_schema", workers=1, library="jsonschema"),
        "countdown": Shipped("structured:countdown"),
        "reasoning_gym": Shipped("structured:reasoning_gym", workers=1, library="reasoning_gym"),
        "python_tests": Shipped("structured:python_tests", workers=2),
        "judge": Shipped("judge:Judge", workers=1, deterministic=False),
    }
)
