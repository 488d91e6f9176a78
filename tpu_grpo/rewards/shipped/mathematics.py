r"""A reward that compares numbers (1/2 = 0.5 = \frac{1}{2}), sets, intervals and matrices with math-verify."""

import functools
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from tpu_grpo.rewards.protocol import per_sample
from tpu_grpo.rewards.shipped.correctness import boxed, missing, number

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports every text that is not mathematics


@per_sample
def math(
    completion: str,
    answer: Any,
    seconds: int = 5,
    boxed_only: bool = False,
    log_metric: Callable[[str, float], None] | None = None,
) -> float | None:
    r"""Score 1.0 where the completion's answer equals the reference mathematically, else 0.0.

    The completion's answer is its last ``\boxed{}``, or else what math-verify finds last; with ``boxed_only`` there
    must be a box. The reference is a bare answer, LaTeX, or a solution whose last box or number after ``####`` is the
    answer; if it has no mathematics, the score is None. A comparison that takes longer than ``seconds`` scores 0.0 and
    counts in the metric ``unverified``. math-verify enforces this limit with a signal, which works only on the main
    thread of a process, as in workers; on other threads the reward's timeout is the only limit.
    """
    number("seconds", seconds, 1)
    if missing(answer):
        return None
    limit = seconds if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM") else None
    gold = _reference(str(answer), limit)
    if not gold:
        return None
    boxes = boxed(completion)
    if boxed_only and not boxes:
        return 0.0
    said = f"$\\boxed{{{boxes[-1]}}}$" if boxes else completion
    try:
        found = parse(said, parsing_timeout=limit, raise_on_error=True)  # type: ignore[arg-type]
        right = bool(found) and verify(list(gold), found, timeout_seconds=limit, raise_on_error=True)
    except TimeoutException:
        if log_metric is not None:
            log_metric("unverified", 1.0)
        return 0.0
    return float(right)


@functools.lru_cache(maxsize=4096)  # a group has one reference
def _reference(answer: str, limit: int | None) -> tuple[Any, ...]:
    if boxes := boxed(answer):
        answer = boxes[-1]
    elif "####" in answer:
        answer = answer.rpartition("####")[2].strip()
    bare = "$" not in answer and "\\[" not in answer and "\\(" not in answer
    return tuple(parse(f"${answer}$" if bare else answer, parsing_timeout=limit, raise_on_error=True))  # type: ignore[arg-type]
