"""Each function here is one of IFEval's checks: (text, arguments of the instruction) -> followed or not."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tpu_grpo.rewards.shipped.language import language_of

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)\]]))\s+(?=[\"'“‘(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z])\.\Z")


def words(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """Return the pieces that end with a full stop, exclamation or question mark; abbreviations do not end one."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text.strip()):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {piece}"
        elif piece.strip():
            found.append(piece)
    return found


def _compared(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation must be 'less than' or 'at least', got {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _language(text: str, language: str) -> bool:
    return language_of(text) == language


def _sentence_count(text: str, num_sentences: int, relation: str) -> bool:
    return _compared(len(sentences(text)), relation, num_sentences)


def _word_count(text: str, num_words: int, relation: str) -> bool:
    return _compared(len(words(text)), relation, num_words)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs between ``***``; an empty one is allowed first and last, and does not count."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    return all(pieces[1:-1]) and sum(map(bool, pieces)) == num_paragraphs


def _paragraph_starts(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    pieces = [piece.strip() for piece in re.split(r"\n\n", text)]
    if sum(map(bool, pieces)) != num_paragraphs or not 1 <= nth_paragraph <= len(pieces):
        return False
    first = re.match(r"[\"'“‘]*([^\s.,?!'\"”’]*)", pieces[nth_paragraph - 1])
    return first is not None and first[1].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = r"\.?\s?".join(re.escape(c) for c in postscript_marker.lower() if c.isalpha())
    return re.search(rf"^\s*{letters}", text.lower(), re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*\*[^*\n].*$|^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _one_of_three(text: str) -> bool:
    return any(answer in text for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool(found.strip()) for found in [*single, *double]) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def _json(text: str) -> bool:
    bare = re.sub(r"\A\s*```(?:json)?\s*|\s*```\s*\Z", "", text, flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^\n]+?)>>", text))


def _two_responses(text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("******")]
    answers = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compared(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def _all_upper(text: str) -> bool:
    return text.isupper()


def _all_lower(text: str) -> bool:
    return text.islower()


def _no_comma(text: str) -> bool:
    return "," not in text


def _quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


CHECKS: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        "keywords:existence": _keywords,
        "keywords:frequency": _keyword_frequency,
        "keywords:forbidden_words": _forbidden,
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": _language,
        "length_constraints:number_sentences": _sentence_count,
        "length_constraints:number_words": _word_count,
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:nth_paragraph_first_word": _paragraph_starts,
        "detectable_content:number_placeholders": _placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:constrained_response": _one_of_three,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeats_prompt,
        "startend:end_checker": _ends_with,
        "startend:quotation": _quoted,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": _all_upper,
        "change_case:english_lowercase": _all_lower,
        "punctuation:no_comma": _no_comma,
    }
)
