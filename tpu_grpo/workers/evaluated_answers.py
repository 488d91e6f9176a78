"""Tells which answers to puzzles are programs, as some of reasoning-gym's verifiers evaluate answers as Python."""

import re

_EVALUATED = {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"}
_EVALUATED |= {"puzzle24", "simple_integration", "spiral_matrix", "string_insertion"}
_FUNCTION = re.compile(r"\b(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|[aA]bs|Integral)\s*\(")
_CODE = re.compile(r"[^\w\s+*/^().,!'\"\[\]-]|[a-zA-Z_]\w*\s*\(|[\])'\"]\s*\(|\.\s*[a-zA-Z_]", re.ASCII)
"""Matches another sign, a call, or an attribute."""


def is_code(puzzle: str, answer: str) -> bool:
    """Return whether the verifier of a puzzle would run an answer that is more than numbers, lists and functions."""
    return puzzle in _EVALUATED and _CODE.search(_FUNCTION.sub("(", answer)) is not None
