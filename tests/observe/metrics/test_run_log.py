import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.metrics.samples import scored_rollout
from tpu_grpo.config import parse_config
from tpu_grpo.observe.metrics.run_log import RunLog, open_run_log, sample_rows
from tpu_grpo.observe.metrics.sinks import SampleRow

ADVANTAGES = np.array([0.5, -0.5, 1.0, -1.0])


class Recorder:
    """A sink that writes down its calls; may fail to close."""

    def __init__(self, name: str, calls: list[tuple[str, Any]], fails: bool = False) -> None:
        self.name, self.calls, self.fails = name, calls, fails

    def write(self, metrics: Mapping[str, float | int | str]) -> None:
        self.calls.append((f"{self.name}.write", metrics["step"]))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.calls.append((f"{self.name}.samples", (step, len(rows))))

    def close(self) -> None:
        self.calls.append((f"{self.name}.close", None))
        if self.fails:
            raise OSError("disk full")


def test_every_sink_gets_every_call_in_order() -> None:
    calls: list[tuple[str, Any]] = []
    with RunLog([Recorder("a", calls), Recorder("b", calls)]) as log:
        log.step({"step": 1})
        log.samples(1, scored_rollout(), ADVANTAGES)
    assert calls == [
        ("a.write", 1),
        ("b.write", 1),
        ("a.samples", (1, 4)),
        ("b.samples", (1, 4)),
        ("a.close", None),
        ("b.close", None),
    ]


def test_all_sinks_are_closed_when_one_fails_to() -> None:
    calls: list[tuple[str, Any]] = []
    with pytest.raises(OSError, match="disk full"):
        RunLog([Recorder("a", calls, fails=True), Recorder("b", calls)]).close()
    assert [name for name, _ in calls] == ["a.close", "b.close"]


def test_rows_carry_prompt_rewards_and_advantage_of_their_row() -> None:
    rows = sample_rows(scored_rollout(), ADVANTAGES)
    assert rows[1] == SampleRow("one?", "b", {"gsm8k": None, "brevity": 0.5}, 1.0, -0.5, 3, "length")
    assert rows[2] == SampleRow("two?", "c", {"gsm8k": 0.0, "brevity": 0.0}, 0.0, 1.0, 2, "stop")


def test_rows_carry_what_was_added_to_tokens() -> None:
    scored = scored_rollout()
    per_token = tuple(np.arange(len(c.token_ids)) / 2 for c in scored.rollout.completions)
    rows = sample_rows(replace(scored, scores=replace(scored.scores, per_token=per_token)), ADVANTAGES)
    assert [row.per_token for row in rows[:2]] == [(0.0,), (0.0, 0.5, 1.0)]


def test_advantages_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_rows(scored_rollout(), ADVANTAGES[:3])


@pytest.mark.parametrize("wandb", ["off", "offline"])
def test_a_config_opens_the_sinks_it_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], wandb: str) -> None:
    run = {"name": "r", "dir": str(tmp_path / "run"), "max_steps": 5}
    config = parse_config({"run": run, "logging": {"wandb": wandb}})
    with open_run_log(config, 0) as log:
        log.step({"step": 1, "rewards/mean": 0.5})
        log.samples(1, scored_rollout(), ADVANTAGES)
    with open_run_log(config, 1) as log:
        log.step({"step": 2, "rewards/mean": 0.75})
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 4
    assert "step 1 of 5  reward 0.500" in capsys.readouterr().out
    assert (tmp_path / "run" / "wandb").exists() == (wandb == "offline")
