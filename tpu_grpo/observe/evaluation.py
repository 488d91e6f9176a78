"""Completes held-out prompts and says how good the completions are, with which certainty, and which step was the best.

There are P problems, n samples of each, and G completions of each in a rollout (1 or n), in B = P*G rows. For each
reward, over the problems that it applies to:

    greedy   the mean of one greedy completion
    sampled  the mean over problems of the mean of n samples
    pass@k   whether k samples hold a correct one: value >= correct_from
    maj@k    whether the most frequent answer of the first k samples is correct

Everything is an average over problems, of which each counts once; samples of one problem are not independent of each
other, so 95 % intervals are over problems (Miller 2024, arXiv 2411.00640, sections 2 and 3).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import EvaluationSection
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.json_lines import (
    encode_line,
    jsonable,
    keep_steps,
    read_steps,
    replace_bytes,
    write_json,
)
from tpu_grpo.observe.run_files import BEST_FILE, EVALUATION_FILE, EVALUATIONS_DIR
from tpu_grpo.observe.sample_rows import conversation_fields, none_if_nan
from tpu_grpo.observe.step_metrics import tokens_digest
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Rollout, Scores

GREEDY, SAMPLED = "greedy", "sampled"
Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


# --- what is handed in -----------------------------------------------------------------------------------------------


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
FinalAnswer = Callable[[str, re.Pattern[str] | None], str | None]
"""Finds the answer that a vote counts in a text, by ``answer_pattern`` if there is one; None if the text has none."""


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


# --- an evaluation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over problems with its 95 % interval; low and high are NaN where a single problem tells none."""

    value: float
    low: float
    high: float
    problems: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


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
        rest = {"tokens": self.tokens, "truncated": self.truncated, "failed": self.failed}
        return {
            f"evaluation/{first}/{second}": value
            for first, values in {**self.means, **rest}.items()
            for second, value in values.items()
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
    generate: Generate,
    begin: Begin,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    final_answer: FinalAnswer,
    *,
    step: int,
) -> tuple[Evaluation, tuple[EvaluationSamples, EvaluationSamples]]:
    """Complete every prompt once greedily and ``settings.samples`` times sampled, and score all.

    A reward that applies nowhere is left out, as are problems that it does not apply to.

    Returns:
        The estimates, and the greedy and the sampled completions they are of.
    """

    def samples_of(mode: str, rollout: Rollout, scores: Scores) -> EvaluationSamples:
        said = zip(rollout.completions, rollout.texts, strict=True)
        texts = (text if c.episode is None else c.episode.last_words for c, text in said)
        answers = tuple(final_answer(text, settings.answer_pattern) for text in texts)
        return EvaluationSamples(mode, rollout, scores, answers)

    modes = (AnswerMode(0.0), AnswerMode(settings.temperature, settings.samples))
    with begin(PromptBatch(0, tuple(prompts)), len(modes)) as scoring:
        rollouts = generate(prompts, modes, [partial(scoring.add, rollout=number) for number in range(len(modes))])
        scores = scoring.finish(rollouts)
    both = (samples_of(GREEDY, rollouts[0], scores[0]), samples_of(SAMPLED, rollouts[1], scores[1]))
    tokens, truncated, failed = dict[str, float](), dict[str, float](), dict[str, float]()
    for samples in both:
        completions = samples.rollout.completions
        tokens[samples.mode] = float(np.mean([c.sampled_tokens for c in completions]))
        truncated[samples.mode] = float(np.mean([c.finish_reason == "length" for c in completions]))
        if failures := [c.episode.failure is not None for c in completions if c.episode is not None]:
            failed[samples.mode] = float(np.mean(failures))
    digest = tokens_digest([c for samples in both for c in samples.rollout.completions])
    return Evaluation(step, _estimates(both, settings), tokens, truncated, digest, failed), both


def _estimates(
    samples_by_mode: Sequence[EvaluationSamples], settings: EvaluationSettings
) -> dict[str, dict[str, Estimate]]:
    """Average every reward in every mode over the problems that it applies to."""
    estimates: dict[str, dict[str, Estimate]] = {}
    for samples in samples_by_mode:
        problems = len(samples.rollout.batch.prompts)
        votes_PG = np.array(samples.final_answers, dtype=object).reshape(problems, -1)
        for name, values_B in samples.scores.by_name.items():
            # of each problem the values and votes of the rows that the reward applies to
            found = [
                (values_G[applies_G], votes_G[applies_G])
                for values_G, votes_G in zip(values_B.reshape(problems, -1), votes_PG, strict=True)
                if (applies_G := ~np.isnan(values_G)).any()
            ]
            by_mode = {samples.mode: [float(np.mean(values)) for values, _ in found]}
            right = [(values >= settings.correct_from, votes) for values, votes in found]
            every_k = settings.k if samples.mode == SAMPLED else ()
            for k in every_k:
                by_mode[f"pass@{k}"] = [pass_at_k(len(r), int(r.sum()), k) for r, _ in right if len(r) >= k]
            for k in every_k:
                by_mode[f"maj@{k}"] = [majority(list(v[:k]), list(r[:k])) for r, v in right if len(r) >= k]
            for mode, values_P in by_mode.items():
                if values_P:
                    estimates.setdefault(mode, {})[name] = over_problems(np.array(values_P))
    return estimates


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


# --- statistics ------------------------------------------------------------------------------------------------------


def over_problems(values_P: Float[np.ndarray, " P"]) -> Estimate:
    """Average one value per problem; the interval is Wilson's where all are 0 or 1, else a normal distribution's."""
    count, mean = len(values_P), float(np.mean(values_P))
    if np.isin(values_P, (0.0, 1.0)).all():
        return Estimate(mean, *wilson(int(values_P.sum()), count), count)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, count)
    half = Z * float(np.std(values_P, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Compute a proportion's score interval (Wilson 1927, JASA 22, p. 209), within [0, 1] and not empty at its ends."""
    centre = (successes + Z**2 / 2) / (count + Z**2)
    half = Z * math.sqrt(successes * (count - successes) / count + Z**2 / 4) / (count + Z**2)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the chance that k samples of a problem hold a correct one, from its ``samples`` ones.

    The chance for k of them that are drawn without replacement is 1 - C(n - c, k) / C(n, k), computed as a product
    (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    Of 4 samples with 1 correct: pass@1 = 1/4, pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2, pass@4 = 1.

    Raises:
        ValueError: for a k below 1 or above the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be from 1 to the number of samples, {samples}, got {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - correct + 1, samples + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Say how right the most frequent answer is, which is maj@k of k samples; 0 if none of them has an answer.

    Answers that are equally frequent count in equal parts, as if one of them were drawn; samples that gave the same
    answer and were judged differently count by their mean.
    For the answers 7 7 4 4 -, of which 7 is correct, it is 1/2.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = Counter(answer for answer, good in zip(answers, correct, strict=True) if good)
    winners = [answer for answer, count in votes.items() if count == most]
    return float(sum(Fraction(right[answer], most) for answer in winners) / len(winners))


# --- files -----------------------------------------------------------------------------------------------------------


class EvaluationLog:
    """Remembers the evaluations of a run, the same on every host; host 0 keeps the files.

    ``evaluation.jsonl`` has a line per evaluation, and is continued when a run is; ``best.json`` names the best step.

    Args:
        run_dir: the run's directory.
        start_step: steps already done; evaluations of later ones, and all of a fresh start, are dropped.
        best: the mode/reward that the best step is the highest of.
        hosts: every one of them makes a log.
    """

    def __init__(self, run_dir: Path, start_step: int, best: str, hosts: Hosts):
        self._directory = run_dir
        self._hosts = hosts
        self._mode, _, self._reward = best.partition("/")
        lines: list[dict[str, Any]] = []
        if hosts.is_first:
            path = run_dir / EVALUATION_FILE
            keep_steps(path, start_step or -1)  # a fresh start keeps none
            lines = list(read_steps(path))
        lines = json.loads(hosts.broadcast("the evaluations so far", json.dumps(lines).encode()))
        self.done = [evaluation_of(line) for line in lines]

    def add(self, evaluation: Evaluation) -> None:
        """Remember an evaluation, and which one is now the best."""
        self.done.append(evaluation)
        if not self._hosts.is_first:
            return
        with (self._directory / EVALUATION_FILE).open("ab") as file:
            file.write(encode_line(record_of(evaluation)))
        if (best := self._best()) is not None:
            write_json(self._directory / BEST_FILE, best)

    @property
    def best_step(self) -> int | None:
        """The step of the evaluation with the highest value, the first of equal ones; None if none has the value."""
        return None if (best := self._best()) is None else best["step"]

    def summary(self) -> dict[str, Any]:
        """Return the first and the last evaluation and the best step, as summary.json has them."""
        if not self.done:
            return {}
        return {
            "evaluation/before": self.done[0].means,
            "evaluation/after": self.done[-1].means,
            "evaluation/intervals": record_of(self.done[-1])["intervals"],
            **({} if (best := self._best()) is None else {"evaluation/best": best}),
        }

    def _best(self) -> dict[str, Any] | None:
        """Describe the best evaluation as ``best.json`` does."""
        known = [(e.step, e.estimates.get(self._mode, {}).get(self._reward)) for e in self.done]
        values = [(step, estimate) for step, estimate in known if estimate is not None]
        if not values:
            return None
        step, estimate = max(values, key=lambda pair: pair[1].value)
        of = f"{self._mode}/{self._reward}"
        return jsonable({"step": step, "of": of, "value": estimate.value, "interval": _interval(estimate)})


def _interval(estimate: Estimate) -> list[float]:
    return [estimate.low, estimate.high, estimate.problems]


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """Make a line of evaluation.jsonl."""
    intervals = {
        f"{mode}/{name}": _interval(e) for mode, found in evaluation.estimates.items() for name, e in found.items()
    }
    return {"step": evaluation.step, **evaluation.metrics(), "intervals": intervals, "digest": evaluation.digest}


def evaluation_of(record: dict[str, Any]) -> Evaluation:
    """Read the evaluation back from a line of evaluation.jsonl, written by this version or one before it."""
    estimates: dict[str, dict[str, Estimate]] = {}
    lengths: dict[str, dict[str, float]] = {"tokens": {}, "truncated": {}, "failed": {}}
    intervals = record.get("intervals", {})
    for name, value in record.items():
        if not name.startswith("evaluation/"):
            continue
        _, mode, rest = name.split("/", 2)
        if mode in lengths:
            lengths[mode][rest] = value
        else:
            low, high, problems = intervals.get(f"{mode}/{rest}", (None, None, 0))
            low, high = (math.nan if bound is None else bound for bound in (low, high))
            estimates.setdefault(mode, {})[rest] = Estimate(value, low, high, problems)
    return Evaluation(record["step"], estimates, **lengths, digest=record.get("digest", ""))


def write_samples(run_dir: Path, name: str, samples: Sequence[EvaluationSamples]) -> Path:
    """Write all completions with their rewards to ``evaluations/<name>.jsonl``, as a whole or not at all.

    A line holds problem (from 0), mode, sample (from 0), prompt, completion, the answer that votes count, the right
    one (gold) where the record has it, rewards by name (null where one does not apply), tokens and finish_reason; of a
    conversation also what `conversation_fields` returns.

    Returns:
        Where they are.
    """
    path = run_dir / EVALUATIONS_DIR / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, (encode_line(record) for of_mode in samples for record in _sample_records(of_mode)))
    return path


def _sample_records(samples: EvaluationSamples) -> Iterator[dict[str, Any]]:
    rollout = samples.rollout
    for row, (prompt, completion) in enumerate(zip(rollout.row_prompts, rollout.completions, strict=True)):
        yield {
            "problem": row // rollout.group_size,
            "mode": samples.mode,
            "sample": row % rollout.group_size,
            "prompt": prompt.text if completion.episode is None else completion.episode.prompt,
            "completion": rollout.texts[row],
            "answer": samples.final_answers[row],
            **({} if prompt.gold is None else {"gold": prompt.gold}),
            "rewards": {name: none_if_nan(values_B[row]) for name, values_B in samples.scores.by_name.items()},
            "tokens": completion.sampled_tokens,
            "finish_reason": completion.finish_reason,
            **conversation_fields(completion),
        }
