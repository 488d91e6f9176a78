"""Estimates from a fake policy and fake rewards, worked out by hand, by counting, or by scipy; and their files."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.observe.samples import completion
from tests.talks import talk
from tpu_grpo.config import EvaluationSection
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.evaluation import (
    Estimate,
    Evaluation,
    EvaluationLog,
    EvaluationSamples,
    GroupEnded,
    describe,
    evaluate,
    evaluation_of,
    majority,
    over_problems,
    pass_at_k,
    record_of,
    wilson,
    write_samples,
)
from tpu_grpo.observe.step_metrics import tokens_digest
from tpu_grpo.records.stages import AnswerMode, Completion, Prompt, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.shipped.correctness import voted_answer

# --- estimates --------------------------------------------------------------------------------------------------------

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
        self.calls.append(("finish", (*(r.batch.step for r in rollouts), *(r.texts for r in rollouts))))
        by_name = [{name: np.array(row, np.float64) for name, row in values.items()} for values in self.values]
        return [Scores(np.zeros(len(r.texts)), found, seconds=0.0) for r, found in zip(rollouts, by_name, strict=True)]


def evaluated(
    *values: Mapping[str, Sequence[float]],
    section: EvaluationSection = EvaluationSection(),  # noqa: B008
    sampled: Sequence[str] = (),
) -> tuple[Evaluation, Sequence[EvaluationSamples]]:
    calls: list[tuple[str, object]] = []
    return evaluate(
        Policy(calls, sampled).answer, Scorer(calls, *values).begin, PROMPTS, section, 0.7, voted_answer, step=4
    )


def test_every_prompt_is_answered_greedily_and_sampled_at_once_and_scored_meanwhile() -> None:
    calls: list[tuple[str, object]] = []
    scorer = Scorer(calls, {"r": [1, 0, 0]}, {"r": [1, 1, 0, 0, 1, 0]})
    evaluate(Policy(calls).answer, scorer.begin, PROMPTS, EvaluationSection(samples=2), 0.7, voted_answer, step=4)
    texts = ("1+1=", "2+2=", "3+3=")
    assert calls == [
        ("begin", (texts, 4, 2)),  # rewards are told the step
        ("answer", (texts, 0.0, 1)),
        ("answer", (texts, 0.7, 2)),  # in the same rollout
        *[("add", (0, p, (f"{texts[p]}0.0",))) for p in (2, 1, 0)],
        *[("add", (1, p, (f"{texts[p]}0.7",) * 2)) for p in (2, 1, 0)],
        ("finish", (4, 4, tuple(f"{t}0.0" for t in texts), tuple(f"{t}0.7" for t in texts for _ in range(2)))),
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
    section = EvaluationSection(samples=4)
    found, (_, sampled) = evaluated({"r": [1, 1, 1]}, {"r": right}, section=section, sampled=texts)
    assert sampled.final_answers == tuple(texts)
    assert {mode: means["r"] for mode, means in found.means.items()} == pytest.approx(
        {"greedy": 1, "sampled": 1 / 4, "pass@2": 4 / 9, "pass@4": 2 / 3, "maj@2": 1 / 2, "maj@4": 1 / 3}
    )
    assert found.estimates["maj@4"]["r"] == Estimate(pytest.approx(1 / 3), *wilson(1, 3), 3)  # pyrefly: ignore[bad-argument-type]


def test_a_sample_is_correct_from_a_reward_of_one_on() -> None:
    found, _ = evaluated({"r": [0, 0, 0]}, {"r": [0.5, 0.4, 0.4, 0.99, 1.0, 0.0]}, section=EvaluationSection(samples=2))
    assert found.means["pass@2"]["r"] == pytest.approx(1 / 3)
    found, _ = evaluated({"r": [0, 0, 0]}, {"r": [2.0, 0.4, 0.4, 0.99, 1.0, 0.0]}, section=EvaluationSection(samples=2))
    assert found.means["pass@2"]["r"] == pytest.approx(2 / 3)


def test_problems_with_fewer_than_k_samples_that_count_are_left_out_of_k() -> None:
    section = EvaluationSection(samples=2)
    found, _ = evaluated({"r": [0, 0, 0]}, {"r": [1, NAN, 0, 1, NAN, NAN]}, section=section)
    assert {mode: e["r"].problems for mode, e in found.estimates.items()} == {
        "greedy": 3, "sampled": 2, "pass@2": 1, "maj@2": 1,
    }  # fmt: skip
    assert found.means["sampled"]["r"] == pytest.approx((1 + 1 / 2) / 2)
    assert found.means["pass@2"]["r"] == 1.0  # of the second problem, whose samples are wrong and right


def test_the_digest_is_of_all_tokens() -> None:
    found, samples = evaluated({"r": [0, 0, 0]}, {"r": [0, 0, 0]})
    assert found.digest == tokens_digest([c for part in samples for c in part.rollout.completions])


def test_samples_are_kept_with_what_was_found_about_them(tmp_path: Path) -> None:
    section = EvaluationSection(samples=2)
    values = {"shown": [1, NAN, 0]}, {"shown": [1, 0, 0, 1, NAN, 0]}
    _, samples = evaluated(*values, section=section, sampled=list("abcdef"))
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


# --- samples ----------------------------------------------------------------------------------------------------------


def test_a_conversation_has_its_turns(tmp_path: Path) -> None:
    made = talk([1, 2], ([11, 12], [21]), ([13], []), prompt="first", turns={0: {"answer": "5"}}, ending="done")
    rollout = Rollout(PromptBatch(0, (Prompt("asked", (9,)),)), 2, (made, completion([7])), ("text", "plain"), 0.0)
    scores = Scores(np.zeros(2), {"success": np.array([1.0, 0.0])}, 0.0)
    path = write_samples(tmp_path, "4", [EvaluationSamples("greedy", rollout, scores, ("5", None))])
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["prompt"], first["tokens"], first["answer"]) == ("first", 3, "5")
    assert (first["environment"], first["ending"], first["mask"]) == ("Toy", "done", [[2, 1], [1, 0]])
    assert [turn["answer"] for turn in first["turns"]] == ["5", ""]
    assert (second["prompt"], second["tokens"]) == ("asked", 1)
    assert not {"turns", "mask", "ending", "environment", "failure"} & set(second)


# --- the log ----------------------------------------------------------------------------------------------------------


def evaluation(step: int, value: float) -> Evaluation:
    estimates = {
        mode: {"r": Estimate(v, v - 0.1, v + 0.1, 8)} for mode, v in (("greedy", value), ("sampled", value / 2))
    }
    return Evaluation(step, estimates, {"greedy": 3.0}, {"greedy": 0.5}, "d1")


def open_log(directory: Path, start: int, best: str = "greedy/r") -> EvaluationLog:
    return EvaluationLog(directory, start, best, Hosts())


def test_a_new_log_has_no_summary_and_no_file(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    assert (log.done, log.summary(), log.best_step) == ([], {}, None)
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_a_line_per_evaluation(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.add(evaluation(0, 0.5))
    log.add(evaluation(10, 1.0))
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 0,
        "evaluation/greedy/r": 0.5,
        "evaluation/sampled/r": 0.25,
        "evaluation/tokens/greedy": 3.0,
        "evaluation/truncated/greedy": 0.5,
        "intervals": {"greedy/r": [0.4, 0.6, 8], "sampled/r": [0.15, 0.35, 8]},
        "digest": "d1",
    }
    assert [line["step"] for line in lines] == [0, 10]


def test_an_evaluation_survives_being_written() -> None:
    found = evaluation(3, 0.5)
    assert evaluation_of(json.loads(json.dumps(record_of(found)))) == found
    found = replace(found, failed={"greedy": 0.25})  # of conversations
    assert record_of(found)["evaluation/failed/greedy"] == 0.25
    assert evaluation_of(json.loads(json.dumps(record_of(found)))) == found
    line = {"step": 5, "evaluation/greedy/r": 0.5}  # of a version that told no intervals
    old = evaluation_of(line)
    assert old.means == {"greedy": {"r": 0.5}}
    assert math.isnan(old.estimates["greedy"]["r"].low)


def test_the_summary_has_the_first_the_last_and_the_best(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.add(evaluation(0, 0.25))
    assert log.summary()["evaluation/before"] == log.summary()["evaluation/after"] == evaluation(0, 0.25).means
    log.add(evaluation(5, 1.0))
    log.add(evaluation(10, 0.5))
    assert log.summary() == {
        "evaluation/before": {"greedy": {"r": 0.25}, "sampled": {"r": 0.125}},
        "evaluation/after": {"greedy": {"r": 0.5}, "sampled": {"r": 0.25}},
        "evaluation/intervals": {"greedy/r": [0.4, 0.6, 8], "sampled/r": [0.15, 0.35, 8]},
        "evaluation/best": {"step": 5, "of": "greedy/r", "value": 1.0, "interval": [0.9, 1.1, 8]},
    }


def test_the_best_is_the_first_of_the_highest(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    found = []
    for step, value in ((0, 0.5), (5, 0.75), (10, 0.75), (15, 0.6), (20, 0.8)):
        log.add(evaluation(step, value))
        found.append(log.best_step)
        assert json.loads((tmp_path / "best.json").read_text())["step"] == log.best_step
    assert found == [0, 5, 5, 5, 20]


def test_the_best_of_what_is_not_there(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0, "pass@4/r")
    log.add(evaluation(0, 0.5))
    assert log.best_step is None
    assert "evaluation/best" not in log.summary()
    assert not (tmp_path / "best.json").exists()


def test_a_continued_log_keeps_what_was_done_and_drops_later_steps(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for step in (0, 5, 10, 15):
        log.add(evaluation(step, step / 20))
    continued = open_log(tmp_path, 10)  # the newest checkpoint is of step 10
    assert continued.done == [evaluation(0, 0.0), evaluation(5, 0.25), evaluation(10, 0.5)]
    assert continued.best_step == json.loads((tmp_path / "best.json").read_text())["step"] == 10
    continued.add(evaluation(15, 0.4))
    assert open_log(tmp_path, 20).done == [*continued.done]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 10


def test_a_fresh_start_keeps_none(tmp_path: Path) -> None:
    open_log(tmp_path, 0).add(evaluation(0, 0.5))
    assert open_log(tmp_path, 0).done == []
    assert not (tmp_path / "best.json").exists()


def test_a_line_that_a_kill_tore_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    open_log(tmp_path, 0).add(evaluation(0, 0.5))
    with (tmp_path / "evaluation.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "mea')
    open_log(tmp_path, 5).add(evaluation(10, 1.0))
    assert open_log(tmp_path, 10).done == [evaluation(0, 0.5), evaluation(10, 1.0)]


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", range(1, 11))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(samples: int) -> None:
    for correct, k in product(range(samples + 1), range(1, samples + 1)):
        draws = list(combinations([True] * correct + [False] * (samples - correct), k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert pass_at_k(10_000, 1_000, 100) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_there_are_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be from 1 to the number of samples, 4, got {k}"):
        pass_at_k(4, 1, k)


@pytest.mark.parametrize(
    ("answers", "right", "value"),
    [
        ("7 7 4", "7", 1.0),
        ("7 4 4", "7", 0.0),
        ("7 7 4 4 -", "7", 1 / 2),  # a tie of two
        ("7 4 5", "7", 1 / 3),
        ("7 4 5", "8", 0.0),
        ("7 - - -", "7", 1.0),  # what has no answer does not vote
        ("- -", "7", 0.0),
        ("7", "7", 1.0),
    ],
)
def test_majority_by_hand(answers: str, right: str, value: float) -> None:
    votes = [None if answer == "-" else answer for answer in answers.split()]
    assert majority(votes, [vote == right for vote in votes]) == value
    assert majority(votes[::-1], [vote == right for vote in votes[::-1]]) == value


def test_samples_of_one_answer_that_were_judged_differently_count_by_their_mean() -> None:
    assert majority(["7", "7", "7", "4"], [True, False, True, True]) == 2 / 3


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (3, 10), (10, 10), (150, 512), (1, 1), (0, 1)])
def test_wilsons_interval_is_scipys(successes: int, count: int) -> None:
    expected = stats.binomtest(successes, count).proportion_ci(0.95, method="wilson")
    assert wilson(successes, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_other_values_get_the_normal_interval_of_their_mean() -> None:
    # by hand: mean 0.5, sum of squares about it 0.0625 * 2, variance 0.0625, standard error sqrt(0.0625 / 3)
    found = over_problems(np.array([0.25, 0.5, 0.75]))
    half = 1.959963984540054 * math.sqrt(0.0625 / 3)
    assert (found.value, found.problems) == (0.5, 3)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-15)


def test_of_one_problem_nothing_is_known() -> None:
    found = over_problems(np.array([0.5]))
    assert (found.value, found.problems) == (0.5, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_normal_interval_holds_the_truth_as_often_as_it_says() -> None:
    """500 evaluations of 200 problems, each problem with a chance of its own, 8 samples each, pass@2."""
    rng = np.random.default_rng(0)
    chances = rng.beta(0.5, 0.8, (500, 200))
    correct = rng.binomial(8, chances)
    table = np.array([pass_at_k(8, c, 2) for c in range(9)])
    grid = np.random.default_rng(1).beta(0.5, 0.8, 400_000)
    truth = float(np.mean(1 - (1 - grid) ** 2))  # pass@2 of a problem with chance p is 1 - (1 - p)^2
    found = [over_problems(table[row]) for row in correct]
    covered = np.mean([e.low <= truth <= e.high for e in found])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 500)
