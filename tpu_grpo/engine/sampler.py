"""The rollout stage: it turns a batch of prompts into requests with keys, completions and decoded texts."""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.broken import BrokenRollout, KeepBroken, impossible
from tpu_grpo.engine.conversing import Conversations, OpenConversations
from tpu_grpo.engine.generation import Finished
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
"""The sample number of an evaluation's first answer. Training counts samples from 0 and never gets this far."""
PROBE_SAMPLE = EVALUATION_SAMPLE - 1
TEXTS_SAMPLE = EVALUATION_SAMPLE - 2
"""The sample numbers of requests that belong to neither training nor evaluation."""
GroupEnded = Callable[[int, Sequence[Completion], Sequence[str]], None]
"""Is told the number of a prompt, its completions and their texts, both in the order of the samples."""


def nobody(prompt: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
    """Take no notice of a group that has ended."""


def sampling_params(config: RunConfig) -> SamplingParams:
    """Return the settings with which a run samples its training completions."""
    rollout = config.rollout
    return SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


def completion_text(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> str:
    """Return the text of all tokens after the prompt, those of an environment's answers too; no special tokens."""
    return tokenizer.decode(completion.said_ids, skip_special_tokens=True)


class CompletionEngine(Protocol):
    """Serves requests: the Replicas of a run."""

    figures: Mapping[str, float]
    """What the last ``generate`` took, under the metrics' names."""
    told: Sequence[int]
    """The host that was told of the end of each request of the last ``generate``."""

    def generate(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        known: Sequence[float | None] | None = None,
        conversations: Conversations | None = None,
    ) -> list[Completion]:
        """Return a completion for every request, in their order, and call ``finished`` for each as it ends.

        ``known`` are the tokens that are expected of each request, where something is known. With ``conversations`` the
        completions are whole conversations.
        """
        ...

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values."""
        ...


class Sampler:
    """Samples completions of prompts. Somebody else keeps the weights of its engine up to date.

    Args:
        engine: serves the requests.
        tokenizer: the run's.
        config: the run's; of it seed, group size and settings of sampling are used.
        converse: opens the conversations of a batch, if completions are conversations with environments. They are
            closed when the batch is sampled, and when sampling fails.
    """

    def __init__(
        self,
        engine: CompletionEngine,
        tokenizer: PreTrainedTokenizerFast,
        config: RunConfig,
        converse: OpenConversations | None = None,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._converse = converse
        self._seed = config.run.seed
        self._group_size = config.algorithm.group_size
        self._sampling = sampling_params(config)
        self._return_experts = config.algorithm.routing_replay
        self._keep: KeepBroken | None = None

    def keep_broken(self, keep: KeepBroken) -> None:
        """Have rollouts kept in which a log-probability is not finite."""
        self._keep = keep

    def rollout(
        self, batch: PromptBatch, ended: GroupEnded = nobody, known: Sequence[float | None] | None = None
    ) -> Rollout:
        """Sample a group of completions for every prompt of a step.

        ``ended`` is called in the middle of the rollout, on the calling thread, once for every prompt whose completions
        have all been sampled: on one host, of those whose engine sampled them. It should take little time, because that
        host's engines wait for it. What it raises ends the run: the engines are then in the middle of their work.

        ``known`` are the mean tokens of a completion that are expected of each prompt, where something is known.
        Prompts with long answers are started first. No token depends on it; the last bits of log-probabilities may.

        The cache is emptied first. What an evaluation or a probe left in it would change the chunks in which prompts
        are prefilled and thereby the last bits, so that a run's numbers would depend on when it was evaluated.

        Raises:
            NonFiniteError: if a log-probability is not finite, which means that weights or computation are broken. The
                rollout is kept first, see ``keep_broken``.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        requests = [
            Request(prompt.token_ids, self._sampling, SampleKey(self._seed, batch.step, p, g), self._return_experts)
            for p, prompt in enumerate(batch.prompts, start=batch.round * len(batch.prompts))
            for g in range(self._group_size)
        ]
        groups = _Groups([self._group_size] * len(batch.prompts), self._text, ended)
        rows = None if known is None else [value for value in known for _ in range(self._group_size)]
        asked = [p for p in batch.prompts for _ in range(self._group_size)]
        completions = self._generate(asked, requests, groups.finished, rows)
        self._check(batch.step, asked, completions)
        seconds, texts, told = time.perf_counter() - start, groups.all_texts(completions), self._engine.told
        told = tuple(told[:: self._group_size])
        return Rollout(batch, self._group_size, completions, texts, seconds, self._engine.figures, told)

    def answer(
        self, prompts: Sequence[Prompt], modes: Sequence[AnswerMode], ended: Sequence[GroupEnded] = ()
    ) -> tuple[Rollout, ...]:
        """Sample completions for an evaluation in every mode, with keys that are the same every time.

        All modes are sampled at once, so that a prompt is prefilled once, and the few long completions of one mode do
        not leave engines idle. The cache is emptied first, so that the same weights give the same answers whatever was
        sampled before: during the run, after it was continued, or from a checkpoint.

        ``ended`` has a function for every mode, which is called as that of ``rollout``.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        requests = [self._answers(prompt, index, mode) for mode in modes for index, prompt in enumerate(prompts)]
        count = len(prompts)

        def pass_on(group: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
            if ended:
                ended[group // count](group % count, completions, texts)

        groups = _Groups([len(group) for group in requests], self._text, pass_on)
        asked = [prompt for mode in modes for prompt in prompts for _ in range(mode.samples)]
        completions = self._generate(asked, [request for group in requests for request in group], groups.finished)
        self._check(0, asked, completions)
        seconds, batch, answered = time.perf_counter() - start, PromptBatch(0, tuple(prompts)), []
        texts, told, first = groups.all_texts(completions), self._engine.told, 0
        for mode in modes:
            rows, first = slice(first, first + count * mode.samples), first + count * mode.samples
            hosts = tuple(told[rows][:: mode.samples])
            answered.append(Rollout(batch, mode.samples, completions[rows], texts[rows], seconds, told=hosts))
        return tuple(answered)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        finished: Finished,
        known: Sequence[float | None] | None = None,
    ) -> tuple[Completion, ...]:
        """Sample a completion for every request, or have a conversation; ``prompts`` are those of the requests."""
        if self._converse is None:
            return tuple(self._engine.generate(requests, finished, known))
        conversations = self._converse(prompts, requests)
        try:
            return tuple(self._engine.generate(requests, finished, known, conversations))
        finally:
            conversations.close()

    def _answers(self, prompt: Prompt, index: int, mode: AnswerMode) -> list[Request]:
        sampling = SamplingParams(self._sampling.max_new_tokens, mode.temperature)
        keys = (SampleKey(self._seed, 0, index, EVALUATION_SAMPLE + sample) for sample in range(mode.samples))
        return [Request(prompt.token_ids, sampling, key) for key in keys]

    def _check(self, step: int, prompts: Sequence[Prompt], completions: tuple[Completion, ...]) -> None:
        """See that all log-probabilities can be, or keep what was sampled and raise what says so."""
        if any(impossible(completion).any() for completion in completions):
            texts = tuple(self._text(completion) for completion in completions)
            broken = BrokenRollout(step, tuple(prompts), completions, texts)
            raise broken.error(self._keep(broken) if self._keep else None)

    def _text(self, completion: Completion) -> str:
        return completion_text(self._tokenizer, completion)


class _Groups:
    """Collects completions as they end, until a group is whole; each text is decoded once.

    With groups of 2, 2 and 3 rows, row 4 is the first of group 2.
    """

    def __init__(self, sizes: Sequence[int], decode: Callable[[Completion], str], ended: GroupEnded):
        self._starts = list(accumulate(sizes, initial=0))
        self._decode = decode
        self._ended = ended
        self._found: dict[int, dict[int, Completion]] = {}
        self._texts: dict[int, str] = {}
        """The texts of whole groups, by row."""

    def finished(self, row: int, completion: Completion) -> None:
        """Take a completion, and pass its group on if it was the last one."""
        number = bisect_right(self._starts, row) - 1
        start, end = self._starts[number], self._starts[number + 1]
        group = self._found.setdefault(number, {})
        group[row] = completion
        if len(group) < end - start:
            return
        completions = [group[row] for row in range(start, end)]
        texts = [self._decode(c) for c in completions]
        self._texts |= enumerate(texts, start)
        self._ended(number, completions, texts)

    def all_texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        """Return the texts of all rows."""
        known = self._texts
        return tuple(known[row] if row in known else self._decode(c) for row, c in enumerate(completions))
