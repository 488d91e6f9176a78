"""From a batch of prompts to a Rollout: requests with their keys, the engine, decoded texts."""

import time
from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import NonFiniteError
from tpu_grpo.types import Completion, Prompt, PromptBatch, Request, Rollout, SampleKey, SamplingParams

EVALUATION_SAMPLE = 2**31
"""Sample number of the first answer of an evaluation; training counts its samples from 0 and never gets there."""
PROBE_SAMPLE = EVALUATION_SAMPLE - 1
TEXTS_SAMPLE = EVALUATION_SAMPLE - 2
"""Sample numbers of requests that are neither."""


def sampling_params(config: RunConfig) -> SamplingParams:
    """How a run draws its training completions."""
    rollout = config.rollout
    return SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


class Generates(Protocol):
    """One engine, or all replicas of a run."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """A completion for every request, in their order."""
        ...

    def forget_prefixes(self) -> None:
        """Drop every cached key and value."""
        ...


class Sampler:
    """Samples completions of prompts with engines whose weights someone else keeps up to date."""

    def __init__(self, engine: Generates, tokenizer: PreTrainedTokenizerFast, config: RunConfig):
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = config.run.seed
        self._group_size = config.algorithm.group_size
        self._sampling = sampling_params(config)

    def rollout(self, batch: PromptBatch) -> Rollout:
        """Sample a group of completions for every prompt of a step.

        What evaluations or probes left in the cache is dropped before: it would change in which chunks prompts are
        computed, and with them the last bits, so that a run's numbers depended on when it was evaluated or continued.

        Raises:
            NonFiniteError: if a log-probability is not finite: the weights, or the computation, are broken.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        requests = [
            Request(prompt.token_ids, self._sampling, SampleKey(self._seed, batch.step, p, g))
            for p, prompt in enumerate(batch.prompts)
            for g in range(self._group_size)
        ]
        completions = self._generate(requests, f"step {batch.step}")
        seconds = time.perf_counter() - start
        return Rollout(batch, self._group_size, completions, self._texts(completions), seconds)

    def answer(self, prompts: Sequence[Prompt], *, temperature: float, samples: int = 1) -> Rollout:
        """Completions of prompts for an evaluation: greedy at 0, else with keys that are the same every time.

        What is in the cache is dropped before, so that the same weights give the same answers whatever was sampled
        before: in the run, in a run that continues, or from a checkpoint.
        """
        start = time.perf_counter()
        self._engine.forget_prefixes()
        sampling = SamplingParams(self._sampling.max_new_tokens, temperature)
        requests = [
            Request(prompt.token_ids, sampling, SampleKey(self._seed, 0, index, EVALUATION_SAMPLE + sample))
            for index, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        completions = self._generate(requests, "an evaluation")
        seconds = time.perf_counter() - start
        return Rollout(PromptBatch(0, tuple(prompts)), samples, completions, self._texts(completions), seconds)

    def _generate(self, requests: Sequence[Request], what: str) -> tuple[Completion, ...]:
        completions = tuple(self._engine.generate(requests))
        for row, completion in enumerate(completions):
            if not all(-float("inf") < value <= 0 for value in completion.logprobs):
                raise NonFiniteError(
                    f"the engine's log-probabilities must be finite and at most 0, row {row} of {what} has "
                    f"{completion.logprobs.tolist()}; look at the weights last synced and at model.dtype"
                )
        return completions

    def _texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        return tuple(self._tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions)
