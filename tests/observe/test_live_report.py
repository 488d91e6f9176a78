"""The page of a run while it goes on: when it is written, what an error does, and that every end is on it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.processes import REPOSITORY
from tests.report.runs import leave_run
from tpu_grpo.hosts import End, Hosts, this_process
from tpu_grpo.observe.live_report import LiveReport
from tpu_grpo.records.errors import Interrupted
from tpu_grpo.report import run_page


class Clock:
    """Stands still, but for what it is told; every page takes an eighth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pages: list[tuple[int, str]] = []
        write = run_page.write_report

        def slow(run_dir: Path, *, standing: Any) -> None:
            self.pages.append((standing.step, standing.outcome))
            write(run_dir, standing=standing)
            self.now += 0.125

        monkeypatch.setattr(run_page, "write_report", slow)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def report_of(run_dir: Path, start: int = 0, hosts: Hosts | None = None, **given: Any) -> LiveReport:
    leave_run(run_dir, 3)
    return LiveReport(run_dir, 40, hosts or Hosts(), start, **given)


def sentence(run_dir: Path) -> str:
    return (run_dir / "report.html").read_text().partition('class="badge">')[2].partition("</div>")[0]


def test_writing_takes_at_most_a_hundredth_of_the_time(tmp_path: Path, clock: Clock) -> None:
    with report_of(tmp_path, clock=clock) as report:
        for step in range(1, 41):
            clock.now += 1.0
            report.write({"step": step})
    # at the start; after step 1, until 1.25 s; then from 12.5 s later on: at 14.25, 27.375 and 40.5 s; at the end
    assert clock.pages == [(0, "going"), (1, "going"), (14, "going"), (27, "going"), (40, "going"), (40, "done")]


def test_a_run_of_long_steps_writes_after_every_one(tmp_path: Path, clock: Clock) -> None:
    with report_of(tmp_path, clock=clock) as report:
        for step in (1, 2, 3):
            clock.now += 20.0
            report.write({"step": step})
            if step == 3:  # 40 s for two steps, and 37 are left
                assert "step 3 of 40, about 12 min left" in sentence(tmp_path)
    assert [step for step, _ in clock.pages] == [0, 1, 2, 3, 3]


def test_a_run_that_goes_on_after_a_stop_takes_its_end_back(tmp_path: Path) -> None:
    report = report_of(tmp_path, 3)
    (tmp_path / "end.json").write_text('{"outcome": "stopped"}')
    (tmp_path / "report.html.123.tmp").write_text("of a kill")
    with report:
        assert not (tmp_path / "end.json").exists()
        assert not (tmp_path / "report.html.123.tmp").exists()
        assert "The run goes on: step 3 of 40" in sentence(tmp_path)


@pytest.mark.parametrize(
    ("error", "outcome", "shown"),
    [
        (Interrupted("stopped after step 3 as asked"), "stopped", "stopped after step 3 as asked"),
        (ZeroDivisionError("a bug"), "failed", "ZeroDivisionError: a bug"),
        (OSError(28, "No space left on device"), "failed", "DiskError: the disk must take"),
        (KeyboardInterrupt(), "stopped", "interrupted at once"),
    ],
)
def test_every_error_is_an_end(tmp_path: Path, error: BaseException, outcome: str, shown: str) -> None:
    with pytest.raises(type(error)), report_of(tmp_path) as report:
        report.write({"step": 3})
        raise error
    assert shown in (tmp_path / "report.html").read_text()
    end = json.loads((tmp_path / "end.json").read_text())
    assert (end["outcome"], end["step"], end["max_steps"]) == (outcome, 3, 40)
    assert shown in end["message"]
    assert this_process.at_end is None


def test_a_run_that_ends_early_says_why(tmp_path: Path) -> None:
    with report_of(tmp_path) as report:
        report.write({"step": 3})
        (tmp_path / "summary.json").write_text('{"steps": 3, "ended_early": "every prompt is retired"}')
    assert "The run is done, after step 3 of 40: every prompt is retired." in sentence(tmp_path)


def test_a_full_disk_ends_the_run_as_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "report.html")

    with pytest.raises(OSError, match="No space left"), report_of(tmp_path) as report:
        monkeypatch.setattr(run_page, "write_report", full)
        report.write({"step": 1})


def test_another_error_of_the_page_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def broken(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError("a mistake of the page's own")

    monkeypatch.setattr(run_page, "write_report", broken)
    with report_of(tmp_path) as report:
        for step in (1, 2, 3):
            report.write({"step": step})
        assert capsys.readouterr().err == (
            "report.html cannot be written (ZeroDivisionError: a mistake of the page's own); the run goes on without "
            "it, and its other files are complete\n"
        )
    assert len(calls) == 2  # and once more at the end
    assert json.loads((tmp_path / "end.json").read_text())["outcome"] == "done"


def test_a_run_without_a_page_says_how_it_ended(tmp_path: Path) -> None:
    with report_of(tmp_path, has_page=False) as report:
        report.write({"step": 3})
    assert not (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "end.json").read_text())["outcome"] == "done"


def test_a_directory_that_another_run_has_by_now_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), report_of(tmp_path, is_ours=lambda: False):
        raise ZeroDivisionError
    assert not (tmp_path / "end.json").exists()
    assert "The run goes on" in sentence(tmp_path)


def test_with_other_hosts_what_is_found_out_later_is_what_stands_there(tmp_path: Path) -> None:
    """A broken collective raises first; that a host was lost is known when its heartbeats have stayed away."""
    several = Hosts()
    several.count = 2
    with pytest.raises(ValueError, match="Gloo"), report_of(tmp_path, hosts=several):
        raise ValueError("Gloo: connection closed by peer")
    assert "Gloo" in (tmp_path / "report.html").read_text()
    report, this_process.at_end = this_process.at_end, None
    assert report is not None
    report(End("failed", 3, "LockstepError: lost host 1: no heartbeat for 40 s"))
    html = (tmp_path / "report.html").read_text()
    assert "Gloo" not in html
    assert "LockstepError: lost host 1: no heartbeat for 40 s" in html


@pytest.mark.parametrize(
    ("ends", "code", "shown"),
    [
        ("end_process('lost host 1')", 3, "LockstepError: lost host 1"),
        ("interrupt(), time.sleep(0.5), interrupt()", 1, "ended at once"),
    ],
)
def test_a_thread_that_ends_the_process_writes_the_end(tmp_path: Path, ends: str, code: int, shown: str) -> None:
    """The main thread is where no exception reaches it, as in a collective that never returns."""
    leave_run(tmp_path, 3)
    body = f"""
        import os, signal, threading, time
        from hashlib import pbkdf2_hmac
        from pathlib import Path
        from tpu_grpo.hosts import Hosts, SignalledStop
        from tpu_grpo.hosts.ending import end_process
        from tpu_grpo.observe.live_report import LiveReport

        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)

        with SignalledStop() as stop, LiveReport(Path({str(tmp_path)!r}), 40, Hosts(), 3):
            stop.begin()
            threading.Thread(target=lambda: ({ends}), daemon=True).start()
            pbkdf2_hmac("sha512", b"", b"", 3 * 10**7)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]},
    )
    assert done.returncode == code, done.stderr
    assert shown in (tmp_path / "report.html").read_text()
    assert shown in json.loads((tmp_path / "end.json").read_text())["message"]
