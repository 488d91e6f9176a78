"""These rewards look for tags: <think>...</think><answer>...</answer> (DeepSeek-AI 2025, arXiv 2501.12948)."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

Mode = Literal["soft", "strict", "per_tag"]


def think_answer(
    completions: Sequence[str], mode: Mode = "soft", think: str = "think", answer: str = "answer"
) -> list[float]:
    """Score whether completions think in one tag and answer in another.

    ``soft``: 1.0 where both pairs follow each other, with nothing but white space between, each tag just once.
    ``strict``: 1.0 where that is all there is, each tag alone on its line.
    ``per_tag``: a quarter for each of the four tags that is there just once.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    names = _tags([think, answer])
    return [_think_answer_row(c, mode, names) for c in completions]


def xml_count(
    completions: Sequence[str], tags: Sequence[str] = ("think", "answer"), trailing_penalty: float = 0.001
) -> list[float]:
    """Score the fraction of tags that are there just once, less a penalty per character after the last one.

    Opening and closing tags count alike, and the score is never below 0. With the default tags
    ``<think>a</think> <answer>5</answer>!`` scores 1 - 0.001.
    """
    marks = _tags(list(tags))
    if not 0.0 <= trailing_penalty <= 1.0:
        raise ValueError(f"trailing_penalty must lie between 0 and 1, got {trailing_penalty!r}")
    return [max(0.0, _fraction(c, marks) - trailing_penalty * _trailing(c, marks[-1])) for c in completions]


def _tags(names: list[str]) -> list[str]:
    """Return the opening and closing tags in order."""
    if not names or wrong_names(names):
        raise ValueError(f"tags must be names made of letters, digits, dash and underscore, got {names}")
    return [tag for name in names for tag in (f"<{name}>", f"</{name}>")]


def wrong_names(names: list[str]) -> list[str]:
    """Return those that cannot be the name of a tag."""
    return [name for name in names if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name)]


def _think_answer_row(text: str, mode: Mode, marks: list[str]) -> float:
    if mode == "per_tag":
        return _fraction(text, marks)
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    if mode == "strict":
        lines = [line.rstrip() for line in text.strip("\n").split("\n")]
        places = [lines.index(mark) if mark in lines else -1 for mark in marks]
        begins, thought, answers, ends = places
        in_order = 0 == begins < thought and thought + 1 == answers < ends == len(lines) - 1
        return float(in_order)
    a, b, c, d = (text.index(mark) for mark in marks)
    return float(a < b < c < d and not text[b + len(marks[1]) : c].strip())


def _fraction(text: str, marks: list[str]) -> float:
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)


def _trailing(text: str, last: str) -> int:
    _, found, after = text.rpartition(last)
    return len(after.rstrip()) if found else 0
