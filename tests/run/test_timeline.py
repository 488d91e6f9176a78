"""Timelines of chosen steps: which files there are, and what the two programs that read them find there."""

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.hosts.host_log import logger
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.run.timeline import Timeline


def steps_of(last: int, directory: Path, recorded: Sequence[int], host: int = 0, fails_at: int = 0) -> list[str]:
    """Run steps of 20 ms with a stage of 10 ms in each, and return what was noted."""
    notes, watch = list[str](), Watch(Hosts())
    with Timeline(recorded, directory, host, notes.append) as timeline:
        for step in range(1, last + 1):
            with timeline.step(step):
                with watch.stage(f"update of step {step}"):
                    time.sleep(0.01)
                if step == fails_at:
                    raise NonFiniteError("broken")
                time.sleep(0.01)
    return notes


def perfetto_spans(path: Path) -> list[dict[str, Any]]:
    """The events with a duration of a trace in Google's trace event format, whose times are in microseconds."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert trace.keys() <= {"traceEvents", "displayTimeUnit"}
    assert all({"ph", "pid", "name"} <= event.keys() for event in trace["traceEvents"] if event)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def xplane_spans(path: Path) -> dict[str, list[float]]:
    """The seconds of the spans of the host's main thread, by name."""
    (host,) = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if plane.name == "/host:CPU"]
    found: dict[str, list[float]] = {}
    for line in host.lines:
        for event in line.events:
            found.setdefault(event.name, []).append(event.duration_ns / 1e9)
    return found


@pytest.mark.full
def test_steps_that_follow_each_other_are_recorded_together(tmp_path: Path) -> None:
    notes = steps_of(6, tmp_path, [3, 4, 6, 7])  # ended early
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        "plugins/profile/step_6/host_0.xplane.pb",
        "plugins/profile/steps_3-4/host_0.xplane.pb",
        "step_6_host_0.json.gz",
        "steps_3-4_host_0.json.gz",
    ]
    assert notes == [f"the timeline steps_3-4 is in {tmp_path}", f"the timeline step_6 is in {tmp_path}"]
    spans = xplane_spans(tmp_path / files[1])
    stages = [f"update of step {step}" for step in (3, 4)]
    assert [name for name in spans if name.startswith("update")] == stages
    assert all(0.01 <= spans[stage][0] < 5 for stage in stages)
    assert len(spans["step"]) == 2
    assert min(spans["step"]) >= 0.02


@pytest.mark.full
def test_perfetto_finds_steps_and_stages_inside_of_them(tmp_path: Path) -> None:
    steps_of(2, tmp_path, [1, 2])
    spans = perfetto_spans(tmp_path / "steps_1-2_host_0.json.gz")
    steps = {int(span["args"]["step_num"]): span for span in spans if span["name"] == "step"}
    assert steps.keys() == {1, 2}
    for number, step in steps.items():
        (stage,) = [span for span in spans if span["name"] == f"update of step {number}"]
        assert stage["tid"] == step["tid"]
        assert step["ts"] <= stage["ts"] < stage["ts"] + stage["dur"] <= step["ts"] + step["dur"]


@pytest.mark.full
def test_hosts_leave_their_files_beside_each_other(tmp_path: Path) -> None:
    for host in (0, 1):
        steps_of(1, tmp_path, [1], host=host)
    left = sorted(path.name for path in (tmp_path / "plugins/profile/step_1").iterdir())
    assert left == ["host_0.xplane.pb", "host_1.xplane.pb"]
    assert (tmp_path / "step_1_host_1.json.gz").exists()


def test_a_step_that_fails_is_recorded_as_far_as_it_came(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="broken"):
        steps_of(5, tmp_path, [2, 3, 4], fails_at=3)
    assert "update of step 3" in xplane_spans(tmp_path / "plugins/profile/steps_2-3/host_0.xplane.pb")


@pytest.mark.full
def test_a_timeline_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: nothing can be made below a file."""
    monkeypatch.setattr(logger, "propagate", True)
    directory = tmp_path / "profile"
    directory.write_text("")
    (note,) = steps_of(5, directory, [1, 3])
    assert note.startswith(f"the timeline step_1 was not written to {directory}: ")
    assert note.endswith("; the run goes on")
    assert note.split(": ")[0] in caplog.text
    steps_of(1, tmp_path / "later", [1])  # of another run in this process
    assert (tmp_path / "later/step_1_host_0.json.gz").exists()


def test_where_something_is_recorded_already_a_run_goes_on_without(tmp_path: Path) -> None:
    assert steps_of(1, tmp_path / "profile", []) == []
    with jax.profiler.trace(tmp_path / "own"):
        (note,) = steps_of(3, tmp_path / "profile", [1, 3])
    assert note.startswith("the timeline of step 1 was not begun: Profile has already been started")
    assert not (tmp_path / "profile").exists()
