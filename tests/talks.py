"""Conversations made up by hand: completions with turns, answers of an environment, and branches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpu_grpo.records.episode import Branch, Episode, Turn
from tpu_grpo.records.stages import Completion

Spoken = tuple[Sequence[int], Sequence[int]]
"""What the policy sampled in a turn, and what the environment answered."""


def talk(
    prompt_ids: Sequence[int],
    /,
    *spoken: Spoken,
    rewards: Sequence[float | None] = (),
    prompts: Mapping[int, Sequence[int]] | None = None,
    logprobs: Sequence[float] | None = None,
    turns: Mapping[int, Mapping[str, Any]] | None = None,
    **episode: Any,
) -> Completion:
    """Make a conversation; ``prompts`` are those of the branches that begin with a turn, by its number from 0.

    ``logprobs`` are of the sampled tokens, else -0.5; ``turns`` more about some of them. ``rewards`` are of the turns.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    told: list[Turn] = []
    starts = {0: (0, tuple(prompt_ids))}
    for number, (written, answer) in enumerate(spoken):
        if prompts and number in prompts:
            starts[number] = (len(ids), tuple(prompts[number]))
        reward = rewards[number] if rewards else None
        about_turn = dict[str, Any](text="".join(map(chr, written)), reward=reward, observed=len(answer))
        about_turn.update((turns or {}).get(number, {}))
        told.append(Turn(len(ids), len(ids) + len(written), **about_turn))
        ids += [*written, *answer]
        sampled += [True] * len(written) + [False] * len(answer)
    ends = [start for start, _ in list(starts.values())[1:]] + [len(ids)]
    branches = tuple(Branch(of, start, end) for (start, of), end in zip(starts.values(), ends, strict=True) if end)
    mask, values = np.array(sampled, np.bool_), np.zeros(len(ids), np.float32)
    values[mask] = -0.5 if logprobs is None else logprobs
    about: dict[str, Any] = {"prompt": "", "ending": "answered", "messages": (), "environment": "Toy", **episode}
    reason = "length" if about["ending"] in ("turns", "tokens") else "stop"
    return Completion(
        np.array(ids, np.int32),
        values,
        reason,
        0,
        sampled=mask,
        episode=Episode(branches=branches, turns=tuple(told), **about),
    )
