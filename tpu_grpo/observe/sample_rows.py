"""Completions for people to read: the lines of ``samples.jsonl``, and the texts that pages and consoles show."""

import math
import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Float

from tpu_grpo.records.short_texts import shortened
from tpu_grpo.records.stages import Completion, FinishReason, ScoredRollout


@dataclass(frozen=True)
class SampleRow:
    """One row of a step, as it is logged and shown."""

    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    """The value of each reward by its name in the metrics, before weighting; None where a reward does not apply."""
    reward: float | None
    """The weighted sum of the rewards; None for an unscored row."""
    advantage: float
    tokens: int
    """The number of tokens that were sampled."""
    finish_reason: FinishReason
    per_token: tuple[float, ...] = ()
    """The value added to each token's advantage; empty if nothing was added."""
    gold: str | None = None
    """The right answer; None if the prompt's record has none."""
    conversation: Mapping[str, Any] = field(default_factory=dict)
    """The `conversation_fields`, empty without an environment. ``prompt`` is a conversation's first prompt."""


def sample_rows(scored: ScoredRollout, advantages: Float[np.ndarray, " B"]) -> list[SampleRow]:
    """Return the B rows of a step, in order; raises ValueError if there are not B advantages."""
    rollout, scores = scored.rollout, scored.scores
    rows = zip(rollout.row_prompts, rollout.completions, rollout.texts, advantages, strict=True)
    return [
        SampleRow(
            prompt=prompt.text if completion.episode is None else completion.episode.prompt,
            completion=text,
            rewards={name: none_if_nan(rewards_B[row]) for name, rewards_B in scores.by_name.items()},
            reward=none_if_nan(scores.total[row]),
            advantage=float(advantage),
            tokens=completion.sampled_tokens,
            finish_reason=completion.finish_reason,
            per_token=tuple(map(float, scores.per_token[row])) if scores.per_token else (),
            gold=prompt.gold,
            conversation=conversation_fields(completion),
        )
        for row, (prompt, completion, text, advantage) in enumerate(rows)
    ]


def sample_fields(row: SampleRow) -> dict[str, object]:
    """Return the fields of a row's line in ``samples.jsonl``, all but ``step``."""
    return {
        "prompt": row.prompt,
        "completion": row.completion,
        **({} if row.gold is None else {"gold": row.gold}),
        "rewards": dict(row.rewards),
        "reward": row.reward,
        "advantage": row.advantage,
        "tokens": row.tokens,
        "finish_reason": row.finish_reason,
        **({"per_token": list(row.per_token)} if row.per_token else {}),
        **row.conversation,
    }


def conversation_fields(completion: Completion) -> dict[str, Any]:
    """Return what a conversation adds to a line of a file: environment, ending, failure, turns and mask.

    The result is empty if the completion is not a conversation. The mask run-length encodes the tokens after the first
    prompt, in pairs: the number of sampled tokens, and the number of other tokens that follow them:

        sampled  [1 1 1 0 0 1 1]   ->   mask  [[3, 2], [2, 0]]
    """
    if (episode := completion.episode) is None:
        return {}
    sampled = completion.sampled
    mask = [True] * len(completion.token_ids) if sampled is None else np.asarray(sampled).tolist()
    runs = [(is_sampled, len(list(run))) for is_sampled, run in groupby(mask)]
    counts = [0] * bool(runs and not runs[0][0]) + [length for _, length in runs]
    counts += [0] * (len(counts) % 2)
    failure = episode.failure
    return {
        "environment": episode.environment,
        "ending": episode.ending,
        **({} if failure is None else {"failure": f"{failure.kind}: {failure.text}"}),
        "turns": [
            {
                "text": turn.text,
                "calls": list(turn.calls),
                "answer": turn.answer,
                "reward": turn.reward,
                "tokens": turn.end - turn.start,
                "observed_tokens": turn.observed,
                "errors": turn.errors,
            }
            for turn in episode.turns
        ],
        "mask": [list(pair) for pair in zip(counts[::2], counts[1::2], strict=True)],
    }


def called_tools(turn: Mapping[str, Any]) -> str:
    """Return the names of the tools that a turn of ``conversation_fields`` called; empty if it called none."""
    return ", ".join(name or "a call that cannot be read" for name in turn.get("calls", ()))


def shown_turns(turns: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` turns, half of them the first and half the last; between them, the number left out.

    >>> shown_turns(["a", "b", "c", "d", "e"], 2)
    ['a', 3, 'e']
    """
    left_out, half = len(turns) - most, most // 2
    return list(turns) if left_out <= 0 else [*turns[:half], left_out, *turns[half + left_out :]]


def pick_rows(step: int, rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """Pick at most ``count`` rows: the best, the worst, and some others, which are drawn with the step as seed."""
    ranked = sorted(rows, key=lambda row: -(row.reward or 0.0))
    if len(ranked) <= count:
        return ranked
    middle = random.Random(step).sample(range(1, len(ranked) - 1), count - 2)
    return [ranked[i] for i in (0, *sorted(middle), len(ranked) - 1)]


def visible(text: str, limit: int) -> str:
    """Make a text fit one cell: escape control characters, and cut out the middle beyond ``limit`` characters.

    >>> visible("2 + 2 =\\n4", 80)
    '2 + 2 =\\\\n4'
    """
    head = limit * 2 // 3
    shown = shortened(text, head, limit - head, " … ")
    control = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in control else c for c in shown)


_TURN = re.compile(
    r"<\|(?:im_start|start_header_id|start_of_role)\|>\s*(system|user|assistant|tool|\w+)(?:<\|(?:end_header_id|end_of_role)\|>)?\s*"
    r"|<start_of_turn>(\w+)\s*|<\|(user|assistant|system)\|>\s*"
)
_MARK = re.compile(r"<\|[\w-]{1,40}\|>|<(?:end_of_turn|bos|eos|/s)>|\A<s>|\[/?INST\]")


def without_marks(prompt: str) -> str:
    """Remove the chat template's special tokens from a rendered prompt; each of several turns gets its role in front.

    >>> without_marks("<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n")
    '2 + 2?'
    """
    pieces = _TURN.split(prompt)  # text, then for each turn three groups (one is its role) and its text
    turns = [(" ".join(filter(None, pieces[at - 3 : at])), pieces[at]) for at in range(4, len(pieces), 4)]
    said = [(role, words) for role, text in [("", pieces[0]), *turns] if (words := _MARK.sub("", text).strip())]
    return said[0][1] if len(said) == 1 else "\n".join(f"{role}: {words}" if role else words for role, words in said)


def none_if_nan(value: float) -> float | None:
    """Return a reward for a JSON file: None for NaN, which means that the reward does not apply."""
    return None if math.isnan(value) else float(value)
