"""Rewards that check with code whether a completion follows the instructions of IFEval (Zhou et al. 2023, arXiv
2311.07911), or is in a language.

Data in IFEval's form has the columns ``instruction_id_list`` (names) and ``kwargs`` (their arguments, one mapping per
name; nulls are ignored). The package py3langid, which contains its model, identifies 97 languages.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpu_grpo.rewards.shipped.correctness import number

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)\]*]))\s+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z])\.\Z")
_UNSURE_END = re.compile(r"(?:\.\.|\b[0-9]+)\.\Z")  # an ellipsis or a number; what follows has to match _BEGIN
_BEGIN = re.compile(r"\W*[A-Z0-9]")
_CAPITAL_WORD = re.compile(r"[^\s,;:@#$%&?!()\[\]{}<>\"'`]+")


def instructions(
    completions: Sequence[str],
    instruction_id_list: Sequence[Any],
    kwargs: Sequence[Any],
    loose: bool = False,
    partial: bool = True,
) -> list[float | None]:
    """Score the fraction of a row's instructions that its completion follows.

    Without ``partial``, score 1.0 if the completion follows all instructions, else 0.0. With ``loose``, each
    instruction is also tried on the completion without its first line, last line or asterisks. A row without
    instructions gets None.
    """
    rows = zip(completions, instruction_id_list, kwargs, strict=True)
    return [_row(c, names, arguments, loose, partial) for c, names, arguments in rows]


def _row(text: str, names: Any, arguments: Any, loose: bool, partial: bool) -> float | None:
    if not names:
        return None
    if len(names) != len(arguments):
        raise ValueError(f"kwargs must have one mapping per instruction, got {len(arguments)} for {list(names)}")
    tried = [text]
    if loose:
        lines = text.split("\n")
        cuts = ["\n".join(kept).strip() for kept in (lines, lines[1:], lines[:-1], lines[1:-1])]
        tried = [version for cut in cuts for version in (cut, cut.replace("*", ""))]
    kept = [any(follows(t, name, given) for t in tried) for name, given in zip(names, arguments, strict=True)]
    return sum(kept) / len(kept) if partial else float(all(kept))


def follows(text: str, name: str, arguments: Mapping[str, Any] | None) -> bool:
    """Return whether a text follows one instruction. Raises ValueError for an unknown instruction, or for wrong or
    missing arguments."""
    if name not in CHECKS:
        raise ValueError(f"instruction_id_list must name instructions of IFEval ({', '.join(CHECKS)}), got {name!r}")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except TypeError as error:
        raise ValueError(f"kwargs of {name} do not fit: {error}") from error


# --- the language ----------------------------------------------------------------------------------------------------


def language(completions: Sequence[str], language: str | Sequence[str], min_letters: int = 20) -> list[float | None]:
    """Score 1.0 where a completion is in ``language`` (ISO 639-1: en, de, zh; an option or a column), else 0.0.

    A completion of fewer than ``min_letters`` letters is too short to tell, and gets None.
    """
    number("min_letters", min_letters, 1)
    expected = [language] * len(completions) if isinstance(language, str) else list(language)
    known = sorted(map(str, _identifier().labels))
    for code in {language} if isinstance(language, str) else set(expected):
        if code not in known:
            raise ValueError(f"language must be one of {', '.join(known)}, got {code!r}")
    return [
        float(language_of(text) == code) if sum(map(str.isalpha, text)) >= min_letters else None
        for text, code in zip(completions, expected, strict=True)
    ]


def language_of(text: str) -> str:
    """Return the likeliest language, as its ISO 639-1 code."""
    return str(_identifier().classify(text)[0])


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # installed by an extra

    return LanguageIdentifier.from_model_file(MODEL_FILE)


# --- the checks: (text, arguments of the instruction) -> followed or not ---------------------------------------------


def sentences(text: str) -> list[str]:
    """Split a text into sentences, which end with a full stop (but not that of an abbreviation), ! or ?. The next one
    may begin with a small letter, as for NLTK's Punkt, which lm_eval uses."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text.strip()):
        if found and (_ABBREVIATION.search(found[-1]) or (_UNSURE_END.search(found[-1]) and not _BEGIN.match(piece))):
            found[-1] += f" {piece}"
        elif piece.strip():
            found.append(piece)
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _compared(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation must be 'less than' or 'at least', got {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs separated by ``***``; if the first or last is empty, it does not count."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    return all(pieces[1:-1]) and sum(map(bool, pieces)) == num_paragraphs


def _paragraph_starts(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    pieces = [piece.strip() for piece in re.split(r"\n\n", text)]
    if sum(map(bool, pieces)) != num_paragraphs or not 1 <= nth_paragraph <= len(pieces):
        return False
    first = re.match(r"[\"'“‘]*([^\s.,?!'\"”’]*)", pieces[nth_paragraph - 1])
    return first is not None and first[1].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?")  # P.S. or P. S.
    return re.search(marker, text, re.IGNORECASE) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    single = re.findall(r"\*([^\n*]*)\*", text)
    return sum(bool(found.strip()) for found in [*single, *double]) >= num_highlights


def _json(text: str) -> bool:
    bare = re.sub(r"\A```(?:json)?", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare.removesuffix("```"))
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("******")]
    answers = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _title(text: str) -> bool:
    titles = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(title.strip("<>").strip() for title in titles)


def _in_english(text: str) -> bool:
    """Whether a text in capital or small letters alone is in English, or too short to tell."""
    return sum(map(str.isalpha, text)) < 20 or language_of(text.lower()) == "en"


CHECKS: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        "keywords:existence": lambda text, keywords: all(word.lower() in text.lower() for word in keywords),
        "keywords:frequency": lambda text, keyword, frequency, relation: _compared(
            len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency
        ),
        "keywords:forbidden_words": lambda text, forbidden_words: (
            not any(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text, re.IGNORECASE) for w in forbidden_words)
        ),
        "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compared(
            text.lower().count(letter.lower()), let_relation, let_frequency
        ),
        "language:response_language": lambda text, language: (
            not any(map(str.isalpha, text)) or language_of(text) == language
        ),
        "length_constraints:number_sentences": lambda text, num_sentences, relation: _compared(
            len(sentences(text)), relation, num_sentences
        ),
        "length_constraints:number_words": lambda text, num_words, relation: _compared(
            len(_words(text)), relation, num_words
        ),
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:nth_paragraph_first_word": _paragraph_starts,
        "detectable_content:number_placeholders": lambda text, num_placeholders: (
            len(re.findall(r"\[.*?\]", text)) >= num_placeholders
        ),
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": lambda text, num_bullets: (
            len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets
        ),
        "detectable_format:constrained_response": lambda text: any(
            f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
        ),
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
            len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
        ),
        "detectable_format:json_format": _json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": lambda text, prompt_to_repeat: (
            text.strip().lower().startswith(prompt_to_repeat.strip().lower())
        ),
        "startend:end_checker": lambda text, end_phrase: (
            text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
        ),
        "startend:quotation": lambda text: re.fullmatch(r'\s*".*"\s*', text, re.DOTALL) is not None,
        "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compared(
            sum(map(str.isupper, _CAPITAL_WORD.findall(text))), capital_relation, capital_frequency
        ),
        "change_case:english_capital": lambda text: text.isupper() and _in_english(text),
        "change_case:english_lowercase": lambda text: text.islower() and _in_english(text),
        "punctuation:no_comma": lambda text: "," not in text,
    }
)
