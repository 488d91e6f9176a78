"""Shortens texts for messages and tables."""

import reprlib

SHORT_REPR = reprlib.Repr(maxstring=120, maxother=120)
"""Returns the repr of any value, without the middle of a long one."""


def shortened(text: str, head: int, tail: int = 0, mark: str = "...") -> str:
    """Return a text of at most ``head + tail`` characters; of a longer one its first ``head`` characters, ``mark``, and
    its last ``tail`` characters.

    >>> shortened("abcdef", 3), shortened("abcdef", 2, 1, " [...] "), shortened("abc", 2, 1)
    ('abc...', 'ab [...] f', 'abc')
    """
    return text if len(text) <= head + tail else f"{text[:head]}{mark}{text[len(text) - tail :]}"
