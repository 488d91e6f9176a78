"""Regular expressions."""

import re
from collections.abc import Sequence

GSM8K_PATTERN = r"(?:\A|\n)####[ \t]*-?\$?[0-9][0-9,]*(?:\.[0-9]+)?\.?\s*\Z"
"""A last line ``#### <number>``."""


def matches_format(completions: Sequence[str], pattern: str = GSM8K_PATTERN) -> list[float]:
    """1.0 where the regular expression ``pattern`` is found (``.`` matches newlines too), else 0.0.

    The default asks for a last line ``#### <number>``.
    """
    if not isinstance(pattern, str):
        raise TypeError(
            f"pattern must be a string, got a {type(pattern).__name__}; where the data has a column of that name, set "
            "the option pattern"
        )
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r} ({error})") from error
    return [float(compiled.search(c) is not None) for c in completions]
