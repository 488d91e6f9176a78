"""The rewards that can tell others whether an answer is correct."""

import importlib
from collections.abc import Sequence
from typing import Any

VERIFIERS = {
    "gsm8k": "gsm8k:gsm8k",
    "exact_answer": "answers:exact_answer",
    "normalised_match": "answers:normalised_match",
    "multiple_choice": "answers:multiple_choice",
    "math": "mathematics:math",
}


def check_verifier(name: str) -> None:
    """Refuse a name that is none of VERIFIERS. Raises ValueError."""
    if name not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {name!r}")


def verified(verifier: str, completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Return what a verifier scores: 1.0 for a correct completion, 0.0 for a wrong one, None without an answer."""
    module, _, name = VERIFIERS[verifier].partition(":")
    judge = getattr(importlib.import_module(f"tpu_grpo.rewards.shipped.{module}"), name)
    if verifier == "math":
        return [judge(c, a) for c, a in zip(completions, answer, strict=True)]
    return judge(completions, answer)
