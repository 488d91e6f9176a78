"""Estimates from a fake policy and fake rewards, worked out by hand."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.config import EvaluationSection
from tpu_grpo.evaluation import (
    Estimate,
    Evaluation,
    EvaluationSamples,
    EvaluationSettings,
    describe,
    evaluate,
    write_samples,
)
from tpu_grpo.evaluation.evaluating import GroupEnded
from tpu_grpo.evaluation.statistics import wilson
from tpu_grpo.observe.metrics.values import tokens_digest
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Rollout, Scores

NAN = float("nan")
PROMPTS = (Prompt("1+1=", (1,)), Prompt("2+2=", (2,)), Prompt("3+3=", (3,)))


class Policy:
    """Answers with its temperature, or what it is told to, and remembers when it was asked what."""

    def __init__(self, calls: list[tuple[str, object]], sampled: Sequence[str] = ()):
        self.calls = calls
        self.sampled = tuple(sampled)

    def answer(
        self, prompts: Sequence[Prompt], modes: Sequence[AnswerMode], ended: Sequence[GroupEnded] = ()
    ) -> list[Rollout]:
        """The last prompt ends first."""
        rollouts = [self._answer(prompts, mode.temperature, mode.samples) for mode in modes]
        for tell, rollout in zip(ended, rollouts, strict=True):
            size = rollout.group_size
            for p in reversed(range(len(prompts))):
                rows = slice(p * size, (p + 1) * size)
                tell(p, rollout.completions[rows], rollout.texts[rows])
        return rollouts

    def _answer(self, prompts: Sequence[Prompt], temperature: float, samples: int) -> Rollout:
        self.calls.append(("answer", (tuple(p.text for p in prompts), temperature, samples)))
        texts = tuple(f"{p.text}{temperature}" for p in prompts for _ in range(samples))
        texts = self.sampled if self.sampled and temperature else texts
        rows = tuple(
            Completion(np.arange(len(text), dtype=np.int32), np.zeros(1, np.float32), "stop", cached_tokens=0)
            for text in texts
        )
        rows = (replace(rows[0], finish_reason="length"), *rows[1:])
        return Rollout(PromptBatch(0, tuple(prompts)), samples, rows, texts, seconds=1.0)


class Scorer:
    """Gives rollouts these values by reward, and remembers when it was told what."""

    def __init__(self, calls: list[tuple[str, object]], *values: Mapping[str, Sequence[float]]):
        self.calls = calls
        self.values = values

    @contextmanager
    def begin(self, batch: PromptBatch, rollouts: int) -> Iterator["Scorer"]:
        self.calls.append(("begin", (tuple(p.text for p in batch.prompts), batch.step, rollouts)))
        yield self
        self.calls.append(("end", ()))

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        assert len(completions) == len(texts)
        self.calls.append(("add", (rollout, prompt, tuple(texts))))

    def finish(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        self.calls.append(("finish", tuple(rollout.texts for rollout in rollouts)))
        by_name = [{name: np.array(row, np.float64) for name, row in values.items()} for values in self.values]
        return [Scores(np.zeros(len(r.texts)), found, seconds=0.0) for r, found in zip(rollouts, by_name, strict=True)]


def evaluated(
    *values: Mapping[str, Sequence[float]],
    settings: EvaluationSettings = EvaluationSettings(0.7),  # noqa: B008
    sampled: Sequence[str] = (),
) -> tuple[Evaluation, tuple[EvaluationSamples, EvaluationSamples]]:
    calls: list[tuple[str, object]] = []
    return evaluate(Policy(calls, sampled).answer, Scorer(calls, *values).begin, PROMPTS, settings, step=4)


def test_every_prompt_is_answered_greedily_and_sampled_at_once_and_scored_meanwhile() -> None:
    calls: list[tuple[str, object]] = []
    scorer = Scorer(calls, {"r": [1, 0, 0]}, {"r": [1, 1, 0, 0, 1, 0]})
    evaluate(Policy(calls).answer, scorer.begin, PROMPTS, EvaluationSettings(0.7, samples=2), step=4)
    texts = ("1+1=", "2+2=", "3+3=")
    assert calls == [
        ("begin", (texts, 0, 2)),
        ("answer", (texts, 0.0, 1)),
        ("answer", (texts, 0.7, 2)),  # in the same rollout
        *[("add", (0, p, (f"{texts[p]}0.0",))) for p in (2, 1, 0)],
        *[("add", (1, p, (f"{texts[p]}0.7",) * 2)) for p in (2, 1, 0)],
        ("finish", (tuple(f"{text}0.0" for text in texts), tuple(f"{text}0.7" for text in texts for _ in range(2)))),
        ("end", ()),
    ]


def test_means_by_mode_and_reward() -> None:
    found, _ = evaluated(
        {"gsm8k": [1, 0, 0.5], "brevity": [3, -3, 6]},
        {"gsm8k": [0, 0, 0], "brevity": [1, 1, 1]},
    )
    assert found.step == 4
    assert found.means == {"greedy": {"gsm8k": 0.5, "brevity": 2.0}, "sampled": {"gsm8k": 0.0, "brevity": 1.0}}
    assert found.estimates["sampled"]["gsm8k"] == Estimate(0.0, *wilson(0, 3), 3)
    assert found.metrics() == {
        "evaluation/greedy/gsm8k": 0.5,
        "evaluation/greedy/brevity": 2.0,
        "evaluation/sampled/gsm8k": 0.0,
        "evaluation/sampled/brevity": 1.0,
        "evaluation/tokens/greedy": 7.0,
        "evaluation/tokens/sampled": 7.0,
        "evaluation/truncated/greedy": pytest.approx(1 / 3),
        "evaluation/truncated/sampled": pytest.approx(1 / 3),
    }


def test_rows_a_reward_does_not_apply_to_are_left_out_of_its_mean() -> None:
    found, _ = evaluated({"r": [NAN, 1, 0]}, {"r": [1, NAN, NAN]})
    assert found.means == {"greedy": {"r": 0.5}, "sampled": {"r": 1.0}}
    assert [found.estimates[mode]["r"].problems for mode in ("greedy", "sampled")] == [2, 1]


@pytest.mark.filterwarnings("error")  # numpy warns about the mean of nothing
def test_a_reward_that_applies_nowhere_is_left_out() -> None:
    found, _ = evaluated({"r": [NAN] * 3, "s": [1, 1, 1]}, {"r": [1, 0, NAN], "s": [0, 0, 0]})
    assert found.means == {"greedy": {"s": 1.0}, "sampled": {"r": 0.5, "s": 0.0}}


def test_several_samples_by_hand() -> None:
    """Three problems of four samples; the answers and which are right:

    7 7 4 5, 7 right: 2 of 4  mean 1/2  pass@2 5/6  maj@2 1    maj@4 1
    1 2 2 3, 1 right: 1 of 4  mean 1/4  pass@2 1/2  maj@2 1/2  maj@4 0
    9 9 9 9, 8 right: 0 of 4  mean 0    pass@2 0    maj@2 0    maj@4 0
    """
    texts = ["7", "7", "4", "5", "1", "2", "2", "3", "9", "9", "9", "9"]
    right = [1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    settings = EvaluationSettings(0.7, samples=4, k=(2, 4))
    found, (_, sampled) = evaluated({"r": [1, 1, 1]}, {"r": right}, settings=settings, sampled=texts)
    assert sampled.final_answers == tuple(texts)
    assert {mode: means["r"] for mode, means in found.means.items()} == pytest.approx(
        {"greedy": 1, "sampled": 1 / 4, "pass@2": 4 / 9, "pass@4": 2 / 3, "maj@2": 1 / 2, "maj@4": 1 / 3}
    )
    assert found.estimates["maj@4"]["r"] == Estimate(pytest.approx(1 / 3), *wilson(1, 3), 3)  # type: ignore[arg-type]


def test_what_counts_as_correct_is_a_setting() -> None:
    values = [0.5, 0.4, 0.4, 0.6, 1.0, 0.0]
    for least, expected in ((0.5, 1.0), (0.6, 2 / 3), (1.0, 1 / 3), (1.1, 0.0)):
        settings = EvaluationSettings(0.7, samples=2, k=(2,), correct_from=least)
        found, _ = evaluated({"r": [0, 0, 0]}, {"r": values}, settings=settings)
        assert found.means["pass@2"]["r"] == pytest.approx(expected)


def test_problems_with_fewer_than_k_samples_that_count_are_left_out_of_k() -> None:
    settings = EvaluationSettings(0.7, samples=2, k=(1, 2))
    found, _ = evaluated({"r": [0, 0, 0]}, {"r": [1, NAN, 0, 1, NAN, NAN]}, settings=settings)
    assert {mode: e["r"].problems for mode, e in found.estimates.items()} == {
        "greedy": 3, "sampled": 2, "pass@1": 2, "pass@2": 1, "maj@1": 2, "maj@2": 1,
    }  # fmt: skip
    assert found.means["pass@1"]["r"] == pytest.approx((1 + 1 / 2) / 2)
    assert found.means["maj@1"]["r"] == 1 / 2  # the first sample that counts: right, wrong


def test_the_digest_is_of_all_tokens() -> None:
    found, samples = evaluated({"r": [0, 0, 0]}, {"r": [0, 0, 0]})
    assert found.digest == tokens_digest([c for part in samples for c in part.rollout.completions])


def test_the_settings_follow_the_config() -> None:
    section = EvaluationSection(samples=4, answer_pattern="a.b", correct_from=0.5)
    settings = EvaluationSettings.of(section, 0.8)
    assert (settings.temperature, settings.samples, settings.k, settings.correct_from) == (0.8, 4, (2, 4), 0.5)
    assert settings.answer_pattern is not None
    assert settings.answer_pattern.search("xa\nby")
    assert EvaluationSettings.of(EvaluationSection(temperature=0.3), 0.8).temperature == 0.3
    with pytest.raises(ConfigError, match=r"evaluation.answer_pattern must be a regular expression, got '\('"):
        EvaluationSettings.of(EvaluationSection(answer_pattern="("), 0.8)


def test_samples_are_kept_with_what_was_found_about_them(tmp_path: Path) -> None:
    settings = EvaluationSettings(0.7, samples=2)
    values = {"shown": [1, NAN, 0]}, {"shown": [1, 0, 0, 1, NAN, 0]}
    _, samples = evaluated(*values, settings=settings, sampled=list("abcdef"))
    path = write_samples(tmp_path, "4", samples)
    assert path == tmp_path / "evaluations" / "4.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 9
    assert lines[1] == {
        "problem": 1, "mode": "greedy", "sample": 0, "prompt": "2+2=", "completion": "2+2=0.0", "answer": "0",
        "rewards": {"shown": None}, "tokens": 7, "finish_reason": "stop",
    }  # fmt: skip
    assert [(x["problem"], x["sample"], x["completion"], x["rewards"]["shown"]) for x in lines[3:]] == [
        (0, 0, "a", 1.0), (0, 1, "b", 0.0), (1, 0, "c", 0.0), (1, 1, "d", 1.0), (2, 0, "e", None), (2, 1, "f", 0.0),
    ]  # fmt: skip


def test_a_line_for_people() -> None:
    found = Evaluation(4, {"greedy": {"r": Estimate(0.5, 0.25, 0.75, 9)}}, tokens={"greedy": 3.25, "sampled": 4})
    assert describe(found, 9) == "held out (9 prompts) after step 4: greedy r 0.500 [0.250, 0.750]; tokens 3.2 / 4.0"
