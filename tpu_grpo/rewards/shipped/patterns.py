"""These rewards search completions for regular expressions."""

from collections.abc import Callable, Sequence
from typing import Any

import regex

from tpu_grpo.rewards.shipped.texts import missing

GSM8K_PATTERN = r"(?:\A|\n)####[ \t]*-?\$?[0-9][0-9,]*(?:\.[0-9]+)?\.?\s*\Z"
"""It matches a last line ``#### <number>``."""
_SEARCH_SECONDS = 1.0
type LogMetric = Callable[[str, float], None]


def matches_format(
    completions: Sequence[str],
    pattern: str = GSM8K_PATTERN,
    full: bool = False,
    log_metric: LogMetric | None = None,
) -> list[float]:
    """Score 1.0 where the regular expression ``pattern`` is found (``.`` matches newlines too), else 0.0.

    The default asks for a last line ``#### <number>``. With ``full`` the whole completion must match. A completion in
    which the search takes longer than a second of processor time counts as without it, and as the metric ``undecided``.
    """
    compiled = _compile(pattern)
    return [float(_search(compiled, c, full, log_metric) is not None) for c in completions]


def regex_answer(
    completions: Sequence[str], answer: Sequence[Any], pattern: str, log_metric: LogMetric | None = None
) -> list[float | None]:
    """Score 1.0 where the first group of the last match of ``pattern`` is the answer, white space aside, else 0.0."""
    compiled = _compile(pattern)
    if compiled.groups < 1:
        raise ValueError(f"pattern must have a group that holds the answer, got {pattern!r}; put it in parentheses")
    return [_answer_row(compiled, c, a, log_metric) for c, a in zip(completions, answer, strict=True)]


def _answer_row(pattern: Any, completion: str, answer: Any, log_metric: LogMetric | None) -> float | None:
    if missing(answer):
        return None
    found = _search(pattern, completion, False, log_metric, last=True)
    return float(found is not None and (found[1] or "").split() == str(answer).split())


def _compile(pattern: str) -> Any:
    if not isinstance(pattern, str):
        raise TypeError(
            f"pattern must be a string, got a {type(pattern).__name__}; where the data has a column of that name, set "
            "the option pattern"
        )
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r} ({error})") from error


def _search(pattern: Any, text: str, full: bool, log_metric: LogMetric | None, *, last: bool = False) -> Any:
    limits = {"timeout": _SEARCH_SECONDS, "concurrent": True}  # without the interpreter's lock: others go on
    try:
        if last:
            return next(iter([*pattern.finditer(text, **limits)][-1:]), None)
        return pattern.fullmatch(text, **limits) if full else pattern.search(text, **limits)
    except TimeoutError:
        if log_metric is not None:
            log_metric("undecided", 1.0)
        return None
