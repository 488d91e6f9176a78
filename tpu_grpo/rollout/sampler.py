"""The rollout stage: it turns a batch of prompts into requests with keys, completions and decoded texts."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import NonFiniteError
from tpu_grpo.rollout.generation import Finished
from tpu_grpo.types import AnswerMode, Completion, Prompt, PromptBatch, Request, Rollout, SampleKey, SamplingParams

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


class CompletionEngine(Protocol):
    """Serves requests: one Engine, or all Replicas of a run."""

    figures: Mapping[str, float]
    """What the last ``generate`` took, under the metrics' names."""

    def generate(self, requests: Sequence[Request], finished: Finished | None = None) -> list[Completion]:
        """Return a completion for every request, in their order, and call ``finished`` for each as it ends."""
        ...

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values."""
        ...


class Sampler:
    """Samples completions of prompts. Somebody else keeps the weights of its engine up to date."""

    def __init__(self, engine: CompletionEngine, tokenizer: PreTrainedTokenizerFast, config: RunConfig):
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = config.run.seed
        self._group_size = config.algorithm.group_size
        self._sampling = sampling_params(config)
        self._return_experts = config.algorithm.routing_replay

    def rollout(self, batch: PromptBatch, ended: GroupEnded = nobody) -> Rollout:
        """Sample a group of completions for every prompt of a step.

        ``ended`` is called in the middle of the rollout, on the calling thread, once for every prompt whose completions
        have all been sampled: on the one host whose engine sampled them. It should take little time, because that
        host's engines wait for it, and it must not raise, because the other hosts would wait for this one.

        The cache is emptied first. What an evaluation or a probe left in it would change the chunks in which prompts
        are prefilled and thereby the last bits, so that a run's numbers would depend on when it was evaluated.

        Raises:
            NonFiniteError: if a log-probability is not finite, which means that weights or computation are broken.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        requests = [
            Request(prompt.token_ids, self._sampling, SampleKey(self._seed, batch.step, p, g), self._return_experts)
            for p, prompt in enumerate(batch.prompts)
            for g in range(self._group_size)
        ]
        groups = _Groups(self._group_size, self._text, ended)
        completions = self._generate(requests, f"step {batch.step}", groups.finished)
        seconds, known = time.perf_counter() - start, groups.texts
        texts = tuple(known[row] if row in known else self._text(c) for row, c in enumerate(completions))
        return Rollout(batch, self._group_size, completions, texts, seconds, self._engine.figures)

    def answer(self, prompts: Sequence[Prompt], modes: Sequence[AnswerMode]) -> tuple[Rollout, ...]:
        """Sample completions for an evaluation in every mode, with keys that are the same every time.

        All modes are sampled at once, so that a prompt is prefilled once, and the few long completions of one mode do
        not leave engines idle. The cache is emptied first, so that the same weights give the same answers whatever was
        sampled before: during the run, after it was continued, or from a checkpoint.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        requests = [self._answers(prompt, index, mode) for mode in modes for index, prompt in enumerate(prompts)]
        completions = self._generate([request for group in requests for request in group], "an evaluation")
        seconds, batch, answered = time.perf_counter() - start, PromptBatch(0, tuple(prompts)), []
        for mode in modes:
            rows, completions = completions[: len(prompts) * mode.samples], completions[len(prompts) * mode.samples :]
            answered.append(Rollout(batch, mode.samples, rows, self._texts(rows), seconds))
        return tuple(answered)

    def _answers(self, prompt: Prompt, index: int, mode: AnswerMode) -> list[Request]:
        sampling = SamplingParams(self._sampling.max_new_tokens, mode.temperature)
        keys = (SampleKey(self._seed, 0, index, EVALUATION_SAMPLE + sample) for sample in range(mode.samples))
        return [Request(prompt.token_ids, sampling, key) for key in keys]

    def _generate(
        self, requests: Sequence[Request], what: str, finished: Finished | None = None
    ) -> tuple[Completion, ...]:
        completions = tuple(self._engine.generate(requests, finished))
        for row, completion in enumerate(completions):
            if not all(-float("inf") < value <= 0 for value in completion.logprobs):
                raise NonFiniteError(
                    f"the engine's log-probabilities must be finite and at most 0, row {row} of {what} has "
                    f"{completion.logprobs.tolist()}; look at the weights last synced and at model.dtype"
                )
        return completions

    def _texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        return tuple(map(self._text, completions))

    def _text(self, completion: Completion) -> str:
        return self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)


class _Groups:
    """Collects the completions of a step as they end, until a group is whole; each text is decoded once."""

    def __init__(self, group_size: int, decode: Callable[[Completion], str], ended: GroupEnded):
        self._group_size = group_size
        self._decode = decode
        self._ended = ended
        self._found: dict[int, dict[int, Completion]] = {}
        self.texts: dict[int, str] = {}
        """The texts of whole groups, by row."""

    def finished(self, row: int, completion: Completion) -> None:
        """Take a completion, and pass its group on if it was the last one."""
        prompt, sample = divmod(row, self._group_size)
        group = self._found.setdefault(prompt, {})
        group[sample] = completion
        if len(group) < self._group_size:
            return
        completions = [group[g] for g in range(self._group_size)]
        texts = [self._decode(c) for c in completions]
        self.texts |= enumerate(texts, prompt * self._group_size)
        self._ended(prompt, completions, texts)
