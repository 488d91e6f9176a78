"""These rewards judge conversations with an environment, as messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_grpo.rewards.shipped.verifying import check_verifier, verified


def final_answer(
    completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[Any], verifier: str = "exact_answer"
) -> list[float | None]:
    """Let another reward compare the policy's last turn with the answer, and nothing that was said before.

    A conversation that ends with a call, or with what the environment says, has no final answer and scores 0.0.
    ``verifier`` is exact_answer, normalised_match, multiple_choice, gsm8k or math; a row gets None where that one does
    not apply.
    """
    check_verifier(verifier)
    finals = [final_text(messages) for messages in completions]
    scores = verified(verifier, [final or "" for final in finals], answer)
    return [0.0 if final is None and score is not None else score for final, score in zip(finals, scores, strict=True)]


def final_text(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what the policy says at the end of a conversation; None if it ends otherwise."""
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return str(last.get("content") or "")
