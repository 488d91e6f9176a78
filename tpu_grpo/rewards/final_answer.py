"""Finds the final answer of a completion, as a text that can be counted in a vote."""

import re
from decimal import Decimal

from tpu_grpo.rewards.shipped.correctness import boxed, final_number, inside

_NUMBER = re.compile(r"[$€£¥]?\s*([+-]?[0-9]+(?:\.[0-9]+)?)%?")
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")


def final_answer(text: str, pattern: re.Pattern[str] | None = None) -> str | None:
    r"""Return the last answer of a completion, None if it has none.

    With a pattern, the answer is the first group of the pattern's last match, or the whole match without groups.
    Otherwise it is the last \boxed{...}, else the content of the last <answer> tag, else the number after ####, else
    the last number, else the whole text. White space and a final full stop are removed, and numbers are normalised:
    1,000, $1000 and 1000.0 are the same answer.
    """
    if pattern is not None:
        matches = list(pattern.finditer(text))
        return _canonical(matches[-1][1 if pattern.groups else 0] or "") if matches else None
    for part in (boxed(text)[-1:] or [None])[0], inside(text, "answer"):
        if part is not None:
            return _canonical(part)
    number = final_number(text, flexible=True)
    return _canonical(text) if number is None else _written(number)


def _canonical(part: str) -> str | None:
    part = " ".join(part.split()).removesuffix(".").rstrip()
    if found := _NUMBER.fullmatch(_GROUPED.sub("", part)):
        return _written(Decimal(found[1]))
    return part or None


def _written(number: Decimal) -> str:
    return format(number.normalize() + 0, "f")  # + 0: minus zero is zero
