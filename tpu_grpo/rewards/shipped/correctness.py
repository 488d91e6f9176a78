"""Rewards for correct answers (texts, choices or numbers), and the functions that find an answer in a text."""

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from tpu_grpo.rewards.shipped import SHIPPED, Thinking

VERIFIERS = ("gsm8k", "exact_answer", "normalised_match", "multiple_choice", "math")
"""The rewards that other rewards can use to decide whether an answer is correct."""
LONGEST_ANSWER = 2**17
type LogMetric = Callable[[str, float], None]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_STATED = re.compile(
    r"(?:answer|choice|option)\b(?:\s+is)?\s*(?:[:=]|is)?\s*(?:option|choice)?\s*[(\[*]*([A-Za-z])(?![A-Za-z'’])",
    re.IGNORECASE,
)
_ALONE = re.compile(r"(?:^|\n)\s*[(\[*]*([A-Za-z])[)\]*.:]*\s*\Z")
_IN_BRACKETS = re.compile(r"[(\[]([A-Za-z])[)\]]")
# A number as people write it, without its currency sign, with or without commas. It is not part of a word (m2), a power
# (10^3), a fraction (1/2) or a time (12:00). A minus sign belongs to it unless it can be a subtraction (10-4 has 4, not
# -4). The atomic group keeps a rejected number from being cut short and accepted (1/2 -> "", not 1).
_NUMBER = r"""
    ((?<![\w)\]}])-)?
    (?<![^\W_]) (?<![\^/]) (?<![0-9]:)
    ((?> [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | (?<!\.)\.[0-9]+ ))
    (?! [/:][0-9] | \^(?![\\{°o]) | [eE][+-]?[0-9] )
"""
_ANY_NUMBER = re.compile(_NUMBER, re.VERBOSE)
_MARKED_NUMBER = re.compile(r"\#{4}[ \t*:=]*" + _NUMBER, re.VERBOSE)
_CURRENCY = r"\\?[$€£¥]"
_NUMBER_ALONE = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))%?")
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")
_SIGNS = str.maketrans({"−": "-", "⁄": "/", "٫": ".", "٬": ","})
_GROUPS = re.compile(r"(?<![\w.,/^])[1-9][0-9]{0,2}(?:(?:,\\!|\\[,! ]|\{,\}|[_ ~\xa0\u2009\u202f])[0-9]{3})+(?![\w/])")
_MIXED = re.compile(r"(?<![\w.,/^])([0-9]{1,3}) +([0-9]{1,9})/([0-9]{1,9})(?![\w/])")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.,/^])((?>[0-9]+(?:\.[0-9]+)?|\.[0-9]+))"
    r"(?:[eE]|\s?(?:×|\\times|\*)\s?10\^)(\{)?([+-]?[0-9]{1,3})(?(2)\})(?![\w^])"
)

# --- the part of a completion that counts, and options ---------------------------------------------------------------


def missing(answer: Any) -> bool:
    """Return whether a row has no answer to compare with. Raises ValueError for a text that would hold up a worker."""
    if isinstance(answer, str) and len(answer) > LONGEST_ANSWER:
        raise ValueError(
            f"an answer must have at most {LONGEST_ANSWER} characters, got {len(answer)}; correct the data"
        )
    return answer is None or (isinstance(answer, str) and not answer.strip())


def as_read(text: str, prompt: str, thinking: Thinking, names: str = "") -> str:
    """Return what a reward is given of a completion whose rendered prompt is ``prompt``.

    Thinking that is never closed leaves no answer. ``names`` holds the names of the tags that the reward counts.
    """
    tag = re.search(r"<([\w-]+)>\s*\Z", prompt[-1000:])
    if thinking == "counted":
        return f"<{tag[1]}>\n{text}" if tag and tag[1] in f"think {names}" else text
    opened = tag is not None and tag[1] == "think"
    if thinking == "kept" or (thinking != "dropped" and not opened and not text.lstrip().startswith("<think>")):
        return text
    _, closed, rest = text.rpartition("</think>")
    return "" if opened and not closed else rest.partition("<think>")[0]


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
    starts: list[int | None] = []  # of the boxes and other braces that are open
    found: list[tuple[int, int]] = []
    for match in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if match[0] != "}":
            starts.append(match.end() if match[1] else None)
        elif starts and (start := starts.pop()) is not None:
            found.append((start, match.start()))
    return [text[start:end] for start, end in sorted(found)]


def fenced(text: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block that has one of these languages or no language; None without such a block."""
    found, opened, lines = None, None, list[str]()
    for line in text.split("\n"):
        mark = re.fullmatch(r"[ \t]*```[ \t]*([\w+-]*)[ \t\r]*", line)
        if opened is None:
            opened, lines = mark and mark[1].lower(), []
        elif mark and not mark[1]:
            found, opened = "\n".join([*lines, ""]) if opened in (*languages, "") else found, None
        else:
            lines.append(line)
    return found


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
    """Score 1.0 where the completion chooses the answer, else 0.0. ``answer`` is a letter, or a choice's index from 0
    as a number or its text.

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
    if index := re.fullmatch(r"([0-9]{1,4})(?:\.0)?", str(answer).strip()):
        expected = choices[int(index[1]) :][:1] or None
    else:
        expected = _only_letter(str(answer), choices)
    if expected is None:
        raise ValueError(f"answer must be one of the choices {choices} or its number, got {answer!r}")
    return float(chosen(completion, choices) == expected)


def chosen(text: str, choices: str) -> str | None:
    """Return the letter that a text gives as its choice, in upper case, or None."""
    lines = (" ".join(line.split()) for line in unicodedata.normalize("NFKC", text).splitlines())
    text = "\n".join(line for line in lines if line)  # single spaces: the patterns below try each way to divide a run
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
    if (marker := text.rfind("####")) > 0 and (number := final_number(text[marker:], flexible=False)) is not None:
        return number  # without reading all of the text, which takes longer
    text = re.sub(r"\^[({]?-?[0-9]+[)}]?", "^", plain_numbers(text, _CURRENCY))
    found = _MARKED_NUMBER.findall(text)
    if not found and flexible:
        found = _ANY_NUMBER.findall(text)
    if not found:
        return None
    minus, digits = found[-1]
    return Decimal(minus + digits.replace(",", ""))


def plain_numbers(text: str, currency: str = r"\\\$|(?<=\bUS)\$|[€£¥]") -> str:
    r"""Return a text whose numbers are written plainly: ``1\,234``, ``1 234`` and ``1_234`` as 1234, ``3 1/2`` as 7/2,
    ``1.5e3`` and ``1.5\times 10^3`` as 1500, digits of any script as 0 to 9, and no currency signs."""
    if not text.isascii():
        text = re.sub(r"(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)
        text = re.sub(r"[⁰¹²³⁴-⁹]+", r"^(\g<0>)", text)
        text = re.sub(r"[¼-¾⅐-⅞⁰¹²³⁴-⁹]|－?[０-９][０-９．，]*", lambda m: unicodedata.normalize("NFKC", m[0]), text)
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text.translate(_SIGNS))
    text = re.sub(currency, " ", re.sub(f"(?<=-)(?:{currency})", "", text))
    text = _GROUPS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}" if int(m[2]) < int(m[3]) else m[0], text)
    return _POWER_OF_TEN.sub(lambda m: format(Decimal(f"{m[1]}e{m[3]}"), "f"), text)


def _reference_number(answer: Any) -> Decimal | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        number = Decimal(answer if isinstance(answer, int) else str(answer))
        return number if number.is_finite() else None
    return None if missing(answer) else final_number(str(answer), flexible=True)


# --- the answer that a vote counts -----------------------------------------------------------------------------------


def voted_answer(text: str, prompt: str = "") -> str | None:
    r"""Return the last answer of a completion as a text that can be counted in a vote, None if it has none.

    The answer follows the thinking that the rendered ``prompt`` or the text opens. It is the last \boxed{...}, else the
    content of the last <answer> tag, else the number after ####, else the last number, else the whole text. White space
    and a final full stop are removed, and numbers are normalised: 1,000, $1000 and 1000.0 are the same answer.
    """
    text = as_read(text, prompt, "dropped if opened")
    for part in (boxed(text)[-1:] or [None])[0], inside(text, "answer"):
        if part is not None:
            return _canonical(part)
    number = final_number(text, flexible=True)
    return _canonical(text) if number is None else _written(number)


def _canonical(part: str) -> str | None:
    part = " ".join(part.split()).removesuffix(".").rstrip()
    if found := _NUMBER_ALONE.fullmatch(_GROUPED.sub("", plain_numbers(part, _CURRENCY).strip())):
        return _written(Decimal(found[1]))
    return part or None


def _written(number: Decimal) -> str:
    text = format(number or Decimal(0), "f")  # minus zero is zero
    return text.rstrip("0").rstrip(".") if "." in text else text


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
