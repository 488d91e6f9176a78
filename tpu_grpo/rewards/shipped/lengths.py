"""These rewards judge lengths, in tokens (the stop token included), and repetition."""

import math
from collections.abc import Sequence
from typing import Any

from tpu_grpo.rewards.shipped.texts import number
from tpu_grpo.rewards.shipped.verifying import check_verifier, verified


def length(
    completion_ids: Sequence[Sequence[int]], max_tokens: int, min_tokens: int = 0, margin: int = 0
) -> list[float]:
    """Score 1.0 from ``min_tokens`` to ``max_tokens``; outside it falls in a line to 0.0 over ``margin`` tokens."""
    number("min_tokens", min_tokens, 0)
    number("max_tokens", max_tokens, min_tokens)
    number("margin", margin, 0)
    outside = [max(min_tokens - len(ids), len(ids) - max_tokens, 0) for ids in completion_ids]
    return [1.0 if not n else max(0.0, 1.0 - n / margin) if margin else 0.0 for n in outside]


def overlong(completion_ids: Sequence[Sequence[int]], max_tokens: int, buffer: int) -> list[float]:
    """Give DAPO's soft penalty (Yu et al. 2025, arXiv 2503.14476, equation 13), between -1 and 0.

    It is 0 up to ``max_tokens - buffer``, falls in a straight line to -1 at ``max_tokens``, and is -1 beyond.
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
    """Prefer short completions when correct, long ones when wrong, by a cosine (Yeo et al. 2025, arXiv 2502.03373).

    ``correct`` and ``wrong`` are the values at no tokens and at ``max_tokens``; longer ones get ``exceeded``.
    ``verifier`` (one of VERIFIERS, such as gsm8k) decides what is correct; a row gets None where that does not apply.
    """
    number("max_tokens", max_tokens, 1)
    check_verifier(verifier)
    for name, pair in (("correct", correct), ("wrong", wrong)):
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{name} must be two numbers, at no tokens and at max_tokens, got {pair!r}")
    rows = zip(verified(verifier, completions, answer), completion_ids, strict=True)
    return [
        None
        if right is None
        else exceeded
        if len(ids) > max_tokens
        else _cosine(len(ids) / max_tokens, *(correct if right > 0 else wrong))
        for right, ids in rows
    ]


def repetition(completions: Sequence[str], ngram: int = 3, penalty: float = 1.0) -> list[float]:
    """Score minus ``penalty`` times the fraction of a completion's word n-grams that it has had before; 0 if short.

    It follows Yeo et al. 2025 (arXiv 2502.03373); case does not count. "a b a b a b" has 4 n-grams of 3 words, 2 of
    them repeated: -0.5.
    """
    number("ngram", ngram, 1)
    number("penalty", penalty, 0)
    return [-penalty * _repeated_fraction(c.lower().split(), ngram) for c in completions]


def _cosine(fraction: float, start: float, end: float) -> float:
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * fraction))


def _repeated_fraction(words: list[str], n: int) -> float:
    ngrams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
