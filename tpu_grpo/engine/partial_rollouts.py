"""Completions that are sampled over several steps (``rollout.partial_extra``); tokens alone decide where a step stops.

With ``rollout.partial_extra`` x, a step samples P (1 + x) groups, and learns from P of them. A group is whole when all
its completions have ended. L is the smallest multiple of 16 such that P groups are whole within L new tokens of every
row. Rows keep their first L tokens of the step. For P = 1 and two groups of two rows that have this many tokens left to
sample:

    group 0    9 100        not whole; its rows keep 9 (ended) and 32 tokens, and 68 are left for later steps
    group 1   20  30        whole within L = 32

L, and with it every token, depends on tokens alone: on no clock, engine or host. An engine may have sampled more of a
row before it could know L; those tokens are dropped. A later step prefills prompt and kept tokens with its new weights,
and continues with the row's random key. In other partial rollouts (APRIL, arXiv 2509.18521), timing decides where rows
stop.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32

from tpu_grpo.records.stages import Completion, Prompt, Request

MULTIPLE = 16
"""L is a multiple of this, so that a few tokens more or less do not change it."""
NEW = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "cut", 0)
"""A completion of which nothing has been sampled."""


@dataclass(frozen=True)
class PartialGroup:
    """The completions of a prompt, as far as they have been sampled; unfinished ones have the finish reason "cut"."""

    prompt: Prompt
    record: int
    """The index of the prompt among the training prompts."""
    position: int
    """The prompt's position in the stream of training prompts."""
    step: int
    """The step that began the group."""
    number: int
    """The number of the group among the groups that ``step`` began."""
    completions: tuple[Completion, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finish_reason != "cut" for completion in self.completions)

    @property
    def is_new(self) -> bool:
        """Whether nothing has been sampled yet."""
        return all(completion is NEW for completion in self.completions)

    def older(self) -> "PartialGroup":
        """Return the group with every token one step older."""
        return replace(self, completions=tuple(replace(c, ages=ages_of(c) + 1) for c in self.completions))


class Cutoff:
    """Finds L while groups are sampled: ``length`` is an upper bound that shrinks to L as rows end.

    Args:
        groups: the indices of each group's requests; no indices for a group that is whole already.
        wanted: the number of groups that have to be whole.
        due: the indices of groups that have to be among the whole ones.
    """

    def __init__(self, groups: Sequence[Collection[int]], wanted: int, due: Collection[int] = ()):
        self._group_of = {index: number for number, members in enumerate(groups) for index in members}
        self._left = [len(members) for members in groups]
        self._ends = [0] * len(groups)
        self._wanted, self._due = wanted, due
        self._found, self._untold = set[int](), dict[int, int]()

    def add(self, index: int, request: Request, completion: Completion, *, whole: bool = False) -> None:
        """Record a completion that an engine returned for a request, unless a cut may have stopped it.

        ``whole`` says that there was no cut: conversations end in other ways, too.
        """
        if whole or ended(request, completion):
            self._untold[index] = len(completion.token_ids)
            self.merge({index: len(completion.token_ids)})

    def untold(self) -> dict[int, int]:
        """Return, for other engines, the token counts of requests that have ended here since the last call."""
        told, self._untold = self._untold, {}
        return told

    def merge(self, ends: Mapping[int, int]) -> None:
        """Record requests that have ended on any host; ``ends`` maps each index to its number of tokens."""
        for index, tokens in ends.items():
            if index not in self._found:
                self._found.add(index)
                group = self._group_of[index]
                self._left[group] -= 1
                self._ends[group] = max(self._ends[group], tokens)

    @property
    def length(self) -> int | None:
        """An upper bound of L, from the requests that have ended so far; None if too few groups are whole."""
        whole = sorted(end for end, left in zip(self._ends, self._left, strict=True) if not left)
        if len(whole) < self._wanted or any(self._left[number] for number in self._due):
            return None
        longest = max([whole[self._wanted - 1], *(self._ends[number] for number in self._due)])
        return -(-longest // MULTIPLE) * MULTIPLE


def ages_of(completion: Completion) -> Int32[np.ndarray, " T"]:
    """Return for each token how many steps ago it was sampled."""
    return np.zeros(len(completion.token_ids), np.int32) if completion.ages is None else completion.ages


def ended(request: Request, completion: Completion) -> bool:
    """Whether a completion has a stop token or all allowed tokens, and was not stopped by a `Cutoff`."""
    return completion.finish_reason == "stop" or len(completion.token_ids) == request.sampling.max_new_tokens


def continued(before: Completion, request: Request, new: Completion, length: int) -> Completion:
    """Append the first ``length`` tokens of a request's completion to the tokens of earlier steps."""
    whole = ended(request, new) and len(new.token_ids) <= length
    tokens, logprobs = new.token_ids[:length], new.logprobs[:length]
    return Completion(
        token_ids=np.concatenate([before.token_ids, tokens]),
        logprobs=np.concatenate([before.logprobs, logprobs]),
        finish_reason=new.finish_reason if whole else "cut",
        cached_tokens=new.cached_tokens,
        ages=np.concatenate([ages_of(before), np.zeros(len(tokens), np.int32)]),
    )
