"""The log of a run: every sink gets every call, files survive a kill, and a tracker that fails is told once."""

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.samples import scored_rollout
from tpu_grpo.config import parse_config
from tpu_grpo.observe import trackers
from tpu_grpo.observe.run_log import JsonlSink, OptionalSink, RunLog, open_run_log
from tpu_grpo.observe.sample_rows import SampleRow, sample_rows
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Histogram

# --- the log ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.full
@pytest.mark.parametrize("wandb", ["off", "offline"])
def test_a_config_opens_the_sinks_it_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], wandb: str) -> None:
    run = {"name": "r", "dir": str(tmp_path / "run"), "max_steps": 5}
    config = parse_config({"run": run, "logging": {"wandb": wandb}})
    with open_run_log(config.run_dir, config.run, config.logging, {}, 0) as log:
        log.step({"step": 1, "rewards/mean": 0.5})
        log.samples(1, scored_rollout(), ADVANTAGES)
    with open_run_log(config.run_dir, config.run, config.logging, {}, 1) as log:
        log.step({"step": 2, "rewards/mean": 0.75})
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 4
    assert "step 1 of 5  reward 0.500" in capsys.readouterr().out
    assert (tmp_path / "run" / "wandb").exists() == (wandb == "offline")


# --- files ------------------------------------------------------------------------------------------------------------


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_step_that_reads_back_as_written(tmp_path: Path) -> None:
    metrics = {"step": 1, "rewards/mean": 0.1 + 0.2, "rollout/tokens_digest": "ab", "update/kl": float("nan")}
    sink = JsonlSink(tmp_path / "run", 0)
    sink.write(metrics)
    assert records(tmp_path / "run" / "metrics.jsonl") == [{**metrics, "update/kl": None}]  # before closing: flushed
    sink.close()


def test_resuming_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "rewards/mean": step / 7}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "rew')
    (tmp_path / "samples.jsonl").write_text('{"step": 2, "prompt": "p"}\n{"step": 4, "prompt": "q"}\n')
    sink = JsonlSink(tmp_path, 2)
    sink.write({"step": 3, "rewards/mean": 0.5})
    sink.close()
    assert records(tmp_path / "metrics.jsonl") == [
        {"step": 1, "rewards/mean": 1 / 7},
        {"step": 2, "rewards/mean": 2 / 7},
        {"step": 3, "rewards/mean": 0.5},
    ]
    assert records(tmp_path / "samples.jsonl") == [{"step": 2, "prompt": "p"}]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "samples.jsonl"]


def test_a_whole_last_line_without_newline_is_kept_apart_from_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    sink = JsonlSink(tmp_path, 1)
    sink.write({"step": 2})
    sink.close()
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_new_run_in_an_old_directory_starts_clean(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    JsonlSink(tmp_path, 0).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_kill_loses_no_finished_line(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tpu_grpo.observe.run_log import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]), 0)\n"
        "for step in (1, 2, 3): sink.write({'step': step})\n"
        "print('written', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        child.send_signal(signal.SIGKILL)
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [1, 2, 3]


# --- sinks that a run can do without ----------------------------------------------------------------------------------


class OddError(Exception):
    """Stands for an error of a library's own, which nobody has heard of."""


class Fails:
    """A sink that raises in one of its methods, and counts calls of any."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def _call(self, name: str) -> None:
        self.calls += 1
        if name == self.where:
            raise OddError("no luck")

    def write(self, metrics: Mapping[str, Any]) -> None:
        self._call("write")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._call("samples")

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._call("histograms")

    def close(self) -> None:
        self._call("close")


def raises() -> Any:
    raise OddError("no luck")


@pytest.mark.parametrize(
    ("where", "doing", "calls"),
    [("open", "starting", 0), ("write", "logging", 1), ("samples", "logging samples", 2), ("close", "finishing", 5)],
)
def test_an_error_is_told_once_and_the_other_sinks_go_on(where: str, doing: str, calls: int) -> None:
    said: list[str] = []
    seen: list[tuple[str, Any]] = []
    inner = Fails(where)
    failing = OptionalSink("wandb", "Set it off.", raises if where == "open" else lambda: inner, said.append)
    with RunLog([failing, Recorder("other", seen)]) as log:
        for step in (1, 2):
            log.step({"step": step})
            log.samples(step, scored_rollout(), ADVANTAGES)
    assert said == [
        f"wandb failed while {doing} (OddError: no luck); the run goes on without it, and its own files are complete. "
        "Set it off."
    ]
    assert inner.calls == calls
    assert [name for name, _ in seen] == ["other.write", "other.samples"] * 2 + ["other.close"]


def broken_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> Any:
        raise OddError("the server is on fire")

    fake = types.SimpleNamespace(Settings=dict, init=init, Table=dict)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)


def broken_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers.TensorBoardSink, "write", write)


@pytest.mark.parametrize(
    ("breaks", "told", "left"),
    [
        (broken_wandb, "wandb failed while starting (OddError: the server is on fire)", "tensorboard"),
        (broken_tensorboard, "TensorBoard failed while logging (OSError: [Errno 28] No space left on device)", "wandb"),
    ],
)
def test_a_run_with_both_goes_on_with_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    breaks: Callable[[pytest.MonkeyPatch], None],
    told: str,
    left: str,
) -> None:
    breaks(monkeypatch)
    config = parse_config({"run": {"dir": str(tmp_path)}, "logging": {"wandb": "offline", "tensorboard": True}})
    with open_run_log(config.run_dir, config.run, config.logging, {}, 0) as log:
        for step in (1, 2):
            log.step({"step": step, "rewards/mean": 0.5})
    shown = capsys.readouterr().out
    assert told in shown
    assert len(re.findall("failed while", shown)) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert any((tmp_path / left).rglob("*.wandb" if left == "wandb" else "events.out.tfevents.*"))


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "TENSORBOARD_LIBRARY", "no_such_tensorboard")
    config = parse_config({"run": {"dir": str(tmp_path)}, "logging": {"tensorboard": True}})
    with pytest.raises(ConfigError, match="needs the package no_such_tensorboard, .* `uv sync`, or set logging.tens"):
        trackers.check_trackers(config.logging)
