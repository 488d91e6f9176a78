"""Answer held-out prompts and say how good they are.

P problems, n samples of each, G completions in a rollout (1 or n). Per reward, over problems that it applies to:

    greedy   the mean of one greedy answer
    sampled  the mean over problems of the mean of n samples
    pass@k   whether k samples hold a correct one: value >= correct_from
    maj@k    whether the most frequent answer of the first k samples is correct
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import EvaluationSection
from tpu_grpo.errors import ConfigError
from tpu_grpo.evaluation.answers import final_answer
from tpu_grpo.evaluation.statistics import Estimate, majority, over_problems, pass_at_k
from tpu_grpo.metrics.values import tokens_digest
from tpu_grpo.types import Prompt, Rollout, Scores

GREEDY, SAMPLED = "greedy", "sampled"


class Answers(Protocol):
    """Answers prompts, n times each, greedily at temperature 0; the same every time it is asked."""

    def __call__(self, prompts: Sequence[Prompt], *, temperature: float, samples: int = 1) -> Rollout:
        """Completions, ``samples`` of a prompt after each other."""
        ...


Scorer = Callable[[Rollout], Scores]
"""Every reward's value of every row."""


@dataclass(frozen=True)
class Plan:
    """What an evaluation does beside the greedy answers."""

    temperature: float
    samples: int = 1
    k: tuple[int, ...] = ()
    correct_from: float = 1.0
    answer_pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, section: EvaluationSection, rollout_temperature: float) -> Self:
        """What the config says.

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
    """How good the policy was after ``step`` steps."""

    step: int
    estimates: Mapping[str, Mapping[str, Estimate]]
    """mode (greedy, sampled, pass@k, maj@k) -> reward -> estimate."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """greedy, sampled -> mean tokens of a completion."""
    truncated: Mapping[str, float] = field(default_factory=dict)
    """greedy, sampled -> share of completions cut at rollout.max_new_tokens."""
    digest: str = ""
    """sha256 of all sampled tokens."""

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """mode -> reward -> mean."""
        return {mode: {name: e.value for name, e in found.items()} for mode, found in self.estimates.items()}

    def metrics(self) -> dict[str, float]:
        """``evaluation/<mode>/<reward>``, ``evaluation/tokens/<mode>`` and ``evaluation/truncated/<mode>``."""
        return {
            **{f"evaluation/{mode}/{name}": v for mode, means in self.means.items() for name, v in means.items()},
            **{f"evaluation/tokens/{mode}": value for mode, value in self.tokens.items()},
            **{f"evaluation/truncated/{mode}": value for mode, value in self.truncated.items()},
        }


@dataclass(frozen=True)
class Answered:
    """Completions of one mode with their rewards, of which the samples are kept."""

    mode: str
    rollout: Rollout
    scores: Scores
    answers: tuple[str | None, ...]
    """What a vote would count, per row."""


def evaluate(
    answer: Answers,
    score: Scorer,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    step: int,
    display_names: Mapping[str, str],
) -> tuple[Evaluation, tuple[Answered, Answered]]:
    """Answer every prompt once greedily and ``plan.samples`` times sampled, and score all.

    A reward that applies nowhere is left out, as are problems that it does not apply to.
    """
    answered = (
        _answered(GREEDY, answer(prompts, temperature=0.0), score, plan),
        _answered(SAMPLED, answer(prompts, temperature=plan.temperature, samples=plan.samples), score, plan),
    )
    estimates: dict[str, dict[str, Estimate]] = {}
    for part in answered:
        votes_PG = np.array(part.answers, dtype=object).reshape(len(prompts), -1)
        for name, values_B in part.scores.by_name.items():
            values_PG = values_B.reshape(len(prompts), -1)
            found = {part.mode: _means(values_PG)}
            if part.mode == SAMPLED:
                found |= {f"pass@{k}": _pass(values_PG, plan, k) for k in plan.k}
                found |= {f"maj@{k}": _majority(values_PG, votes_PG, plan, k) for k in plan.k}
            for mode, values_P in found.items():
                if len(values_P):
                    estimates.setdefault(mode, {})[display_names[name]] = over_problems(np.array(values_P))
    lengths = {part.mode: [len(c.token_ids) for c in part.rollout.completions] for part in answered}
    cut = {part.mode: [c.finish_reason == "length" for c in part.rollout.completions] for part in answered}
    evaluation = Evaluation(
        step,
        estimates,
        tokens={mode: float(np.mean(counts)) for mode, counts in lengths.items()},
        truncated={mode: float(np.mean(flags)) for mode, flags in cut.items()},
        digest=tokens_digest([c for part in answered for c in part.rollout.completions]),
    )
    return evaluation, answered


def _answered(mode: str, rollout: Rollout, score: Scorer, plan: Plan) -> Answered:
    answers = tuple(final_answer(text, plan.answer_pattern) for text in rollout.texts)
    return Answered(mode, rollout, score(rollout), answers)


def _known(values_PG: Float[np.ndarray, "P G"], least: int = 1) -> list[np.ndarray]:
    """Per problem the values of rows the reward applies to, for problems with at least ``least`` of them."""
    known = [values_G[~np.isnan(values_G)] for values_G in values_PG]
    return [values for values in known if len(values) >= least]


def _means(values_PG: Float[np.ndarray, "P G"]) -> list[float]:
    return [float(np.mean(values)) for values in _known(values_PG)]


def _pass(values_PG: Float[np.ndarray, "P G"], plan: Plan, k: int) -> list[float]:
    return [pass_at_k(len(v), int((v >= plan.correct_from).sum()), k) for v in _known(values_PG, k)]


def _majority(values_PG: Float[np.ndarray, "P G"], votes_PG: np.ndarray, plan: Plan, k: int) -> list[float]:
    found = []
    for values_G, votes_G in zip(values_PG, votes_PG, strict=True):
        rows = np.flatnonzero(~np.isnan(values_G))[:k]
        if len(rows) == k:
            found.append(majority(list(votes_G[rows]), list(values_G[rows] >= plan.correct_from)))
    return found


def describe(evaluation: Evaluation, prompts: int) -> str:
    """One line: ``held out (512 prompts) after step 0: greedy exact_answer 0.291 [0.253, 0.332]; ...``."""
    shown = [
        f"{mode} " + ", ".join(f"{name} {estimate}" for name, estimate in estimates.items())
        for mode, estimates in evaluation.estimates.items()
    ]
    lengths = [f"tokens {' / '.join(f'{value:.1f}' for value in evaluation.tokens.values())}"]
    return f"held out ({prompts} prompts) after step {evaluation.step}: " + "; ".join([*shown, *lengths])
