"""A sink that a run can do without: whatever it raises, it is told once, and nothing else notices."""

import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.observe.metrics.samples import scored_rollout
from tests.observe.metrics.test_run_log import ADVANTAGES, Recorder
from tpu_grpo.config import parse_config
from tpu_grpo.observe.metrics import tensorboard_sink
from tpu_grpo.observe.metrics.optional_sink import OptionalSink
from tpu_grpo.observe.metrics.run_log import RunLog, open_run_log
from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.records.errors import ConfigError


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


def test_two_that_fail_are_told_each_once() -> None:
    said: list[str] = []
    sinks = [OptionalSink(name, "", make, said.append) for name, make in (("a", raises), ("b", lambda: Fails("write")))]
    log = RunLog(sinks)
    log.step({"step": 1})
    log.step({"step": 2})
    assert [line.partition(" failed while ")[0] for line in said] == ["a", "b"]


def broken_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> Any:
        raise OddError("the server is on fire")

    fake = types.SimpleNamespace(Settings=dict, init=init, Table=dict)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)


def broken_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard_sink.TensorBoardSink, "write", write)


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
    with open_run_log(config, 0) as log:
        for step in (1, 2):
            log.step({"step": step, "rewards/mean": 0.5})
    shown = capsys.readouterr().out
    assert told in shown
    assert len(re.findall("failed while", shown)) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert any((tmp_path / left).rglob("*.wandb" if left == "wandb" else "events.out.tfevents.*"))


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_sink, "LIBRARY", "no_such_tensorboard")
    config = parse_config({"run": {"dir": str(tmp_path)}, "logging": {"tensorboard": True}})
    with pytest.raises(ConfigError, match="needs the package no_such_tensorboard, .* `uv sync`, or set logging.tens"):
        open_run_log(config, 0)
