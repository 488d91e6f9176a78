"""Ranges of layers as people write them: ``20-31``, ``0-3,28-31``, ``5``."""

import re


def parse_layers(text: str) -> tuple[int, ...]:
    """The layers that are named, ascending, each once: ``"28-29, 0"`` -> ``(0, 28, 29)``. Both ends belong to a range.

    Raises:
        ValueError: for anything else than numbers and ranges between commas, or a range that ends before it starts.
    """
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if found is None:
            raise ValueError(f"must name layers like 20-31 or 0-3,28-31, got {text!r}; layers are counted from 0")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"must give ranges from low to high, got {part.strip()!r}; write {last}-{first}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))
