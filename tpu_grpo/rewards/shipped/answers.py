"""These rewards compare answers as text: the same, the same once normalised, a choice, an integer."""

import re
import string
import unicodedata
from collections.abc import Sequence
from typing import Any

from tpu_grpo.rewards.shipped.texts import boxed, inside, missing

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_STATED = re.compile(
    r"(?:answer|choice|option)\b(?:\s+is)?\s*(?:[:=]|is)?\s*(?:option|choice)?\s*[(\[*]*([A-Za-z])(?![A-Za-z'’])",
    re.IGNORECASE,
)
_ALONE = re.compile(r"(?:^|\n)\s*[(\[*]*([A-Za-z])[)\]*.:]*\s*\Z")
_IN_BRACKETS = re.compile(r"[(\[]([A-Za-z])[)\]]")


def exact_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Score 1.0 where completion and answer are the same text, runs of white space counting as one space, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [None if missing(a) else float(c.split() == str(a).split()) for c, a in pairs]


def normalised_match(completions: Sequence[str], answer: Sequence[Any], tag: str | None = None) -> list[float | None]:
    """Score 1.0 where completion and answer are the same but for case, punctuation, English articles and white space.

    The normalisation is that of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), after Unicode's NFKC. ``answer`` may
    be a list of answers, each as good. With ``tag`` only what the last such tag holds counts, and no tag scores 0.0.
    """
    return [_normalised_row(c, a, tag) for c, a in zip(completions, answer, strict=True)]


def multiple_choice(completions: Sequence[str], answer: Sequence[Any], choices: str = "ABCDE") -> list[float | None]:
    """Score 1.0 where the choice made is the answer's: a letter, or the number of a choice counted from 0.

    The choice is looked for in this order: the last box, the last <answer> tag, the last "answer is (B)", a last line
    that is the letter alone, the last letter in brackets. Letters beyond ``choices`` are no choices.
    """
    if not isinstance(choices, str) or len(choices) < 2 or not choices.isalpha():
        raise ValueError(f"choices must be at least two letters, got {choices!r}")
    return [_choice_row(c, a, choices.upper()) for c, a in zip(completions, answer, strict=True)]


def integer_answer(completions: Sequence[str], tag: str | None = "answer") -> list[float]:
    """Score 1.0 where the last ``<tag>`` (the whole completion if null) holds an integer and nothing else, else 0.0."""
    parts = [inside(c, tag) for c in completions]
    return [float(part is not None and _INTEGER.match(part.replace(",", "")) is not None) for part in parts]


def normalised(text: str) -> str:
    """Put a text in lower case, without punctuation and articles, with single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(c for c in text if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _normalised_row(completion: str, answer: Any, tag: str | None) -> float | None:
    answers = [a for a in (answer if isinstance(answer, list | tuple) else [answer]) if not missing(a)]
    if not answers:
        return None
    part = inside(completion, tag)
    return float(part is not None and normalised(part) in {normalised(str(a)) for a in answers})


def _choice_row(completion: str, answer: Any, choices: str) -> float | None:
    if missing(answer):
        return None
    if isinstance(answer, int) and not isinstance(answer, bool):
        expected = choices[answer] if 0 <= answer < len(choices) else None
    else:
        expected = _only_letter(str(answer), choices)
    if expected is None:
        raise ValueError(f"answer must be one of the choices {choices} or its number, got {answer!r}")
    return float(chosen(completion, choices) == expected)


def chosen(text: str, choices: str) -> str | None:
    """Return the choice that a text makes, in upper case, or None."""
    for part in (boxed(text)[-1:] or [None])[0], inside(text, "answer"):
        if part is not None and (letter := _only_letter(part, choices)):
            return letter
    for pattern in (_STATED, _ALONE, _IN_BRACKETS):
        if found := [letter.upper() for letter in pattern.findall(text) if letter.upper() in choices]:
            return found[-1]
    return None


def _only_letter(text: str, choices: str) -> str | None:
    """Return the letter of ``(B)``, ``B.``, ``\\text{B}`` or ``B) Paris``."""
    match = re.match(r"\s*(?:\\(?:text|mathrm|textbf)\s*\{)?[(\[*]*([A-Za-z])(?![A-Za-z'’])", text)
    letter = match[1].upper() if match else ""
    return letter if letter and letter in choices else None
