"""The rewards that ship: exact_answer, gsm8k and format.

``answer`` is a column of the data. A row whose answer is missing (null or blank) gets None: the reward does not apply.
An option that cannot work raises before any row is looked at, so loading can try the function on zero rows.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from tpu_grpo.rewards.protocol import Reward

GSM8K_PATTERN = r"(?:\A|\n)####[ \t]*-?\$?[0-9][0-9,]*(?:\.[0-9]+)?\.?\s*\Z"
"""A last line ``#### <number>``."""

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


def exact_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """1.0 where completion and answer are the same text, runs of white space counting as one space, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [None if _missing(a) else float(c.split() == str(a).split()) for c, a in pairs]


def gsm8k(completions: Sequence[str], answer: Sequence[Any], flexible: bool = True) -> list[float | None]:
    """1.0 where the completion's final number equals the answer's, else 0.0 (Cobbe et al. 2021, arXiv 2110.14168).

    The final number is the one right after the last ``####``; without one it is the last number of the completion
    (``flexible``) or there is none. The answer is a reference solution with ``####``, or a bare number; None where it
    holds no number. Numbers compare by value: 18, 18.0, $18.00 and ``#### 18.`` are equal.
    """
    if not isinstance(flexible, bool):
        raise TypeError(f"flexible must be true or false, got {flexible!r}")
    return [_gsm8k_row(c, a, flexible) for c, a in zip(completions, answer, strict=True)]


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


SHIPPED: Mapping[str, Reward] = MappingProxyType(
    {"exact_answer": exact_answer, "format": matches_format, "gsm8k": gsm8k}
)


def final_number(text: str, *, flexible: bool) -> Decimal | None:
    """The number right after the last ``####``, or else, if ``flexible``, the last number of the text."""
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
    return None if _missing(answer) else final_number(str(answer), flexible=True)


def _plain(text: str) -> str:
    """Without what stands between a number and its digits: currency signs, TeX's ``{,}``, the typographic minus."""
    text = text.replace("−", "-").replace("{,}", ",")
    return re.sub(_CURRENCY, " ", re.sub(f"(?<=-){_CURRENCY}", "", text))


def _missing(answer: Any) -> bool:
    return answer is None or (isinstance(answer, str) and not answer.strip())
