"""Rewards for correct answers (texts, choices or numbers), and the functions that find an answer in a text."""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from tpu_grpo.rewards.shipped import SHIPPED

VERIFIERS = ("gsm8k", "exact_answer", "normalised_match", "multiple_choice", "math")
"""The rewards that other rewards can use to decide whether an answer is correct."""
LONGEST_ANSWER = 2**17
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_STATED = re.compile(
    r"(?:answer|choice|option)\b(?:\s+is)?\s*(?:[:=]|is)?\s*(?:option|choice)?\s*[(\[*]*([A-Za-z])(?![A-Za-z'’])",
    re.IGNORECASE,
)
_ALONE = re.compile(r"(?:^|\n)\s*[(\[*]*([A-Za-z])[)\]*.:]*\s*\Z")
_IN_BRACKETS = re.compile(r"[(\[]([A-Za-z])[)\]]")
# A number as people write it, without its currency sign, with or without commas. It is not part of a word (m2), a power
# (m^2) or a fraction (1/2). A minus sign belongs to it unless it can be a subtraction (10-4 contains 4, not -4). The
# atomic group keeps a rejected number from being cut short and accepted (1/2 -> "", not 1).
_NUMBER = r"""
    ((?<![\w)\]}])-)?
    (?<![^\W_]) (?<![\^/])
    ((?> [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | (?<!\.)\.[0-9]+ ))
    (?!/[0-9])
"""
_ANY_NUMBER = re.compile(_NUMBER, re.VERBOSE)
_MARKED_NUMBER = re.compile(r"\#{4}[ \t*:=]*" + _NUMBER, re.VERBOSE)
_CURRENCY = r"\\?[$€£¥]"
_NUMBER_ALONE = re.compile(r"[$€£¥]?\s*([+-]?[0-9]+(?:\.[0-9]+)?)%?")
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")

# --- the part of a completion that counts, and options ---------------------------------------------------------------


def missing(answer: Any) -> bool:
    """Return whether a row has no answer to compare with. Raises ValueError for a text that would hold up a worker."""
    if isinstance(answer, str) and len(answer) > LONGEST_ANSWER:
        raise ValueError(
            f"an answer must have at most {LONGEST_ANSWER} characters, got {len(answer)}; correct the data"
        )
    return answer is None or (isinstance(answer, str) and not answer.strip())


def inside(text: str, tag: str | None) -> str | None:
    """Return the stripped content of the last ``<tag>...</tag>``, or None if there is none. If ``tag`` is None, return
    the whole text, stripped."""
    if tag is None:
        return text.strip()
    close = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(close, 0))
    return text[start + len(tag) + 2 : close].strip() if close >= 0 and start >= 0 else None


def boxed(text: str) -> list[str]:
    r"""Return the content of each ``\boxed{...}`` with balanced braces, in order; an unclosed box is left out."""
    found = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                found.append(text[match.end() : end])
                break
    return found


def fenced(text: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block that has one of these languages or no language; None without such a block."""
    found = re.findall(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", text, re.MULTILINE | re.DOTALL)
    blocks = [body for language, body in found if language.lower() in (*languages, "")]
    return blocks[-1] if blocks else None


def number(name: str, value: Any, least: float) -> None:
    """Check that an option is a number of at least ``least``. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least:g}, got {value!r}")


# --- answers as text -------------------------------------------------------------------------------------------------


def exact_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Score 1.0 where completion and answer are the same text, runs of white space counting as one space, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [None if missing(a) else float(c.split() == str(a).split()) for c, a in pairs]


def normalised_match(completions: Sequence[str], answer: Sequence[Any], tag: str | None = None) -> list[float | None]:
    """Score 1.0 where completion and answer are equal up to case, punctuation, English articles and white space.

    The normalisation is that of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), after Unicode's NFKC. ``answer`` may
    be a list of correct answers. With ``tag``, only the content of the last such tag counts; a text without such a
    tag scores 0.0.
    """
    return [_normalised_row(c, a, tag) for c, a in zip(completions, answer, strict=True)]


def multiple_choice(completions: Sequence[str], answer: Sequence[Any], choices: str = "ABCDE") -> list[float | None]:
    """Score 1.0 where the completion chooses the answer, else 0.0. ``answer`` is a letter, or a choice's index from 0.

    The completion's choice is the first of these that is found: the last box, the last <answer> tag, the last "answer
    is (B)", a last line that is the letter alone, the last letter in brackets. Letters that are not in ``choices`` are
    ignored.
    """
    if not isinstance(choices, str) or len(choices) < 2 or not choices.isalpha():
        raise ValueError(f"choices must be at least two letters, got {choices!r}")
    return [_choice_row(c, a, choices.upper()) for c, a in zip(completions, answer, strict=True)]


def integer_answer(completions: Sequence[str], tag: str | None = "answer") -> list[float]:
    """Score 1.0 where the last ``<tag>`` (the whole completion if null) holds an integer and nothing else, else 0.0."""
    parts = [inside(c, tag) or "" for c in completions]
    return [float(_INTEGER.match(part.replace(",", "")) is not None) for part in parts]


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, and with single spaces."""
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
    """Return the letter that a text gives as its choice, in upper case, or None."""
    for part in (*boxed(text)[-1:], inside(text, "answer")):
        if part is not None and (letter := _only_letter(part, choices)):
            return letter
    for pattern in (_STATED, _ALONE, _IN_BRACKETS):
        if found := [letter.upper() for letter in pattern.findall(text) if letter.upper() in choices]:
            return found[-1]
    return None


def _only_letter(text: str, choices: str) -> str | None:
    """Return the choice that a text begins with: B for ``(B)``, ``B.``, ``\\text{B}`` or ``B) Paris``; else None."""
    match = re.match(r"\s*(?:\\(?:text|mathrm|textbf)\s*\{)?[(\[*]*([A-Za-z])(?![A-Za-z'’])", text)
    letter = match[1].upper() if match else ""
    return letter if letter and letter in choices else None


# --- the final number ------------------------------------------------------------------------------------------------


def gsm8k(completions: Sequence[str], answer: Sequence[Any], flexible: bool = True) -> list[float | None]:
    """Score 1.0 where the completion's final number equals the answer's, else 0.0 (Cobbe et al., arXiv 2110.14168).

    The final number is the one right after the last ``####``. Without ``####`` it is the completion's last number if
    ``flexible`` is set, otherwise there is none. The answer is a reference solution with ``####``, or a bare number;
    if it has no number, the score is None. Numbers compare by value: 18, 18.0, $18.00 and ``#### 18.`` are equal.
    """
    if not isinstance(flexible, bool):
        raise TypeError(f"flexible must be true or false, got {flexible!r}")
    expected = [_reference_number(a) for a in answer]
    return [
        None if number is None else float(final_number(text, flexible=flexible) == number)
        for text, number in zip(completions, expected, strict=True)
    ]


def final_number(text: str, *, flexible: bool) -> Decimal | None:
    """Return the number right after the last ``####``, or else, if ``flexible``, the last number of the text."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = re.sub(_CURRENCY, " ", re.sub(f"(?<=-){_CURRENCY}", "", text))
    found = _MARKED_NUMBER.findall(text)
    if not found and flexible:
        found = _ANY_NUMBER.findall(text)
    if not found:
        return None
    minus, digits = found[-1]
    return Decimal(minus + digits.replace(",", ""))


def _reference_number(answer: Any) -> Decimal | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        number = Decimal(str(answer))
        return number if number.is_finite() else None
    return None if missing(answer) else final_number(str(answer), flexible=True)


# --- the answer that a vote counts -----------------------------------------------------------------------------------


def voted_answer(text: str, pattern: re.Pattern[str] | None = None) -> str | None:
    r"""Return the last answer of a completion as a text that can be counted in a vote, None if it has none.

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
    if found := _NUMBER_ALONE.fullmatch(_GROUPED.sub("", part)):
        return _written(Decimal(found[1]))
    return part or None


def _written(number: Decimal) -> str:
    return format(number.normalize() + 0, "f")  # + 0: minus zero is zero


# --- conversations, and rewards that call other rewards --------------------------------------------------------------


def final_answer(
    completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[Any], verifier: str = "exact_answer"
) -> list[float | None]:
    """Apply another reward to the policy's last turn, ignoring earlier turns.

    A conversation that ends with a tool call or with the environment's message has no final answer and scores 0.0.
    ``verifier`` is exact_answer, normalised_match, multiple_choice, gsm8k or math; a row to which the verifier does
    not apply gets None.
    """
    finals = [final_text(messages) for messages in completions]
    scores = verified(verifier, [final or "" for final in finals], answer)
    return [0.0 if final is None and score is not None else score for final, score in zip(finals, scores, strict=True)]


def final_text(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the last message's text if it is the policy's and not a tool call; otherwise None."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return str(last.get("content") or "")


def environment(environment_rewards: Sequence[float | None]) -> list[float | None]:
    """Return each environment's reward: the value of ``get_reward``, or else the sum of the turns' rewards, or None."""
    return list(environment_rewards)


def verified(verifier: str, completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Return a verifier's scores: 1.0 for a correct completion, 0.0 for a wrong one, None for a row without an answer.
    Raises ValueError for a name that is not one of VERIFIERS."""
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    judge = SHIPPED[verifier].load()
    if verifier == "math":
        return [judge(c, a) for c, a in zip(completions, answer, strict=True)]
    return judge(completions, answer)
