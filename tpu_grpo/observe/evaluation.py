"""Evaluates held-out prompts: completions, scores, confidence intervals, and the step with the best value.

There are P problems, and n = evaluation.samples samples of each. A rollout has G completions of each problem (1 if
greedy, else n) in B = P*G rows. Each reward is averaged over the problems that it applies to:

    greedy   the mean of one greedy completion
    sampled  the mean over problems of the mean of n samples
    pass@k   the chance that at least one of k samples is correct, which means a reward of at least 1
    maj@k    whether the most frequent answer of the first k samples is correct

Samples of one problem are not independent of each other. So averages and 95 % intervals are computed from one value
per problem (Miller 2024, arXiv 2411.00640, sections 2 and 3).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import EvaluationSection
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import BEST_FILE, EVALUATION_FILE, EVALUATIONS_DIR
from tpu_grpo.observe.sample_rows import conversation_fields, none_if_nan
from tpu_grpo.observe.step_metrics import tokens_digest
from tpu_grpo.records.json_files import encode_line, jsonable, keep_steps, read_steps, replace_bytes, write_json
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Rollout, Scores

GREEDY, SAMPLED = "greedy", "sampled"
Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


# --- arguments of an evaluation --------------------------------------------------------------------------------------


GroupEnded = Callable[[int, Sequence[Completion], Sequence[str]], None]
"""Called during sampling when a prompt's completions in one mode are finished: prompt's index, completions, texts."""


Generate = Callable[[Sequence[Prompt], Sequence[AnswerMode], Sequence[GroupEnded]], Sequence[Rollout]]
"""Takes prompts, modes, and a callback for each mode; returns a rollout for each mode, in which the completions of a
prompt are consecutive. With the same weights, the same prompts get the same completions."""


class Scoring(Protocol):
    """Scores several rollouts of one batch of prompts."""

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Begin to score a prompt's completions in one rollout; ``prompt`` and ``rollout`` are indices."""
        ...

    def finish(self, rollouts: Sequence[Rollout]) -> Sequence[Scores]:
        """Return the scores of each rollout."""
        ...


Begin = Callable[[PromptBatch, int], AbstractContextManager[Scoring]]
"""Takes prompts and the number of their rollouts; returns a context manager that yields the rollouts' `Scoring`."""
FinalAnswer = Callable[[str, str], str | None]
"""Takes a text and the prompt; returns the answer that maj@k counts, or None."""


# --- an evaluation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval.

    ``low`` and ``high`` are NaN if there is only one problem, and its value is neither 0 nor 1.
    """

    value: float
    low: float
    high: float
    problems: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation after ``step`` steps."""

    step: int
    estimates: Mapping[str, Mapping[str, Estimate]]
    """Maps mode (greedy, sampled, pass@k, maj@k) and reward to the estimate."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the mean tokens of a completion."""
    truncated: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the share of completions that were cut at rollout.max_new_tokens, or of conversations
    that were cut at a limit of tokens or turns."""
    digest: str = ""
    """The SHA-256 (hex) of all sampled tokens."""
    failed: Mapping[str, float] = field(default_factory=dict)
    """Maps greedy and sampled to the share of conversations whose environment failed; empty without environments."""

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """Map mode and reward to the mean."""
        return {mode: {name: e.value for name, e in found.items()} for mode, found in self.estimates.items()}

    def metrics(self) -> dict[str, float]:
        """Return means as ``evaluation/<mode>/<reward>``, and ``evaluation/tokens|truncated|failed/<mode>``."""
        rest = {"tokens": self.tokens, "truncated": self.truncated, "failed": self.failed}
        return {
            f"evaluation/{first}/{second}": value
            for first, values in {**self.means, **rest}.items()
            for second, value in values.items()
        }


@dataclass(frozen=True)
class EvaluationSamples:
    """The B completions of one mode, greedy or sampled, with their scores, ordered by problem."""

    mode: str
    """``GREEDY`` or ``SAMPLED``."""
    rollout: Rollout
    scores: Scores
    final_answers: tuple[str | None, ...]
    """The answer of each row, which maj@k counts; None if the completion gives no answer."""


def evaluate(
    generate: Generate,
    begin: Begin,
    prompts: Sequence[Prompt],
    section: EvaluationSection,
    temperature: float,
    final_answer: FinalAnswer,
    *,
    step: int,
) -> tuple[Evaluation, Sequence[EvaluationSamples]]:
    """Complete every prompt once greedily and ``section.samples`` times at a temperature, and score all.

    A reward that applies to no problem is left out. Returns the estimates, the greedy and the sampled completions.
    """
    modes = (AnswerMode(0.0), AnswerMode(temperature, section.samples))
    batch = PromptBatch(step, tuple(prompts))
    with begin(batch, len(modes)) as scoring:
        group_ended = [partial(scoring.add, rollout=number) for number in range(len(modes))]
        rollouts = [replace(rollout, batch=batch) for rollout in generate(prompts, modes, group_ended)]
        scores = scoring.finish(rollouts)
    samples: list[EvaluationSamples] = []
    tokens, truncated, failed = dict[str, float](), dict[str, float](), dict[str, float]()
    for mode, rollout, mode_scores in zip((GREEDY, SAMPLED), rollouts, scores, strict=True):
        completions = rollout.completions
        rows = zip(rollout.row_prompts, completions, rollout.texts, strict=True)
        answers = tuple(
            final_answer(text if c.episode is None else c.episode.last_words, prompt.text) for prompt, c, text in rows
        )
        samples.append(EvaluationSamples(mode, rollout, mode_scores, answers))
        tokens[mode] = float(np.mean([c.sampled_tokens for c in completions]))
        truncated[mode] = float(np.mean([c.finish_reason == "length" for c in completions]))
        if failures := [c.episode.failure is not None for c in completions if c.episode is not None]:
            failed[mode] = float(np.mean(failures))
    digest = tokens_digest([c for rollout in rollouts for c in rollout.completions])
    return Evaluation(step, _estimates(samples, section), tokens, truncated, digest, failed), samples


def _estimates(
    samples_by_mode: Sequence[EvaluationSamples], section: EvaluationSection
) -> dict[str, dict[str, Estimate]]:
    """Average every reward in every mode over the problems that it applies to."""
    estimates: dict[str, dict[str, Estimate]] = {}
    for samples in samples_by_mode:
        problems = len(samples.rollout.batch.prompts)
        votes_PG = np.array(samples.final_answers, dtype=object).reshape(problems, -1)
        for name, values_B in samples.scores.by_name.items():
            # for each problem, the values and votes of the rows to which the reward applies
            found = [
                (values_G[applies_G], votes_G[applies_G])
                for values_G, votes_G in zip(values_B.reshape(problems, -1), votes_PG, strict=True)
                if (applies_G := ~np.isnan(values_G)).any()
            ]
            by_mode = {samples.mode: [float(np.mean(values)) for values, _ in found]}
            right = [(values >= 1.0, votes) for values, votes in found]
            every_k = section.every_k if samples.mode == SAMPLED else ()
            for k in every_k:
                by_mode[f"pass@{k}"] = [pass_at_k(len(r), int(r.sum()), k) for r, _ in right if len(r) >= k]
            for k in every_k:
                by_mode[f"maj@{k}"] = [majority(list(v[:k]), list(r[:k])) for r, v in right if len(r) >= k]
            for mode, values_P in by_mode.items():
                if values_P:
                    estimates.setdefault(mode, {})[name] = over_problems(np.array(values_P))
    return estimates


def describe(evaluation: Evaluation, prompts: int) -> str:
    """Return one line: ``held out (512 prompts) after step 0: greedy exact_answer 0.291 [0.253, 0.332]; ...``."""
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
    """Average one value per problem. The interval is Wilson's if all values are 0 or 1, else ± Z standard errors."""
    count, mean = len(values_P), float(np.mean(values_P))
    if np.isin(values_P, (0.0, 1.0)).all():
        return Estimate(mean, *wilson(int(values_P.sum()), count), count)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, count)
    half = Z * float(np.std(values_P, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion (1927, JASA 22, p. 209), which is in [0, 1] and never empty."""
    centre = (successes + Z**2 / 2) / (count + Z**2)
    half = Z * math.sqrt(successes * (count - successes) / count + Z**2 / 4) / (count + Z**2)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is correct, from n ``samples`` of which c are ``correct``.

    The unbiased estimate is 1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without replacement,
    include a correct one (Chen et al. 2021, arXiv 2107.03374, eq. 1). It is computed as a product.
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
    """Return the score of the most frequent answer, which is maj@k for k samples; 0 if none of them has an answer.

    If several answers are most frequent, their scores are averaged. If samples with the same answer differ in
    ``correct``, the answer's score is their mean. For the answers 7 7 4 4 None, of which 7 is right, the result is 1/2.
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
    """The evaluations of a run, the same on every host; host 0 writes the files.

    ``evaluation.jsonl`` has a line per evaluation; a run that continues appends to it. ``best.json`` names the step
    with the highest value of ``best``, such as ``greedy/exact_answer``. ``start_step`` is the number of completed
    steps. Evaluations after later steps are dropped; if ``start_step`` is 0, all are dropped.
    """

    def __init__(self, run_dir: Path, start_step: int, best: str, hosts: Hosts):
        self._directory = run_dir
        self._hosts = hosts
        self._mode, _, self._reward = best.partition("/")
        done: list[Evaluation] = []
        if hosts.is_first:
            path = run_dir / EVALUATION_FILE
            keep_steps(path, start_step or -1)  # a run that begins at step 0 keeps no evaluation
            done = [evaluation_of(line) for line in read_steps(path)]
        self.done: list[Evaluation] = hosts.broadcast("the evaluations so far", done, list[Evaluation])
        if hosts.is_first:
            self._write_best()  # it may have been that of an evaluation which is dropped

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation, and update the best step."""
        self.done.append(evaluation)
        if not self._hosts.is_first:
            return
        with (self._directory / EVALUATION_FILE).open("ab") as file:
            file.write(encode_line(record_of(evaluation)))
        self._write_best()

    def _write_best(self) -> None:
        if (best := self._best()) is None:
            (self._directory / BEST_FILE).unlink(missing_ok=True)
        else:
            write_json(self._directory / BEST_FILE, best)

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, the first if several are equal; None if none has the metric ``best``."""
        return None if (best := self._best()) is None else best["step"]

    def summary(self) -> dict[str, Any]:
        """Return the first and the last evaluation and the best step, as fields of summary.json."""
        if not self.done:
            return {}
        return {
            "evaluation/before": self.done[0].means,
            "evaluation/after": self.done[-1].means,
            "evaluation/intervals": record_of(self.done[-1])["intervals"],
            **({} if (best := self._best()) is None else {"evaluation/best": best}),
        }

    def _best(self) -> dict[str, Any] | None:
        """Return the content of ``best.json``; None if no evaluation has the metric ``best``."""
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
    """Return an evaluation as a record of evaluation.jsonl."""
    intervals = {
        f"{mode}/{name}": _interval(e) for mode, found in evaluation.estimates.items() for name, e in found.items()
    }
    return {"step": evaluation.step, **evaluation.metrics(), "intervals": intervals, "digest": evaluation.digest}


def evaluation_of(record: dict[str, Any]) -> Evaluation:
    """Parse an evaluation from a line of evaluation.jsonl, written by this or an earlier version."""
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
    """Write all completions with their rewards to ``evaluations/<name>.jsonl`` atomically, and return the path.

    A line holds problem (from 0), mode, sample (from 0), prompt, completion, the answer that maj@k counts, the right
    answer (gold) if the record has one, rewards by name (null if one does not apply), tokens and finish_reason. For a
    conversation the line also holds the `conversation_fields`.
    """
    path = run_dir / EVALUATIONS_DIR / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, (encode_line(record) for of_mode in samples for record in sample_records(of_mode)))
    return path


def sample_records(samples: EvaluationSamples) -> Iterator[dict[str, Any]]:
    """Yield the lines of `write_samples` for one mode."""
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
