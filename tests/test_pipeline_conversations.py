"""Whole runs whose completions are conversations: what is learnt from, what is written down, and how failures end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.marks import marked
from tests.talking import SIZES, write_talking_files
from tests.test_pipeline import digests, lines
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.errors import EpisodeError
from tpu_grpo.pipeline import train

BAD = """
import os
import time


class Bad:
    '''Fails at the first turn of a conversation whose question is in ``at``.'''

    def __init__(self, at=(), how="raise"):
        self.at, self.how = at, how

    def reset(self, question, **columns):
        self.bad, self.turns = question in self.at, 0

    def step(self, action):
        self.turns += 1
        if self.bad and self.turns == 1:
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                time.sleep(1000)
            raise KeyError("x")
        return "go on", 0.25, self.turns == 4, {}
"""


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_talking_files(tmp_path_factory.mktemp("talking"))
    (directory / "bad.py").write_text(BAD)
    return directory


@pytest.fixture(autouse=True)
def _there(talking: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the directory of the files; no process that a run starts is left after it."""
    monkeypatch.chdir(talking)
    before = marked()
    yield
    assert marked() <= before


def config(run_dir: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "max_steps": 2, "seed": 5},
        "model": {"path": "model"},
        "algorithm": {"group_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "logging": {"samples_every": 1},
        **SIZES,
    }
    for name, values in sections.items():
        tree[name] = values if isinstance(values, list) else tree.get(name, {}) | values
    return parse_config(tree)


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_agreement_over_eight_turns_and_what_is_written_down(tmp_path: Path) -> None:
    evaluated = {"path": "data.jsonl", "prompts": 4}
    train(config(tmp_path / "run", evaluation=evaluated))
    for line in lines(tmp_path / "run"):
        assert line["agreement/logprob_abs_diff_max"] <= 1e-4
        assert line["agreement/logprob_abs_diff_mean"] <= 1e-5
        assert line["episodes/turns_max"] == 8
        assert line["rewards/mean"] == pytest.approx(line["rewards/environment/mean"])
    rows = samples(tmp_path / "run")
    assert len(rows) == 2 * 16
    for row in rows:
        assert sum(turn["reward"] for turn in row["turns"] if turn["reward"] is not None) == pytest.approx(
            row["reward"]
        )
        assert sum(turn["tokens"] for turn in row["turns"]) == row["tokens"]
    # a group begins alike: reset draws what its prompt's seed says
    assert {len({row["prompt"] for row in rows[start : start + 4]}) for start in range(0, 32, 4)} == {1}
    assert len({row["prompt"] for row in rows}) > 4


@pytest.mark.parametrize(
    "rollout",
    [{"prefix_cache": False}, {"steps_per_launch": 1}, {"kv_tokens": 260}],
    ids=["no prefix cache", "single steps", "little cache"],
)
def test_how_the_engine_works_changes_no_token(tmp_path: Path, rollout: dict[str, Any]) -> None:
    """With little cache few conversations are begun at once; test_waves.py has some that are put back in a turn."""
    for name, settings in (("plain", {}), ("other", rollout)):
        train(
            config(
                tmp_path / name, run={"dir": str(tmp_path / name), "max_steps": 1}, rollout=SIZES["rollout"] | settings
            )
        )
    assert digests(tmp_path / "other") == digests(tmp_path / "plain")
    [line] = lines(tmp_path / "other")
    assert line["agreement/logprob_abs_diff_max"] <= 1e-4
    assert line["agreement/logprob_abs_diff_mean"] <= 1e-5


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_a_bad_environment_ends_its_own_conversations(tmp_path: Path, how: str) -> None:
    bad = {
        "name": "bad.py:Bad",
        "options": {"at": ["1+1=", "2+1="], "how": how},
        "on_error": "value",
        "error_value": -1.0,
    }
    bad |= {"timeout": 1.0} if how == "hang" else {}
    train(
        config(
            tmp_path / "run", run={"dir": str(tmp_path / "run"), "max_steps": 2}, environment=SIZES["environment"] | bad
        )
    )
    kind = {"raise": "raised", "exit": "died", "hang": "late"}[how]
    rows = samples(tmp_path / "run")
    failed = [row for row in rows if row["ending"] == "failed"]
    assert 0 < len(failed) <= 2 * 4  # two of the eight prompts, four conversations each
    assert {row["reward"] for row in failed} == {-1.0}
    assert all(row["reward"] >= 0 for row in rows if row["ending"] != "failed")
    shares = [line.get(f"episodes/failed_{kind}", 0.0) for line in lines(tmp_path / "run")]
    assert sum(shares) * 16 == pytest.approx(len(failed))


def test_a_bad_environment_ends_the_run_if_it_shall(tmp_path: Path) -> None:
    bad = SIZES["environment"] | {"name": "bad.py:Bad", "options": {"at": [f"{n}+1=" for n in range(8)]}}
    with pytest.raises(
        EpisodeError, match=r"environment Bad raised KeyError: 'x' .*bad.py:\d+ in step.*on_error to skip"
    ):
        train(config(tmp_path / "run", environment=bad))
