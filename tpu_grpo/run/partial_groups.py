"""Keeps the groups that a step did not finish, or did not use, for the next step (``rollout.partial_extra``).

    partial = PartialGroups(..., stream, learner.carried)   # empty, or as of the checkpoint that was restored
    partial.begin(draw.next(step, partial.room))            # until P (1 + rollout.partial_extra) groups are open
    collect = sampler.go_on(step, partial.groups, ...)
    rollout = partial.take(step, collect(), tokenizer)    # the first P complete groups, oldest first
    partial.end(used=P)                                   # the tokens of open groups are one step older now

With ``algorithm.staleness`` 1, ``begin`` to ``take`` of step k + 1 run after ``end`` of step k, during its update.
``hold`` adds the groups of step k + 1 to checkpoint k, so that a run continued from it need not sample them again.

A checkpoint holds the groups as they were after its step, as JSON. A group that does not fit the run any more, because
settings were changed (checkpoint.allow_changes), is dropped.
"""

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_grpo.config import AlgorithmSection, DataSection, EnvironmentSection, RolloutSection
from tpu_grpo.data.stream import PromptStream
from tpu_grpo.engine.exchange import decode_completions, encode_completions
from tpu_grpo.engine.partial_rollouts import NEW, PartialGroup, ages_of
from tpu_grpo.engine.sampler import SampledGroups, completion_text
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout


class PartialGroups:
    """The open groups of a run, which are begun and not yet learned from, in the order in which they were begun."""

    def __init__(
        self,
        data: DataSection,
        rollout: RolloutSection,
        algorithm: AlgorithmSection,
        environment: EnvironmentSection,
        stream: PromptStream,
        saved: Any,
    ):
        self._data, self._rollout, self._algorithm, self._environment = data, rollout, algorithm, environment
        self.groups: tuple[PartialGroup, ...] = () if saved is None else groups_of(saved, stream, self._fit)
        """The open groups at this point of the step."""
        length, dropped = (0, 0) if saved is None else saved["sampled"]
        self._figures: tuple[int, int] = length, dropped  # of this step's sampling so far
        self._ended = self.groups, (0, 0)  # the figures are those of ``hold``
        self._taken, self._sampled = list[PartialGroup](), list[SampledGroups]()

    @property
    def room(self) -> int:
        """The number of groups to begin, so that P(1 + rollout.partial_extra) groups are open."""
        return max(0, self._data.prompts_with(self._rollout.partial_extra) - len(self.groups))

    def begin(self, batch: PromptBatch) -> None:
        """Open a group for each prompt of a batch."""
        begun = [group.number for group in (*self.groups, *self._taken) if group.step == batch.step]
        prompts = zip(batch.prompts, batch.records, batch.positions, strict=True)
        self.groups += tuple(
            PartialGroup(prompt, record, position, batch.step, number, (NEW,) * self._algorithm.group_size)
            for number, (prompt, record, position) in enumerate(prompts, start=max(begun, default=-1) + 1)
        )

    def due(self, step: int) -> list[int]:
        """List the indices of the groups that this step has to finish."""
        most = self._rollout.partial_steps
        return [number for number, group in enumerate(self.groups) if step - group.step >= most]

    def batch(self, step: int, groups: Sequence[PartialGroup]) -> PromptBatch:
        """Return the prompts of some groups as a batch of the step's current round."""
        return PromptBatch(
            step,
            tuple(group.prompt for group in groups),
            tuple(group.record for group in groups),
            tuple(group.position for group in groups),
            len(self._sampled),
        )

    def take(self, step: int, sampled: SampledGroups, tokenizer: Any) -> Rollout:
        """Return the first P complete groups of ``sampled`` as the rollout to score; keep the other groups."""
        wanted = self._data.prompts_per_step
        whole = [group for group in sampled.groups if group.is_whole][:wanted]
        taken = {(group.step, group.number) for group in whole}
        self.groups = tuple(group for group in sampled.groups if (group.step, group.number) not in taken)
        batch = self.batch(step, whole)
        self._taken += whole
        self._sampled.append(sampled)
        self._figures = self._figures[0] + sampled.length, self._figures[1] + sampled.dropped
        completions = tuple(completion for group in whole for completion in group.completions)
        texts = tuple(completion_text(tokenizer, completion) for completion in completions)
        size = self._algorithm.group_size
        return Rollout(batch, size, completions, texts, sampled.seconds, sampled.figures, sampled.reporting_hosts)

    def hold(self) -> None:
        """Let the next checkpoint hold the groups that ``take`` returned, in their order, and then the other groups."""
        self._ended = (*self._taken, *self.groups), self._figures

    def end(self, used: int) -> dict[str, float]:
        """End a step that used the first ``used`` of the taken groups; later steps take the rest again.

        Returns the tokens sampled per second and, with rollout.partial_extra, the metrics ``partial/*``, such as the
        ages of tokens in used groups.
        """
        open_groups = sorted((*self._taken[used:], *self.groups), key=lambda group: (group.step, group.number))
        rows = [completion for group in (*self._taken, *self.groups) for completion in group.completions]
        new = [(ages_of(c) == 0) & (True if c.sampled is None else c.sampled) for c in rows]
        seconds = sum(sampled.seconds for sampled in self._sampled)
        metrics = {"rollout/tokens_per_second": sum(int(mask.sum()) for mask in new) / seconds if seconds else math.nan}
        if self._rollout.partial_extra:
            ages = [ages_of(completion) for group in self._taken[:used] for completion in group.completions]
            of_tokens, oldest = np.concatenate(ages), np.array([of_row.max(initial=0) for of_row in ages])
            length, dropped = self._figures
            metrics |= {
                "partial/length": length,
                "partial/length_saved": max(0, max(map(len, ages)) - length),
                "partial/dropped_tokens": dropped,
                "partial/open_groups": len(open_groups),
                "partial/open_tokens": sum(len(c.token_ids) for group in open_groups for c in group.completions),
                "partial/rows_age_1": float((oldest == 1).mean()),
                "partial/rows_age_2_up": float((oldest > 1).mean()),
                "partial/tokens_age_1": float((of_tokens == 1).mean()),
                "partial/tokens_age_2_up": float((of_tokens > 1).mean()),
            }
        self.groups = tuple(group.older() for group in open_groups)
        self._ended, self._figures = (self.groups, (0, 0)), (0, 0)
        self._taken, self._sampled = [], []
        return metrics

    def saved(self) -> dict[str, Any]:
        """Return the groups as they were when the last finished step ended, as JSON for a checkpoint."""
        return written(*self._ended)

    def _fit(self, completions: Sequence[Completion]) -> bool:
        """Whether a run with these settings can have sampled the completions of a group."""
        talks, replays = self._environment.is_on, self._algorithm.replays_routing
        return len(completions) == self._algorithm.group_size and all(
            len(c.token_ids) <= self._rollout.max_new_tokens
            and (c.episode is not None) == talks
            and (talks or (c.experts is not None) == replays)  # those of a conversation are in its branches
            for c in completions
        )


def written(groups: Sequence[PartialGroup], sampled: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Write groups, and the figures of their step, as JSON, with the bytes of their completions in base64."""
    completions = dict(enumerate(completion for group in groups for completion in group.completions))
    return {
        "groups": [[g.position, g.record, g.step, g.number, _sum_of(g.prompt)] for g in groups],
        "sampled": list(sampled),
        "completions": base64.b64encode(encode_completions(completions)).decode(),
    }


def groups_of(
    saved: Mapping[str, Any], stream: PromptStream, fit: Callable[[Sequence[Completion]], bool]
) -> tuple[PartialGroup, ...]:
    """Read the groups that ``written`` wrote; groups of other prompts, or whose completions do not ``fit`` the run, are
    left out."""
    found = decode_completions(base64.b64decode(saved["completions"]))
    size, groups = len(found) // max(1, len(saved["groups"])), list[PartialGroup]()
    for index, (*place, prompt_sum) in enumerate(saved["groups"]):
        position, record, step, number = place
        completions = tuple(found[row] for row in range(index * size, (index + 1) * size))
        if record >= stream.size or not fit(completions):
            continue
        if _sum_of(prompt := stream.prompt(record)) == prompt_sum:
            groups.append(PartialGroup(prompt, record, position, step, number, completions))
    return tuple(groups)


def _sum_of(prompt: Prompt) -> int:
    """Return a checksum of a prompt's tokens."""
    return zlib.crc32(np.array(prompt.token_ids, np.int64).tobytes())
