"""Callbacks: what they are given, how they stop a run, and what is said of those that fail."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.samples import scored_rollout
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.observe.callbacks import Callback, find_callbacks
from tpu_grpo.observe.run_log import RunLog, open_run_log
from tpu_grpo.records.errors import CallbackError, ConfigError

CODE = """
CALLS = []

class Watcher:
    def __init__(self, config):
        CALLS.append(("made", config["run"]["seed"]))

    def on_step(self, metrics, samples):
        CALLS.append((metrics["step"], [sample["completion"] for sample in samples]))
        metrics["step"] = None  # of its own copy
        return metrics["rewards/mean"] > 0.9

    def close(self):
        CALLS.append("closed")

class Silent: ...

class NeedsMore:
    def __init__(self, config, more): ...
    def on_step(self, metrics, samples): ...

class Unmade:
    def __init__(self, config):
        raise KeyError("no server")
    on_evaluation = None
"""
ADVANTAGES = np.array([0.5, -0.5, 1.0, -1.0])


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def config(tmp_path: Path, *names: str) -> RunConfig:
    run = {"dir": str(tmp_path / "run"), "seed": 7, "max_steps": 5}
    return parse_config({"run": run, "logging": {"callbacks": [f"{tmp_path}/mine.py:{name}" for name in names]}})


def open_log(config: RunConfig, callbacks: Sequence[Callback]) -> RunLog:
    settings = config.model_dump(mode="json")
    return open_run_log(config.run_dir, config.run, config.logging, settings, 0, callbacks=callbacks)


def test_a_class_gets_the_config_then_every_step_with_its_samples_and_asks_to_stop(
    tmp_path: Path, watched: Path
) -> None:
    settings = config(tmp_path, "Watcher")
    found = find_callbacks(settings.logging.callbacks)
    [(callback, calls)] = [(one, one._make.__init__.__globals__["CALLS"]) for one in found]
    assert (callback.name, calls) == (f"{watched}:Watcher", [])
    with open_log(settings, found) as log:
        log.step({"step": 1, "rewards/mean": 0.5}, scored_rollout(), ADVANTAGES)
        assert not log.asked_to_stop
        log.step({"step": 2, "rewards/mean": 1.0})
        assert log.asked_to_stop
        log.step({"step": 3, "rewards/mean": 0.0})
        assert log.asked_to_stop
    assert calls == [("made", 7), (1, ["a", "b", "c", "d"]), (2, []), (3, []), "closed"]
    assert '"step": 2,' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_class_is_closed_if_another_cannot_be_made(tmp_path: Path, watched: Path) -> None:
    settings = config(tmp_path, "Watcher", "Unmade")
    found = find_callbacks(settings.logging.callbacks)
    with pytest.raises(CallbackError, match="Unmade failed in its constructor"):
        open_log(settings, found)
    assert found[0]._make.__init__.__globals__["CALLS"] == [("made", 7), "closed"]


def test_functions_are_called_after_the_classes(tmp_path: Path, watched: Path) -> None:
    seen: list[Any] = []
    found = find_callbacks([f"{watched}:Watcher"], on_step=lambda metrics, samples: seen.append(metrics["step"]))
    for callback in found:
        callback.begin({"run": {"seed": 1}})
    RunLog([], found).step({"step": 4, "rewards/mean": 0.0})
    assert seen == [4]


def test_what_a_callback_raises_or_returns_is_named(tmp_path: Path, watched: Path) -> None:
    def fails(metrics: Any, samples: Any) -> bool:
        raise ValueError("no such table")

    (failing,) = find_callbacks((), on_step=fails)
    failing.begin({})
    name = r"on_step=test_what_a_callback_raises_or_returns_is_named\.<locals>\.fails"
    with pytest.raises(
        CallbackError, match=f"^callback {name} failed in on_step of step 3, got ValueError: no such table;"
    ):
        RunLog([], [failing]).step({"step": 3})
    (odd,) = find_callbacks((), on_evaluation=lambda metrics, samples: "stop")  # pyrefly: ignore[bad-argument-type]
    odd.begin({})
    with pytest.raises(CallbackError, match="on_evaluation must return True to stop the run, or nothing, got 'stop'"):
        odd.call("on_evaluation", {"step": 0}, [])
    (unmade,) = find_callbacks([f"{watched}:Unmade"])
    with pytest.raises(CallbackError, match="mine.py:Unmade failed in its constructor, got KeyError: 'no server'"):
        unmade.begin({})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nobody", "mine.py has no function 'Nobody'; functions there: Watcher, Silent, NeedsMore, Unmade"),
        ("Silent", "must name classes with on_step or on_evaluation, got .*mine.py:Silent with neither; add one"),
        ("NeedsMore", r"must be made from the config alone, got .*mine.py:NeedsMore\(config, more\); write def"),
    ],
)
def test_classes_that_cannot_be_callbacks_are_refused_before_the_run(
    tmp_path: Path, watched: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_callbacks([f"{watched}:{name}"])
