"""Runs beside what was published, with points and means by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import parse_config
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.report.published import read_published


def leave_points(directory: Path, *points: dict[str, Any], metric: str = "rewards/mean", **config: Any) -> str:
    """Points, and a config beside them if one is given."""
    path = directory / "mine.json"
    path.write_text(json.dumps({"source": "https://example.org/1", "metric": metric, "points": points}))
    if config:
        path.with_suffix(".yaml").write_text(json.dumps(config))
    return str(path)


def lines(*rewards: float, **more: float) -> list[dict[str, Any]]:
    return [{"step": step, "rewards/mean": reward, **more} for step, reward in enumerate(rewards, 1)]


CURVE = ({"by": "A", "steps": [1, 2], "value": 0.4}, {"by": "A", "steps": [3, 4], "value": 0.6})
END = {"by": "B", "steps": [4, 4], "value": 0.8, "low": 0.75, "high": 0.85}
BAND = {"by": "C", "steps": [4, 4], "low": 0.5, "high": 0.76}


def test_a_curve_is_compared_point_by_point_and_gives_no_verdict(tmp_path: Path) -> None:
    published = read_published(leave_points(tmp_path, *CURVE))
    said = published.sentences(lines(0.25, 0.5, 0.5, 1.0), {})
    assert said == [
        "steps 1 to 2: rewards/mean 0.3750; A: 0.4; differs by -0.0250",
        "steps 3 to 4: rewards/mean 0.7500; A: 0.6; differs by +0.1500",
    ]
    assert published.sentences(lines(0.25, 0.5, 0.5), {}) == said[:1]  # the second is not over
    assert published.sentences([], {}) == []


@pytest.mark.parametrize(
    ("reward", "verdicts"),
    [
        (0.8, ["inside", "outside, by +0.0400"]),
        (0.75, ["inside", "inside"]),
        (0.625, ["outside, by -0.1250", "inside"]),
        (0.875, ["outside, by +0.0250", "outside, by +0.1150"]),
        (0.25, ["outside, by -0.5000", "outside, by -0.2500"]),
    ],
)
def test_a_run_is_outside_if_it_is_outside_of_every_range(tmp_path: Path, reward: float, verdicts: list[str]) -> None:
    published = read_published(leave_points(tmp_path, END, BAND))
    said = published.sentences(lines(0.0, 0.0, 0.0, reward), {})
    assert [text.rpartition("; ")[2] for text in said[:2]] == verdicts
    assert said[0].startswith(f"step 4: rewards/mean {reward:.4f}; B: 0.8 (0.75 to 0.85); ")
    assert said[1].startswith(f"step 4: rewards/mean {reward:.4f}; C: 0.5 to 0.76; ")
    assert len(said) == 2 + ("inside" not in verdicts)


def test_where_to_look_first(tmp_path: Path) -> None:
    """At settings that decide results; where they are the reference's, at metrics."""
    theirs = {"run": {"name": "mine", "max_steps": 4}, "optimizer": {"learning_rate": 1e-6}}
    published = read_published(leave_points(tmp_path, END, **theirs))
    bad = lines(0.0, 0.0, 0.0, 0.0, **{"agreement/logprob_abs_diff_mean": 0.25})

    def advice(**sections: Any) -> str:
        config = parse_config({"run": {"name": "own", "max_steps": 4}, **sections}).model_dump(mode="json")
        return published.sentences(bad, config)[-1].removeprefix("the run is outside of what was published: ")

    assert advice(optimizer={"learning_rate": 1e-5, "b2": 0.99}, model={"remat": "block"}) == (
        "look first at the settings that are not the reference's: optimizer.learning_rate: 1e-05 for 1e-06; "
        "optimizer.b2: 0.99 for 0.95"
    )
    assert advice() == (
        "its settings are the reference's, so look first at agreement/logprob_abs_diff_mean (0.25), samples.jsonl, "
        "then try another run.seed"
    )


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"must be one of qwen3_1p7b_gsm8k, qwen3_4b_gsm8k, or a file .* got nosuch; "
    ):
        read_published("nosuch")
    wrong: tuple[dict[str, Any], ...] = ({}, {"low": 0.1}, {"value": 1, "steps": [0, 2]}, {"value": 1, "steps": [2, 1]})
    for point in ({"by": "A", "steps": [1, 2], **each} for each in wrong):
        with pytest.raises(ConfigError, match=r"mine\.json must hold points as configs/reference has them"):
            read_published(leave_points(tmp_path, point))
