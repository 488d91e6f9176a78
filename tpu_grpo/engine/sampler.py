"""The rollout stage: it turns a batch of prompts into requests with keys, completions and decoded texts.

    sampler = Sampler(replicas, tokenizer, config)
    rollout = sampler.rollout(batch)                        # for training
    rollouts = sampler.answer(prompts, modes)               # for an evaluation

For people who wait for an answer, ``stream`` says after every launch of one engine how far its requests are:

    for answers in stream(engine, requests, cancelled=lambda: False):
        answers[0].token_ids            # the tokens of request 0 so far
        answers[0].completion           # and its completion, once it has ended

A log-probability that is not finite, or above 0, means that the weights or the computation are broken, and that
nothing can be learnt from the tokens: a `BrokenRollout`.
"""

import reprlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.dealing import expected_tokens, make_groups
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.generation import Finished, Partial
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.waves import OpenConversations
from tpu_grpo.records.errors import NonFiniteError
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
_SHORT = reprlib.Repr(maxstring=120)


def sampling_params(config: RunConfig) -> SamplingParams:
    """Return the settings with which a run samples its training completions."""
    rollout = config.rollout
    return SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


def completion_text(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> str:
    """Return the text of all tokens after the prompt, those of an environment's answers too; no special tokens."""
    return tokenizer.decode(completion.said_ids, skip_special_tokens=True)


@dataclass(frozen=True)
class BrokenRollout:
    """A BrokenRollout is all that was sampled together with such a completion."""

    step: int
    """The step that it was sampled for, and 0 for an evaluation."""
    prompts: tuple[Prompt, ...]
    """The prompt of each completion."""
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]

    @property
    def what(self) -> str:
        """Say what was sampled."""
        return f"step {self.step}" if self.step else "an evaluation"

    @property
    def rows(self) -> list[int]:
        """List the rows with such a log-probability."""
        return [row for row, completion in enumerate(self.completions) if impossible(completion).any()]

    def error(self, kept_in: Path | None) -> NonFiniteError:
        """Name the first such row with its prompt and completion, and where everything is kept."""
        row = self.rows[0]
        bad_T = impossible(self.completions[row])
        place = int(np.argmax(bad_T))
        others = f", and {len(self.rows) - 1} more rows have such ones" if len(self.rows) > 1 else ""
        kept = "" if kept_in is None else f". All rows are kept, with their tokens and log-probabilities: {kept_in}"
        return NonFiniteError(
            f"the engine's log-probabilities must be finite and at most 0, got "
            f"{self.completions[row].logprobs[place]} for token {place} of row {row} of {self.what} (prompt "
            f"{_SHORT.repr(self.prompts[row].text)}, completion {_SHORT.repr(self.texts[row])}){others}; nothing was "
            f"learnt from them{kept}. Continue from the last checkpoint with a lower optimizer.learning_rate or "
            "model.dtype=float32, which checkpoint.allow_changes must name; at a first step look at the model's weights"
        )


KeepBroken = Callable[[BrokenRollout], Path]
"""Keeps them in a file, on every host, and returns where."""


def impossible(completion: Completion) -> Bool[np.ndarray, " T"]:
    """Say which sampled tokens have a log-probability that is not finite, or above 0."""
    bad_T = ~(np.isfinite(completion.logprobs) & (completion.logprobs <= 0.0))
    return bad_T if completion.sampled is None else bad_T & completion.sampled


class Sampler:
    """Samples completions of prompts. Somebody else keeps the weights of its engines up to date.

    Args:
        engines: serve the requests.
        tokenizer: the run's.
        config: the run's; of it seed, group size and settings of sampling are used.
        converse: opens the conversations of a batch, if completions are conversations with environments. They are
            closed when the batch is sampled, and when sampling fails.
    """

    def __init__(
        self,
        engines: Replicas,
        tokenizer: PreTrainedTokenizerFast,
        config: RunConfig,
        converse: OpenConversations | None = None,
    ):
        self._engines = engines
        self._tokenizer = tokenizer
        self._converse = converse
        self._seed = config.run.seed
        self._group_size = config.algorithm.group_size
        self._sampling = sampling_params(config)
        self._return_experts = config.algorithm.routing_replay
        self.keep_broken: KeepBroken | None = None
        """Keeps rollouts in which a log-probability is not finite."""

    def rollout(
        self,
        batch: PromptBatch,
        ended: GroupEnded | None = None,
        known: Sequence[float | None] | None = None,
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
        self._engines.forget_prefixes()
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
        seconds, texts, told = time.perf_counter() - start, groups.all_texts(completions), self._engines.told
        told = tuple(told[:: self._group_size])
        return Rollout(batch, self._group_size, completions, texts, seconds, self._engines.figures, told)

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
        self._engines.forget_prefixes()
        requests = [
            [
                Request(
                    prompt.token_ids,
                    SamplingParams(self._sampling.max_new_tokens, mode.temperature),
                    SampleKey(self._seed, 0, index, EVALUATION_SAMPLE + sample),
                )
                for sample in range(mode.samples)
            ]
            for mode in modes
            for index, prompt in enumerate(prompts)
        ]
        count = len(prompts)

        def pass_on(group: int, completions: Sequence[Completion], texts: Sequence[str]) -> None:
            if ended:
                ended[group // count](group % count, completions, texts)

        groups = _Groups([len(group) for group in requests], self._text, pass_on)
        asked = [prompt for mode in modes for prompt in prompts for _ in range(mode.samples)]
        completions = self._generate(asked, [request for group in requests for request in group], groups.finished)
        self._check(0, asked, completions)
        seconds, batch, answered = time.perf_counter() - start, PromptBatch(0, tuple(prompts)), []
        texts, told, first = groups.all_texts(completions), self._engines.told, 0
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
            return tuple(self._engines.generate(requests, finished, known))
        conversations = self._converse(prompts, requests)
        try:
            return tuple(self._engines.generate(requests, finished, known, conversations))
        finally:
            conversations.close()

    def _check(self, step: int, prompts: Sequence[Prompt], completions: tuple[Completion, ...]) -> None:
        """See that all log-probabilities can be, or keep what was sampled and raise what says so."""
        if any(impossible(completion).any() for completion in completions):
            texts = tuple(self._text(completion) for completion in completions)
            broken = BrokenRollout(step, tuple(prompts), completions, texts)
            raise broken.error(self.keep_broken(broken) if self.keep_broken else None)

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
        if self._ended is not None:
            self._ended(number, completions, texts)

    def all_texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        """Return the texts of all rows."""
        known = self._texts
        return tuple(known[row] if row in known else self._decode(c) for row, c in enumerate(completions))


def stream(engine: Engine, requests: Sequence[Request], cancelled: Callable[[], bool]) -> Iterator[list[Partial]]:
    """Sample completions, and yield what there is of each, in the order of the requests, after every launch.

    A caller who closes the iterator ends the requests; the engine can be used again afterwards.

    Args:
        engine: has weights, and nothing else to do.
        requests: what to sample.
        cancelled: is asked before every launch; once it says yes, requests end with the tokens that they have.

    Raises:
        RequestError: if the engine can never serve one of them; none is started then.
        NonFiniteError: if a log-probability is not finite.
    """
    engine.check(requests)
    expected = expected_tokens(requests)
    generation, going = engine.begin(requests, expected), True
    generation.hold(make_groups(requests, expected))
    try:
        while going:
            if cancelled():
                generation.cancel()
            going = generation.advance()
            answers = [generation.partial(index) for index in range(len(requests))]
            if any(answer.completion is not None and impossible(answer.completion).any() for answer in answers):
                raise NonFiniteError(
                    "the log-probabilities of an answer must be finite and at most 0, got others: the model's weights "
                    "are broken, or their numbers too large for model.dtype; name another checkpoint"
                )
            yield answers
    except GeneratorExit:
        generation.cancel()
        while generation.advance():
            pass
        raise
