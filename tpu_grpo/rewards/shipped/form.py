"""Rewards for the form of a completion: regular expressions, tags, length in tokens, repetition."""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import regex

from tpu_grpo.rewards.shipped.correctness import LogMetric, missing, number, verified

GSM8K_PATTERN = r"(?:\A|\n)####[ \t]*-?\$?[0-9][0-9,]*(?:\.[0-9]+)?\.?\s*\Z"
"""Matches a last line ``#### <number>``."""
_SEARCH_SECONDS = 1.0
Mode = Literal["soft", "strict", "per_tag"]


# --- regular expressions ---------------------------------------------------------------------------------------------


def matches_format(
    completions: Sequence[str], pattern: str = GSM8K_PATTERN, full: bool = False, log_metric: LogMetric | None = None
) -> list[float]:
    """Score 1.0 where the regular expression ``pattern`` is found (``.`` matches newlines too), else 0.0.

    The default requires a last line ``#### <number>``. With ``full`` the whole completion must match. A completion
    whose search takes longer than a second of processor time scores 0.0; the metric ``undecided`` is the share of such
    completions.
    """
    compiled = _compile(pattern)
    return [float(_search(compiled, c, full, log_metric) is not None) for c in completions]


def regex_answer(
    completions: Sequence[str], answer: Sequence[Any], pattern: str, log_metric: LogMetric | None = None
) -> list[float | None]:
    """Score 1.0 where the first group of the last match of ``pattern`` has the same words as the answer, else 0.0."""
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
    limits = {"timeout": _SEARCH_SECONDS, "concurrent": True}  # concurrent: other threads run meanwhile
    found, is_late = None, False
    try:
        if last:
            found = next(iter([*pattern.finditer(text, **limits)][-1:]), None)
        else:
            found = pattern.fullmatch(text, **limits) if full else pattern.search(text, **limits)
    except TimeoutError:
        is_late = True
    if log_metric is not None:
        log_metric("undecided", float(is_late))
    return found


# --- tags: <think>...</think><answer>...</answer> (DeepSeek-AI 2025, arXiv 2501.12948) -------------------------------


def think_answer(
    completions: Sequence[str], mode: Mode = "soft", think: str = "think", answer: str = "answer"
) -> list[float]:
    """Score whether completions think in one tag and answer in another. An opening tag at the end of the prompt counts.

    ``soft`` gives 1.0 where each tag occurs exactly once and only white space separates the two pairs, else 0.0.
    ``strict`` also requires that each tag is alone on its line and that no text is before, between or after the
    pairs. ``per_tag`` gives a quarter for each of the four tags that occurs exactly once.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    names = _tags([think, answer])
    return [_think_answer_row(c, mode, names) for c in completions]


def xml_count(
    completions: Sequence[str], tags: Sequence[str] = ("think", "answer"), trailing_penalty: float = 0.001
) -> list[float]:
    """Score the fraction of tags that occur exactly once, minus a penalty per character after the last closing tag.

    Opening and closing tags count alike, an opening tag at the end of the prompt too. The score is never below 0. With
    the default tags
    ``<think>a</think> <answer>5</answer>!`` scores 1 - 0.001.
    """
    marks = _tags(list(tags))
    if not 0.0 <= trailing_penalty <= 1.0:
        raise ValueError(f"trailing_penalty must lie between 0 and 1, got {trailing_penalty!r}")
    return [max(0.0, _fraction(c, marks) - trailing_penalty * _trailing(c, marks[-1])) for c in completions]


def _tags(names: list[str]) -> list[str]:
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[\w-]+", name) for name in names):
        raise ValueError(f"tags must be names made of letters, digits, dash and underscore, got {names}")
    return [tag for name in names for tag in (f"<{name}>", f"</{name}>")]


def _think_answer_row(text: str, mode: Mode, marks: list[str]) -> float:
    if mode == "per_tag":
        return _fraction(text, marks)
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    if mode == "strict":
        lines = [line.rstrip() for line in text.strip("\n").split("\n")]
        begins, thought, answers, ends = (lines.index(mark) if mark in lines else -1 for mark in marks)
        return float(0 == begins < thought and thought + 1 == answers < ends == len(lines) - 1)
    a, b, c, d = (text.index(mark) for mark in marks)
    return float(a < b < c < d and not text[b + len(marks[1]) : c].strip())


def _fraction(text: str, marks: list[str]) -> float:
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)


def _trailing(text: str, last: str) -> int:
    _, found, after = text.rpartition(last)
    return len(after.rstrip()) if found else 0


# --- lengths in tokens, the stop token included, and repetition ------------------------------------------------------


def length(
    completion_ids: Sequence[Sequence[int]], max_tokens: int, min_tokens: int = 0, margin: int = 0
) -> list[float]:
    """Score 1.0 from ``min_tokens`` to ``max_tokens``, falling linearly to 0.0 over ``margin`` tokens on both sides."""
    number("min_tokens", min_tokens, 0)
    number("max_tokens", max_tokens, min_tokens)
    number("margin", margin, 0)
    outside = [max(min_tokens - len(ids), len(ids) - max_tokens, 0) for ids in completion_ids]
    return [1.0 if not n else max(0.0, 1.0 - n / margin) if margin else 0.0 for n in outside]


def overlong(completion_ids: Sequence[Sequence[int]], max_tokens: int, buffer: int) -> list[float]:
    """Give DAPO's soft penalty (Yu et al. 2025, arXiv 2503.14476, equation 13), between -1 and 0.

    The penalty is 0 up to ``max_tokens - buffer`` tokens, falls linearly to -1 at ``max_tokens``, and stays -1 beyond.
    """
    number("buffer", buffer, 1)
    number("max_tokens", max_tokens, buffer)
    start = max_tokens - buffer
    return [-min(1.0, max(0.0, (len(ids) - start) / buffer)) for ids in completion_ids]


def cosine_length(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[Any],
    max_tokens: int,
    verifier: str = "gsm8k",
    correct: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    exceeded: float = -1.0,
) -> list[float | None]:
    """Prefer short correct and long wrong completions, by a cosine of the length (Yeo et al. 2025, arXiv 2502.03373).

    ``correct`` and ``wrong`` are each a pair: the values at 0 and at ``max_tokens`` tokens. A longer completion gets
    ``exceeded``. ``verifier`` (one of VERIFIERS) decides what is correct; rows to which it does not apply get None.
    """
    number("max_tokens", max_tokens, 1)
    for name, pair in (("correct", correct), ("wrong", wrong)):
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{name} must be two numbers, at no tokens and at max_tokens, got {pair!r}")

    def score(right: float | None, tokens: int) -> float | None:
        if right is None:
            return None
        if tokens > max_tokens:
            return exceeded
        start, end = correct if right > 0 else wrong
        return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * (tokens / max_tokens)))

    rights = verified(verifier, completions, answer)
    return [score(right, len(ids)) for right, ids in zip(rights, completion_ids, strict=True)]


def repetition(completions: Sequence[str], ngram: int = 3, penalty: float = 1.0) -> list[float]:
    """Score ``-penalty`` times the fraction of a completion's word n-grams that repeat an earlier one.

    This follows Yeo et al. 2025 (arXiv 2502.03373), ignoring case. "a b a b a b" has 4 n-grams of 3 words, of which 2
    are repeated, and scores -0.5. A completion of fewer than ``ngram`` words scores 0.
    """
    number("ngram", ngram, 1)
    number("penalty", penalty, 0)
    return [-penalty * _repeated_fraction(c.lower().split(), ngram) for c in completions]


def _repeated_fraction(words: list[str], n: int) -> float:
    ngrams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
