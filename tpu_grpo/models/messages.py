"""Words that several error messages share."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 10) -> str:
    """Join the first names and count the rest: ``listed(["a", "b", "c"], 2) == "a, b and 1 more"``; none is "none"."""
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")
