"""This reward tells the language a text is written in, by py3langid (its model comes with it; 97 languages)."""

import functools
from collections.abc import Sequence

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from tpu_grpo.rewards.shipped.texts import number


def language(completions: Sequence[str], language: str | Sequence[str], min_letters: int = 20) -> list[float | None]:
    """Score 1.0 where a completion is in ``language`` (ISO 639-1: en, de, zh; an option or a column), else 0.0.

    A completion of fewer than ``min_letters`` letters is too short to tell, and gets None.
    """
    number("min_letters", min_letters, 1)
    expected = [language] * len(completions) if isinstance(language, str) else list(language)
    for code in {language} if isinstance(language, str) else set(expected):
        if code not in languages():
            raise ValueError(f"language must be one of {', '.join(sorted(languages()))}, got {code!r}")
    return [
        float(language_of(text) == code) if sum(c.isalpha() for c in text) >= min_letters else None
        for text, code in zip(completions, expected, strict=True)
    ]


def language_of(text: str) -> str:
    """Return the likeliest language, as its ISO 639-1 code."""
    return str(_identifier().classify(text)[0])


def languages() -> frozenset[str]:
    """Return the codes of the languages that are told apart."""
    return frozenset(map(str, _identifier().labels))


@functools.cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE)
