"""The rollout stage: it turns a batch of prompts into requests, then into completions and their decoded texts.

    sampler = Sampler(replicas, tokenizer, config.rollout, config.algorithm, config.run.seed)
    rollout = sampler.rollout(batch)                        # for training
    rollouts = sampler.answer(prompts, modes)               # for an evaluation

A log-probability that is not finite or is above 0 means that the weights or the computation are broken. Nothing is
learnt from such a rollout.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
from jaxtyping import Bool
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import AlgorithmSection, RolloutSection
from tpu_grpo.engine.partial_rollouts import NEW, Cutoff, PartialGroup, continued
from tpu_grpo.engine.replicas import Finished, Replicas
from tpu_grpo.engine.turns import OpenConversations
from tpu_grpo.models.tokenizers import decode
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.short_texts import SHORT_REPR
from tpu_grpo.records.stages import (
    AnswerMode,
    Completion,
    Prompt,
    PromptBatch,
    Request,
    Rollout,
    SampleKey,
    SamplingParams,
)

EVALUATION_SAMPLE = 2**31
"""The sample number, in ``SampleKey``, of an evaluation's first completion. Training uses smaller numbers, from 0."""
PROBE_SAMPLE = EVALUATION_SAMPLE - 1
TEXTS_SAMPLE = EVALUATION_SAMPLE - 2
"""The sample numbers of requests that belong to neither training nor evaluation."""
GroupEnded = Callable[[int, Sequence[Completion], Sequence[str]], None]
"""Called with the index of a prompt, its completions and their texts; both are in the order of the samples."""


def sampling_params(rollout: RolloutSection) -> SamplingParams:
    """Return the sampling settings of a run's training completions."""
    return SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


def completion_text(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> str:
    """Return the text of all tokens after the prompt, including an environment's answers, without special tokens."""
    return decode(tokenizer, completion.conversation_ids, skip_special_tokens=True)


@dataclass(frozen=True)
class SampledGroups:
    """Groups after a partial rollout, which may have left some of them unfinished."""

    groups: tuple[PartialGroup, ...]
    length: int
    """The most new tokens of a row in this step: the L of partial_rollouts.py."""
    dropped: int
    """The number of tokens that were sampled beyond ``length``, and dropped."""
    seconds: float
    figures: Mapping[str, float]
    """Metrics of the engines of the first replica's host, by name."""
    reporting_hosts: tuple[int, ...] = ()
    """For each group the host that passed it to ``ended``; empty without that callback."""


def impossible(completion: Completion) -> Bool[np.ndarray, " T"]:
    """Mark the sampled tokens whose log-probability is not finite, or above 0."""
    bad_T = ~(np.isfinite(completion.logprobs) & (completion.logprobs <= 0.0))
    return bad_T if completion.sampled is None else bad_T & completion.sampled


class Sampler:
    """Samples completions of prompts. The caller must keep the engines' weights up to date.

    If completions are conversations with environments, ``converse`` opens the conversations of a batch. The sampler
    closes these once the batch is sampled or sampling fails.
    """

    def __init__(
        self,
        engines: Replicas,
        tokenizer: PreTrainedTokenizerFast,
        rollout: RolloutSection,
        algorithm: AlgorithmSection,
        seed: int,
        converse: OpenConversations | None = None,
    ):
        self._engines = engines
        self._tokenizer = tokenizer
        self._converse = converse
        self._seed = seed
        self._group_size = algorithm.group_size
        self._sampling = sampling_params(rollout)
        self._return_experts = algorithm.replays_routing

    def rollout(
        self, batch: PromptBatch, ended: GroupEnded | None = None, known: Sequence[float | None] | None = None
    ) -> Rollout:
        """Sample a group of completions for every prompt of a step.

        ``ended`` is called once for every prompt, when all completions of the prompt have been sampled. This happens
        during the rollout, on one of the hosts that sampled them, on the calling thread. ``ended`` should return
        quickly, because that host's engines wait for it. An exception in ``ended`` ends the run, because the engines
        are in the middle of a generation.

        ``known`` has the expected mean number of tokens of each prompt's completions (None: unknown). The longest
        groups start first. Tokens do not depend on ``known``, but the last bits of log-probabilities may.

        The prefix cache is emptied first. Prefixes from an evaluation or a probe would change the chunks in which
        prompts are prefilled, and thereby the last bits of log-probabilities. A run's numbers would then depend on when
        the run was evaluated.

        Raises:
            NonFiniteError: if a log-probability is not finite or is above 0, so that weights or computation must be
                broken.
        """
        size = self._group_size
        requests = [
            Request(prompt.token_ids, self._sampling, SampleKey(self._seed, batch.step, p, g), self._return_experts)
            for p, prompt in enumerate(batch.prompts, start=batch.round * len(batch.prompts))
            for g in range(size)
        ]
        asked = [prompt for prompt in batch.prompts for _ in range(size)]
        rows = None if known is None else [value for value in known for _ in range(size)]
        sampled = self._sample(batch.step, asked, requests, [size] * len(batch.prompts), ended, rows)
        return Rollout(batch, size, *sampled, self._engines.figures, tuple(self._engines.reporting_hosts[::size]))

    def go_on(
        self,
        step: int,
        groups: Sequence[PartialGroup],
        wanted: int,
        due: Collection[int],
        known: Sequence[float | None],
        ended: GroupEnded | None = None,
    ) -> Callable[[], SampledGroups]:
        """Sample until ``wanted`` groups are whole, including all groups with the indices ``due``.

        This host's engines sample now. The returned function exchanges the completions between all hosts.

        ``known`` has the expected mean number of tokens of each group's completions (None: unknown). ``ended`` is
        called as in ``rollout``; then all groups must be new, and ``wanted`` their number. The returned function raises
        NonFiniteError as ``rollout`` does.
        """
        asked = [
            (number, row, completion)
            for number, group in enumerate(groups)
            for row, completion in enumerate(group.completions)
            if completion.finish_reason == "cut"
        ]
        requests, expected, members = [], [], [list[int]() for _ in groups]
        for index, (number, row, before) in enumerate(asked):
            group, done, length = groups[number], len(before.token_ids), known[number]
            limits = replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - done)
            key = SampleKey(self._seed, group.step, group.number, row)
            ids = (*group.prompt.token_ids, *before.token_ids.tolist())
            requests.append(Request(ids, limits, key, self._return_experts))
            expected.append(None if length is None else max(1.0, length - done))
            members[number].append(index)
        make_cut, prompts = partial(Cutoff, members, wanted, due), [groups[number].prompt for number, _, _ in asked]
        cuts, exchange = make_cut if wanted < len(groups) else None, None
        if make_cut().length is None:  # else nothing has to be sampled
            finished = None if ended is None else _Groups([len(own) for own in members], self._text, ended).finished
            exchange = self._sample_here(prompts, requests, finished, expected, cuts)

        def collect() -> SampledGroups:
            new = [] if exchange is None else exchange()
            self._refuse_broken(step, prompts, new)
            found = make_cut()  # gets the completions of all hosts
            for index, (request, completion) in enumerate(zip(requests, new, strict=bool(new))):
                found.add(index, request, completion, whole=cuts is None)
            length = found.length
            assert length is not None, "every group ends, so enough of them do"
            rows = [list(group.completions) for group in groups]
            for (number, row, before), request, completion in zip(asked, requests, new, strict=bool(new)):
                is_whole = cuts is None and before is NEW
                rows[number][row] = completion if is_whole else continued(before, request, completion, length)
            return SampledGroups(
                groups=tuple(replace(group, completions=tuple(own)) for group, own in zip(groups, rows, strict=True)),
                length=length,
                dropped=sum(max(0, len(completion.token_ids) - length) for completion in new),
                seconds=0.0 if exchange is None else self._engines.seconds,
                figures={} if exchange is None else self._engines.figures,
                reporting_hosts=() if ended is None else tuple(self._engines.reporting_hosts[:: self._group_size]),
            )

        return collect

    def answer(
        self, prompts: Sequence[Prompt], modes: Sequence[AnswerMode], ended: Sequence[GroupEnded] = ()
    ) -> tuple[Rollout, ...]:
        """Sample an evaluation's completions in every mode, with random keys that are the same in all evaluations.

        All modes are sampled in one batch, so that each prompt is prefilled once, and the few long completions of one
        mode do not leave engines idle. The prefix cache is emptied first, so that equal weights give equal completions
        whatever was sampled before: in a run, in a continued run, or in an evaluation of a checkpoint.

        ``ended`` has one callback per mode, called as ``rollout`` calls its ``ended``.
        """
        count = len(prompts)
        requests = [
            Request(
                prompt.token_ids,
                SamplingParams(self._sampling.max_new_tokens, mode.temperature),
                SampleKey(self._seed, 0, index, EVALUATION_SAMPLE + sample),
            )
            for mode in modes
            for index, prompt in enumerate(prompts)
            for sample in range(mode.samples)
        ]
        asked = [prompt for mode in modes for prompt in prompts for _ in range(mode.samples)]

        def pass_on(group: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
            if ended:
                ended[group // count](group % count, completions, texts)

        sizes = [mode.samples for mode in modes for _ in prompts]
        completions, texts, seconds = self._sample(0, asked, requests, sizes, pass_on)
        batch, answered, end = PromptBatch(0, tuple(prompts)), [], 0
        for mode in modes:
            rows, end = slice(end, end + count * mode.samples), end + count * mode.samples
            scoring_hosts = tuple(self._engines.reporting_hosts[rows][:: mode.samples])
            answered.append(
                Rollout(batch, mode.samples, completions[rows], texts[rows], seconds, scoring_hosts=scoring_hosts)
            )
        return tuple(answered)

    def _sample(
        self,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sizes: Sequence[int],
        ended: GroupEnded | None,
        known: Sequence[float | None] | None = None,
    ) -> tuple[tuple[Completion, ...], tuple[str, ...], float]:
        """Sample a completion, or a conversation, for every request; ``prompts`` has the prompt of each request.

        The prefix cache is emptied first. ``ended`` is called for each group; ``sizes`` has the number of rows of each.
        Raises the errors of ``rollout``.

        Returns the completions, their texts, and the seconds that sampling took.
        """
        start, groups = time.perf_counter(), _Groups(sizes, self._text, ended)
        completions = tuple(self._sample_here(prompts, requests, groups.finished, known)())
        self._refuse_broken(step, prompts, completions)
        seconds = time.perf_counter() - start
        return completions, groups.all_texts(completions), seconds

    def _sample_here(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        finished: Finished | None,
        known: Sequence[float | None] | None,
        make_cut: Callable[[], Cutoff] | None = None,
    ) -> Callable[[], list[Completion]]:
        """Sample this host's share with empty prefix caches, and with environments if there are any.

        ``prompts`` has the prompt of each request. Return a function with which all hosts exchange the completions.
        """
        self._engines.forget_prefixes()
        conversations = None if self._converse is None else self._converse(prompts, requests)
        try:
            return self._engines.begin(requests, finished, known, conversations, make_cut)
        finally:
            if conversations is not None:
                conversations.close()

    def _refuse_broken(self, step: int, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Raise NonFiniteError, with the first row whose log-probabilities are broken. ``step`` is 0 for an
        evaluation."""
        if not (rows := [row for row, completion in enumerate(completions) if impossible(completion).any()]):
            return
        row, completion, what = rows[0], completions[rows[0]], f"step {step}" if step else "an evaluation"
        place = int(np.argmax(impossible(completion)))
        others = f", and {len(rows) - 1} more rows have such ones" if len(rows) > 1 else ""
        raise NonFiniteError(
            f"the engine's log-probabilities must be finite and at most 0, got {completion.logprobs[place]} for token "
            f"{place} of row {row} of {what} (prompt {SHORT_REPR.repr(prompts[row].text)}, completion "
            f"{SHORT_REPR.repr(self._text(completion))}){others}; nothing was learnt from them. Continue from the last "
            "checkpoint with a lower optimizer.learning_rate or model.dtype=float32, which checkpoint.allow_changes "
            "must name; at a first step look at the model's weights"
        )

    def _text(self, completion: Completion) -> str:
        return completion_text(self._tokenizer, completion)


class _Groups:
    """Collects completions as they end, until a group is whole; each text is decoded once.

    With groups of 2, 2 and 3 rows, row 4 is the first of group 2.
    """

    def __init__(self, sizes: Sequence[int], decode: Callable[[Completion], str], ended: GroupEnded | None):
        self._starts = list(accumulate(sizes, initial=0))
        self._decode = decode
        self._ended = ended
        self._found: dict[int, dict[int, Completion]] = {}
        self._texts: dict[int, str] = {}
        """The texts of whole groups, by row."""

    def finished(self, row: int, completion: Completion) -> None:
        """Store a completion, and call ``ended`` if the completion's group is now whole."""
        number = bisect_right(self._starts, row) - 1
        start, end = self._starts[number], self._starts[number + 1]
        group = self._found.setdefault(number, {})
        group[row] = completion
        if len(group) < end - start:
            return
        completions = [group[row] for row in range(start, end)]
        texts = [self._decode(c) for c in completions]
        self._texts |= enumerate(texts, start)
        if self._ended is not None:
            self._ended(number, completions, texts)

    def all_texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        """Return the texts of all rows."""
        known = self._texts
        return tuple(known[row] if row in known else self._decode(c) for row, c in enumerate(completions))
