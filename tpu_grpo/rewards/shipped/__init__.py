"""The rewards that ship: each is found in a module here, imported when it is first named.

An option that cannot work raises before any row is looked at, so that loading can try a reward on zero rows. A row
whose answer is missing (null or blank) gets None: the reward does not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shipped:
    """Where a reward is found and how it likes to run."""

    source: str
    """module:function, in this package."""
    workers: int = 0
    """Processes unless the config says otherwise: none for what is quick and always ends."""


SHIPPED: Mapping[str, Shipped] = MappingProxyType(
    {
        "exact_answer": Shipped("answers:exact_answer"),
        "gsm8k": Shipped("gsm8k:gsm8k"),
        "format": Shipped("patterns:matches_format"),
    }
)
