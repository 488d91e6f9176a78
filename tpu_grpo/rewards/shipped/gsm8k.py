"""This reward finds the final number of a text, as GSM8K writes it (Cobbe et al. 2021, arXiv 2110.14168)."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from tpu_grpo.rewards.shipped.texts import missing

# A number as people write it, after _plain: grouped by commas or not, not part of a word (m2), a power (m^2) or a
# fraction (1/2); a minus counts when nothing stands before it that could be subtracted from (10-4 holds no -4).
# The atomic group keeps a rejected number from being cut short and accepted (1/2 -> "", not 1).
_NUMBER = r"""
    ((?<![\w)\]}])-)?
    (?<![^\W_]) (?<![\^/])
    ((?> [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | (?<!\.)\.[0-9]+ ))
    (?!/[0-9])
"""
_ANY_NUMBER = re.compile(_NUMBER, re.VERBOSE)
_MARKED_NUMBER = re.compile(r"\#{4}[ \t*:=]*" + _NUMBER, re.VERBOSE)
_CURRENCY = r"\\?[$€£¥]"


def gsm8k(completions: Sequence[str], answer: Sequence[Any], flexible: bool = True) -> list[float | None]:
    """Score 1.0 where the completion's final number equals the answer's, else 0.0 (Cobbe et al., arXiv 2110.14168).

    The final number is the one right after the last ``####``; without one it is the last number of the completion
    (``flexible``) or there is none. The answer is a reference solution with ``####``, or a bare number; the score is
    None where it holds no number. Numbers compare by value: 18, 18.0, $18.00 and ``#### 18.`` are equal.
    """
    if not isinstance(flexible, bool):
        raise TypeError(f"flexible must be true or false, got {flexible!r}")
    return [_gsm8k_row(c, a, flexible) for c, a in zip(completions, answer, strict=True)]


def final_number(text: str, *, flexible: bool) -> Decimal | None:
    """Return the number right after the last ``####``, or else, if ``flexible``, the last number of the text."""
    text = _plain(text)
    found = _MARKED_NUMBER.findall(text)
    if not found and flexible:
        found = _ANY_NUMBER.findall(text)
    if not found:
        return None
    minus, digits = found[-1]
    return Decimal(minus + digits.replace(",", ""))


def _gsm8k_row(completion: str, answer: Any, flexible: bool) -> float | None:
    expected = _reference_number(answer)
    return None if expected is None else float(final_number(completion, flexible=flexible) == expected)


def _reference_number(answer: Any) -> Decimal | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        number = Decimal(str(answer))
        return number if number.is_finite() else None
    return None if missing(answer) else final_number(str(answer), flexible=True)


def _plain(text: str) -> str:
    """Replace what hides a number: currency signs, TeX's ``{,}``, the typographic minus."""
    text = text.replace("−", "-").replace("{,}", ",")
    return re.sub(_CURRENCY, " ", re.sub(f"(?<=-){_CURRENCY}", "", text))
