"""Held-out accuracy from a fake policy and fake rewards, and the file that remembers it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.errors import DataError
from tpu_grpo.evaluation import Evaluation, EvaluationLog, evaluate
from tpu_grpo.types import Completion, Prompt, PromptBatch, Rollout, Scores

NAN = float("nan")
PROMPTS = (Prompt("1+1=", (1,)), Prompt("2+2=", (2,)), Prompt("3+3=", (3,)))


class Policy:
    """Answers with its temperature, and remembers when it was asked what."""

    def __init__(self, calls: list[tuple[str, object]]):
        self.calls = calls

    def answer(self, prompts: Sequence[Prompt], *, temperature: float) -> Rollout:
        self.calls.append(("answer", (tuple(p.text for p in prompts), temperature)))
        row = Completion(np.array([1], np.int32), np.zeros(1, np.float32), "stop", cached_tokens=0)
        texts = tuple(f"{p.text}{temperature}" for p in prompts)
        return Rollout(PromptBatch(0, tuple(prompts)), 1, (row,) * len(texts), texts, seconds=1.0)


def scorer(calls: list[tuple[str, object]], *values: Mapping[str, Sequence[float]]) -> Callable[[Rollout], Scores]:
    remaining = list(values)

    def score(rollout: Rollout) -> Scores:
        calls.append(("score", rollout.texts))
        by_name = {name: np.array(row, np.float64) for name, row in remaining.pop(0).items()}
        return Scores(np.zeros(len(rollout.texts)), by_name, seconds=0.0)

    return score


def evaluated(*values: Mapping[str, Sequence[float]], names: Mapping[str, str] | None = None) -> Evaluation:
    calls: list[tuple[str, object]] = []
    shown = names or {name: name for name in values[0]}
    return evaluate(Policy(calls).answer, scorer(calls, *values), PROMPTS, step=4, temperature=0.7, display_names=shown)


def test_every_prompt_is_answered_greedily_then_sampled_and_scored_each_time() -> None:
    calls: list[tuple[str, object]] = []
    score = scorer(calls, {"r": [1, 0, 0]}, {"r": [1, 1, 0]})
    evaluate(Policy(calls).answer, score, PROMPTS, step=4, temperature=0.7, display_names={"r": "r"})
    texts = ("1+1=", "2+2=", "3+3=")
    assert calls == [
        ("answer", (texts, 0.0)),
        ("score", ("1+1=0.0", "2+2=0.0", "3+3=0.0")),
        ("answer", (texts, 0.7)),
        ("score", ("1+1=0.7", "2+2=0.7", "3+3=0.7")),
    ]


def test_means_by_mode_and_shown_name() -> None:
    found = evaluated(
        {"gsm8k": [1, 0, 0.5], "my/r.py:brevity": [3, -3, 6]},
        {"gsm8k": [0, 0, 0], "my/r.py:brevity": [1, 1, 1]},
        names={"gsm8k": "gsm8k", "my/r.py:brevity": "brevity"},
    )
    assert found == Evaluation(4, {"greedy": {"gsm8k": 0.5, "brevity": 2.0}, "sampled": {"gsm8k": 0.0, "brevity": 1.0}})
    assert found.metrics() == {
        "evaluation/greedy/gsm8k": 0.5,
        "evaluation/greedy/brevity": 2.0,
        "evaluation/sampled/gsm8k": 0.0,
        "evaluation/sampled/brevity": 1.0,
    }


def test_rows_a_reward_does_not_apply_to_are_left_out_of_its_mean() -> None:
    found = evaluated({"r": [NAN, 1, 0]}, {"r": [1, NAN, NAN]})
    assert found.means == {"greedy": {"r": 0.5}, "sampled": {"r": 1.0}}


@pytest.mark.filterwarnings("error")  # numpy warns about the mean of nothing
def test_a_reward_that_applies_nowhere_is_left_out() -> None:
    found = evaluated({"r": [NAN] * 3, "s": [1, 1, 1]}, {"r": [1, 0, NAN], "s": [0, 0, 0]})
    assert found.means == {"greedy": {"s": 1.0}, "sampled": {"r": 0.5, "s": 0.0}}


def evaluation(step: int, value: float) -> Evaluation:
    return Evaluation(step, {"greedy": {"r": value}, "sampled": {"r": value / 2}})


def test_a_new_log_has_no_summary_and_no_file(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 0)
    assert log.done == []
    assert log.summary() == {}
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_a_line_per_evaluation(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 0)
    log.add(evaluation(0, 0.5))
    log.add(evaluation(10, 1.0))
    lines = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "evaluation/greedy/r": 0.5, "evaluation/sampled/r": 0.25},
        {"step": 10, "evaluation/greedy/r": 1.0, "evaluation/sampled/r": 0.5},
    ]


def test_the_summary_has_the_first_and_the_last(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 0)
    log.add(evaluation(0, 0.25))
    assert log.summary()["evaluation/before"] == log.summary()["evaluation/after"] == evaluation(0, 0.25).means
    log.add(evaluation(5, 0.5))
    log.add(evaluation(10, 1.0))
    assert log.summary() == {
        "evaluation/before": {"greedy": {"r": 0.25}, "sampled": {"r": 0.125}},
        "evaluation/after": {"greedy": {"r": 1.0}, "sampled": {"r": 0.5}},
    }


def test_a_continued_log_keeps_what_was_done_and_drops_later_steps(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 0)
    for step in (0, 5, 10, 15):
        log.add(evaluation(step, step / 20))
    continued = EvaluationLog(tmp_path, 10)  # the newest checkpoint is of step 10
    assert continued.done == [evaluation(0, 0.0), evaluation(5, 0.25), evaluation(10, 0.5)]
    continued.add(evaluation(15, 1.0))
    assert EvaluationLog(tmp_path, 20).done == [*continued.done]
    assert [e.means["greedy"]["r"] for e in EvaluationLog(tmp_path, 20).done] == [0.0, 0.25, 0.5, 1.0]


def test_a_line_that_a_kill_tore_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    EvaluationLog(tmp_path, 0).add(evaluation(0, 0.5))
    with (tmp_path / "evaluation.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "mea')
    log = EvaluationLog(tmp_path, 5)
    log.add(evaluation(10, 1.0))
    assert EvaluationLog(tmp_path, 10).done == [evaluation(0, 0.5), evaluation(10, 1.0)]


def test_a_broken_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "evaluation.jsonl").write_bytes(b'{"step": 0\n{"step": 5, "means": {}}\n')
    with pytest.raises(DataError, match=r"evaluation\.jsonl:1 must be one JSON object"):
        EvaluationLog(tmp_path, 5)
