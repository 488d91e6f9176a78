"""A small scored rollout worked out by hand: P=2 prompts, G=2, B=4 rows of uneven lengths."""

import numpy as np

from tpu_grpo.records.stages import Completion, FinishReason, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

NAN = float("nan")


def completion(token_ids: list[int], finish_reason: FinishReason = "stop") -> Completion:
    logprobs = np.full(len(token_ids), -1.0, np.float32)
    return Completion(np.array(token_ids, np.int32), logprobs, finish_reason, cached_tokens=0)


def scored_rollout(
    totals: tuple[float, ...] = (1.0, 1.0, 0.0, 2.0),
    by_name: dict[str, list[float]] | None = None,
    texts: tuple[str, ...] = ("a", "b", "c", "d"),
) -> ScoredRollout:
    prompts = (Prompt("one?", (1,)), Prompt("two?", (2, 3)))
    rows = (completion([5]), completion([6, 7, 8], "length"), completion([9, 10]), completion([11, 12, 13, 14, 15, 16]))
    rollout = Rollout(PromptBatch(3, prompts), 2, rows, texts, seconds=4.0, figures={"rollout/wait_seconds": 2.5})
    rewards = by_name if by_name is not None else {"gsm8k": [1.0, NAN, 0.0, NAN], "brevity": [0.5, 0.5, 0, 1]}
    by_row = {name: np.array(values, np.float64) for name, values in rewards.items()}
    return ScoredRollout(rollout, Scores(np.array(totals, np.float64), by_row, seconds=0.25))
