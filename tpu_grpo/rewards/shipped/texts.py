"""These functions find the part of a completion that counts, and check options."""

import re
from collections.abc import Iterator
from typing import Any


def missing(answer: Any) -> bool:
    """Return whether a row has no answer to compare with."""
    return answer is None or (isinstance(answer, str) and not answer.strip())


def inside(text: str, tag: str | None) -> str | None:
    """Return what the last ``<tag>...</tag>`` holds, stripped; None without one; the whole text if ``tag`` is None."""
    if tag is None:
        return text.strip()
    close = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(close, 0))
    return text[start + len(tag) + 2 : close].strip() if close >= 0 and start >= 0 else None


def boxed(text: str) -> list[str]:
    r"""Return what each ``\boxed{...}`` holds, braces balanced, in order; one that never closes is left out."""
    return list(_boxed(text))


def _boxed(text: str) -> Iterator[str]:
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                yield text[match.end() : end]
                break


def fenced(text: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block whose language is one of these, or not given; None without such a block."""
    found = re.findall(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", text, re.MULTILINE | re.DOTALL)
    blocks = [body for language, body in found if language.lower() in (*languages, "")]
    return blocks[-1] if blocks else None


def number(name: str, value: Any, least: float) -> None:
    """Refuse an option that is not a number of at least ``least``. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least:g}, got {value!r}")
