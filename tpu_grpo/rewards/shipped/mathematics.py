r"""A reward that compares numbers (1/2 = 0.5 = \frac{1}{2}), sets, intervals and matrices with math-verify."""

import functools
import logging
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Pow, nan, postorder_traversal, zoo
from sympy.functions.combinatorial.factorials import CombinatorialFunction

from tpu_grpo.rewards.protocol import per_sample
from tpu_grpo.rewards.shipped.correctness import boxed, inside, missing, number, plain_numbers

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports every text that is not mathematics
_parse = functools.partial(parse, parsing_timeout=0, raise_on_error=True)
_LARGEST_EXPONENT = 100_000
_TIME_OUTS: deque[float] = deque(maxlen=5)
"""When comparisons ran out of time. While all are of the last minute, a comparison has 0.05 s, so that many answers
without an end do not add up to the reward's own timeout, which can end the run."""
_AS_IS = re.compile(r"\$|\\\[|\\\(|\\boxed")
# A word before any LaTeX, which LaTeX would read as a product of letters, or one before a number, such as Rs. 500.
_PROSE = re.compile(r"[A-Za-z]{2,}\.?\s+[0-9]|[^\\]*?(?<![A-Za-z])(?!sqrt|infinity)[A-Za-z]{4,}")
# The unit after a number (18 dollars, 10 km/h, 5 m^2), but no word that changes the number or that math-verify reads.
_UNIT = re.compile(
    r"(?<=[0-9}]) (?!(?:and|or|pi|percent|percentage|pct|dozen|hundred|thousand|[a-z]+illion)\b)"
    r"((?:[A-Za-z]{2}|m[/^])[A-Za-z/ ]*(?:\^?[({]?[23][)}]?)?)$"
)
# Boxes that are one answer together: x = \boxed{3} or x = \boxed{4}.
_JOINED = re.compile(r"\}\$? ?(?:,|,? ?(?:and|or)) ?\$?(?:\w+ ?= ?)?\\boxed")
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{{({}[^{{}}]*)\}}"


@per_sample
def math(
    completion: str,
    answer: Any,
    seconds: int = 5,
    boxed_only: bool = False,
    log_metric: Callable[[str, float], None] | None = None,
) -> float | None:
    r"""Score 1.0 where the completion's answer equals the reference mathematically, else 0.0.

    The completion's answer is its last ``\boxed{}``, or else its last <answer> tag, or else what math-verify finds
    last; with ``boxed_only`` there must be a box. The reference is a text in which math-verify finds the answer, bare
    LaTeX, or a solution whose last box or number after ``####`` is the answer; if it has no mathematics, the score is
    None. Units do not count. The reference's own text is right. What math-verify cannot parse or compare, or not in
    ``seconds``, scores 0.0; the metric ``unverified`` is its share. math-verify enforces this limit with a signal,
    which works only on the main thread of a process, as in workers; on other threads the reward's timeout is the only
    limit.
    """
    number("seconds", seconds, 1)
    if missing(answer):
        return None
    limit = int(seconds) if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM") else 0
    reference = plain_numbers(str(answer))
    if len(boxes := boxed(reference)) == 1 or "####" in reference:
        reference = boxes[-1] if boxes else reference.rpartition("####")[2]
    reference = _bare(reference)
    if _within(limit, _read, reference) == []:
        return None
    completion = plain_numbers(completion)
    boxes = boxed(completion)
    if boxed_only and not boxes:
        return 0.0
    part = boxes[-1] if boxes else inside(completion, "answer")
    if part is None or _JOINED.search(completion):
        said = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", " ", completion)  # bold text
    elif _words(part := _bare(part)) == _words(reference):
        return 1.0
    else:
        said = _readable(part, reference, prose=not boxes)
    right = _within(limit, _compare, reference, said)
    if log_metric is not None:
        log_metric("unverified", float(right is None))
    return float(right or False)


def _bare(part: str) -> str:
    r"""Return an answer with plain spaces, without a final full stop and without ``\text`` around numbers."""
    part = re.sub(_TEXT.format("[^{}0-9]*[0-9]"), r"\1", re.sub(r"(?<!\\)\\[,; ]|~", " ", part))
    return " ".join(part.split()).removesuffix(".")


def _words(part: str) -> list[str]:
    return re.sub(_TEXT.format(""), r" \1 ", part).rstrip(" .").split()


def _readable(part: str, reference: str, *, prose: bool) -> str:
    r"""Return the text in which math-verify finds an answer: LaTeX in ``\boxed{}``, without the reference's unit."""
    unit, expected = _UNIT.search(part), _UNIT.search(" ".join(_words(reference)))
    if unit and (not expected or expected[1].startswith(unit[1].removesuffix("s"))):
        part = part[: unit.start()]
    return part if _AS_IS.search(part) or (prose and _PROSE.match(part)) else f"\\boxed{{{part}}}"


@functools.lru_cache(maxsize=1024)  # a group has one reference, and often few answers
def _within(limit: int, function: Callable[..., Any], *texts: str) -> Any:
    """Return what a function returns, None if it raises or takes more than ``limit`` seconds; 0 is no limit."""

    def run() -> Any:
        hurries = len(_TIME_OUTS) == _TIME_OUTS.maxlen and time.monotonic() - _TIME_OUTS[0] < 60.0
        if limit:  # instead of the alarm of ``timeout``, which is lost if it comes while garbage is collected
            signal.setitimer(signal.ITIMER_REAL, 0.05 if hurries else limit, 0.1)
        return function(*texts)

    try:
        return timeout(limit)(run)()
    except (Exception, TimeoutException) as error:  # sympy raises errors of many kinds
        if isinstance(error, TimeoutException):
            _TIME_OUTS.append(time.monotonic())
        return None


@functools.lru_cache(maxsize=1024)
def _read(reference: str) -> list[Any]:
    found = _parse(_readable(reference, reference, prose=True))
    if all(isinstance(value, str) or value in (zoo, nan) for value in found):
        found = _parse(reference) or found
    return found + (_read(re.sub(r"\\?%", "", reference)) if "%" in reference else [])  # 12.5 is right for 12.5%


def _compare(reference: str, said: str) -> bool | None:
    """Return whether an expression of a text equals one of the reference, None if that cannot be decided."""
    decided = True
    pairs = product(_read(reference), _parse(said))
    for a, b in sorted(pairs, key=lambda pair: not isinstance(pair[0], str)):  # texts first: they never fail
        huge = _huge(a) or _huge(b)
        if a == b if huge else verify(a, b, timeout_seconds=0, raise_on_error=True):
            return True
        decided = decided and not huge
    return False if decided else None


def _huge(expression: Any) -> bool:
    """Return whether an expression has a power or a factorial whose value would take too much time and memory."""
    powers = (part for part in postorder_traversal(expression) if isinstance(part, Pow | CombinatorialFunction))
    exponents: list[Any] = [part.args[-1] for part in powers]  # the innermost first
    return any(value.is_number and bool(abs(value.evalf(5)) > _LARGEST_EXPONENT) for value in exponents)
