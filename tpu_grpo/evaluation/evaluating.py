"""Completes held-out prompts and says how good the completions are.

There are P problems, n samples of each, and G completions of each in a rollout (1 or n), in B = P*G rows. For each
reward, over the problems that it applies to:

    greedy   the mean of one greedy completion
    sampled  the mean over problems of the mean of n samples
    pass@k   whether k samples hold a correct one: value >= correct_from
    maj@k    whether the most frequent answer of the first k samples is correct
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import EvaluationSection
from tpu_grpo.evaluation.answers import final_answer
from tpu_grpo.evaluation.statistics import Estimate, majority, over_problems, pass_at_k
from tpu_grpo.observe.metrics.values import tokens_digest
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Rollout, Scores

GREEDY, SAMPLED = "greedy", "sampled"


GroupEnded = Callable[[int, Sequence[Completion], Sequence[str]], None]
"""Is told a prompt's number, its completions in one mode and their texts, while others are sampled."""


class Generate(Protocol):
    """Completes prompts; the same prompts get the same completions every time."""

    def __call__(
        self, prompts: Sequence[Prompt], modes: Sequence[AnswerMode], ended: Sequence[GroupEnded]
    ) -> Sequence[Rollout]:
        """Return a rollout for every mode, with a prompt's completions after each other.

        What has ended for each mode is told to one of ``ended``.
        """
        ...


class Scoring(Protocol):
    """Scores rollouts of the same prompts."""

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Begin to score a prompt's completions of one rollout."""
        ...

    def finish(self, rollouts: Sequence[Rollout]) -> Sequence[Scores]:
        """Return every reward's value of every row of each rollout."""
        ...


Begin = Callable[[PromptBatch, int], AbstractContextManager[Scoring]]
"""Begins to score so many rollouts of a batch of prompts."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Says how prompts are sampled beside the greedy completions, and what is counted."""

    temperature: float
    samples: int = 1
    """How many completions of each prompt are sampled."""
    k: tuple[int, ...] = ()
    """Every k for which pass@k and maj@k are estimated; at most ``samples``."""
    correct_from: float = 1.0
    """The least value of a reward at which a completion counts as correct."""
    answer_pattern: re.Pattern[str] | None = None
    """Where the answer stands that a vote counts; see ``final_answer``."""

    @classmethod
    def of(cls, section: EvaluationSection, rollout_temperature: float) -> Self:
        """Take the settings from the config; a temperature that is unset is that of the rollout.

        Raises:
            ConfigError: for a pattern that is no regular expression.
        """
        try:
            pattern = None if section.answer_pattern is None else re.compile(section.answer_pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"evaluation.answer_pattern must be a regular expression, got {section.answer_pattern!r} ({error})"
            ) from error
        temperature = rollout_temperature if section.temperature is None else section.temperature
        return cls(temperature, section.samples, section.every_k, section.correct_from, pattern)


@dataclass(frozen=True)
class Evaluation:
    """Says how good the policy was after ``step`` steps."""

    step: int
    estimates: Mapping[str, Mapping[str, Estimate]]
    """Maps mode (greedy, sampled, pass@k, maj@k) and reward to the estimate."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the mean tokens of a completion."""
    truncated: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the share of completions that were cut at rollout.max_new_tokens."""
    digest: str = ""
    """The SHA-256 (hex) of all sampled tokens."""
    failed: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the share of conversations whose environment failed; empty without environments."""

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """Map mode and reward to the mean."""
        return {mode: {name: e.value for name, e in found.items()} for mode, found in self.estimates.items()}

    def metrics(self) -> dict[str, float]:
        """Name the means ``evaluation/<mode>/<reward>``, and the rest ``evaluation/tokens|truncated|failed/<mode>``."""
        return {
            **{f"evaluation/{mode}/{name}": v for mode, means in self.means.items() for name, v in means.items()},
            **{f"evaluation/tokens/{mode}": value for mode, value in self.tokens.items()},
            **{f"evaluation/truncated/{mode}": value for mode, value in self.truncated.items()},
            **{f"evaluation/failed/{mode}": value for mode, value in self.failed.items()},
        }


@dataclass(frozen=True)
class EvaluationSamples:
    """Holds all completions of one mode with what was found about them; B rows, those of a problem after each other."""

    mode: str
    """``GREEDY`` or ``SAMPLED``."""
    rollout: Rollout
    scores: Scores
    final_answers: tuple[str | None, ...]
    """What a vote counts of each row; None where a completion gives no answer."""


def evaluate(
    generate: Generate, begin: Begin, prompts: Sequence[Prompt], settings: EvaluationSettings, *, step: int
) -> tuple[Evaluation, tuple[EvaluationSamples, EvaluationSamples]]:
    """Complete every prompt once greedily and ``settings.samples`` times sampled, and score all.

    A reward that applies nowhere is left out, as are problems that it does not apply to.

    Returns:
        The estimates, and the greedy and the sampled completions they are of.
    """
    modes = (AnswerMode(0.0), AnswerMode(settings.temperature, settings.samples))
    with begin(PromptBatch(0, tuple(prompts)), len(modes)) as scoring:
        rollouts = generate(prompts, modes, [partial(scoring.add, rollout=number) for number in range(len(modes))])
        scores = scoring.finish(rollouts)
    both = (_samples(GREEDY, rollouts[0], scores[0], settings), _samples(SAMPLED, rollouts[1], scores[1], settings))
    completions = {of_mode.mode: of_mode.rollout.completions for of_mode in both}
    evaluation = Evaluation(
        step,
        estimates=_estimates(both, settings),
        tokens={mode: float(np.mean([c.sampled_tokens for c in found])) for mode, found in completions.items()},
        truncated={
            mode: float(np.mean([c.finish_reason == "length" for c in found])) for mode, found in completions.items()
        },
        failed={mode: share for mode, found in completions.items() if (share := _failed(found)) is not None},
        digest=tokens_digest([c for found in completions.values() for c in found]),
    )
    return evaluation, both


def _failed(completions: Sequence[Completion]) -> float | None:
    """Return the share of conversations whose environment failed; None if there is no conversation."""
    failures = [c.episode.failure is not None for c in completions if c.episode is not None]
    return float(np.mean(failures)) if failures else None


def _samples(mode: str, rollout: Rollout, scores: Scores, settings: EvaluationSettings) -> EvaluationSamples:
    said = zip(rollout.completions, rollout.texts, strict=True)
    texts = (text if c.episode is None else c.episode.last_words for c, text in said)
    answers = tuple(final_answer(text, settings.answer_pattern) for text in texts)
    return EvaluationSamples(mode, rollout, scores, answers)


def _estimates(
    samples_by_mode: Sequence[EvaluationSamples], settings: EvaluationSettings
) -> dict[str, dict[str, Estimate]]:
    """Average every reward in every mode over the problems that it applies to."""
    estimates: dict[str, dict[str, Estimate]] = {}
    for samples in samples_by_mode:
        problems = len(samples.rollout.batch.prompts)
        votes_PG = np.array(samples.final_answers, dtype=object).reshape(problems, -1)
        for name, values_B in samples.scores.by_name.items():
            values_PG = values_B.reshape(problems, -1)
            found = {samples.mode: _means(values_PG)}
            if samples.mode == SAMPLED:
                found |= {f"pass@{k}": _pass(values_PG, settings, k) for k in settings.k}
                found |= {f"maj@{k}": _majority(values_PG, votes_PG, settings, k) for k in settings.k}
            for mode, values_P in found.items():
                if len(values_P):
                    estimates.setdefault(mode, {})[name] = over_problems(np.array(values_P))
    return estimates


def _known(values_PG: Float[np.ndarray, "P G"], least: int = 1) -> list[np.ndarray]:
    """List per problem the values of rows that the reward applies to, for problems with at least ``least`` of them."""
    known = [values_G[~np.isnan(values_G)] for values_G in values_PG]
    return [values for values in known if len(values) >= least]


def _means(values_PG: Float[np.ndarray, "P G"]) -> list[float]:
    return [float(np.mean(values)) for values in _known(values_PG)]


def _pass(values_PG: Float[np.ndarray, "P G"], settings: EvaluationSettings, k: int) -> list[float]:
    return [pass_at_k(len(v), int((v >= settings.correct_from).sum()), k) for v in _known(values_PG, k)]


def _majority(
    values_PG: Float[np.ndarray, "P G"], votes_PG: np.ndarray, settings: EvaluationSettings, k: int
) -> list[float]:
    """Vote per problem over the first k rows that the reward applies to; problems with fewer are left out."""
    found = []
    for values_G, votes_G in zip(values_PG, votes_PG, strict=True):
        rows = np.flatnonzero(~np.isnan(values_G))[:k]
        if len(rows) == k:
            found.append(majority(list(votes_G[rows]), list(values_G[rows] >= settings.correct_from)))
    return found


def describe(evaluation: Evaluation, prompts: int) -> str:
    """Describe on one line: ``held out (512 prompts) after step 0: greedy exact_answer 0.291 [0.253, 0.332]; ...``."""
    shown = [
        f"{mode} " + ", ".join(f"{name} {estimate}" for name, estimate in estimates.items())
        for mode, estimates in evaluation.estimates.items()
    ]
    lengths = [f"tokens {' / '.join(f'{value:.1f}' for value in evaluation.tokens.values())}"]
    shares = [f"{value:.1%}" for value in evaluation.failed.values()]
    failed = [f"environments failed {' / '.join(shares)}"] if any(evaluation.failed.values()) else []
    return f"held out ({prompts} prompts) after step {evaluation.step}: " + "; ".join([*shown, *lengths, *failed])
