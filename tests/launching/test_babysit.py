"""Watching a run: what is decided, in which order it is done, and a machine that is taken away for real."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.launching.conftest import git
from tests.launching.driving import eventually
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main
from tpu_grpo.launching import babysit
from tpu_grpo.launching.babysit import Babysitter, decide, pause
from tpu_grpo.launching.gcloud import GcloudError
from tpu_grpo.launching.jobs import Job
from tpu_grpo.launching.launcher import Launcher, WorkerStatus
from tpu_grpo.launching.tpu_slice import Condition, SliceState
from tpu_grpo.records.errors import Interrupted, LaunchError, LockstepError

KEY = "abcd1234"


def status(state: str, code: int | None = None, job: str = f"20260101-000000-{KEY}") -> WorkerStatus:
    return WorkerStatus(state, job, 1, code)


RUNNING, LOST, NONE = status("running"), status("lost"), WorkerStatus("none")
OTHER = status("ended", 0, "20260101-000000-ffffffff")


def exited(code: int) -> WorkerStatus:
    return status("ended", code)


@pytest.mark.parametrize(
    ("condition", "workers", "seen", "action"),
    [
        ("missing", [], True, "create"),
        ("gone", [], True, "recreate"),
        ("waiting", [], True, "wait"),
        ("ready", [NONE, NONE], True, "start"),
        ("ready", [OTHER, OTHER], True, "start"),
        ("ready", [RUNNING, RUNNING], False, "wait"),
        ("ready", [exited(0), exited(0)], False, "done"),
        ("ready", [exited(0), RUNNING], False, "restart"),  # after a while, see still_ending
        ("ready", [exited(3), exited(3)], True, "restart"),
        ("ready", [exited(4), exited(4)], True, "restart"),
        ("ready", [exited(137), exited(3)], True, "restart"),
        ("ready", [LOST, RUNNING], True, "restart"),
        ("ready", [exited(0), LOST], True, "restart"),
        ("ready", [RUNNING], True, "restart"),  # of two
        ("ready", [exited(0)], True, "restart"),
        ("ready", [exited(0), OTHER], True, "restart"),
        ("ready", [exited(3), exited(2)], True, "fail"),
        ("ready", [exited(1), RUNNING], True, "fail"),
        ("ready", [exited(1), exited(3)], False, "start"),  # of another day
        ("ready", [exited(4), exited(4)], False, "start"),
    ],
)
def test_what_is_decided(condition: Condition, workers: list[WorkerStatus], seen: bool, action: str) -> None:
    assert decide(condition, dict(enumerate(workers)), 2, KEY, seen) == action


def test_somebody_elses_run_is_left_alone() -> None:
    with pytest.raises(LaunchError, match="must be free for this run, got 20260101-000000-ffffffff running; `stop` it"):
        decide("ready", {0: status("running", None, OTHER.job), 1: NONE}, 2, KEY, seen=True)


def test_pauses_double_up_to_ten_minutes() -> None:
    assert [pause(times) for times in range(8)] == [15, 30, 60, 120, 240, 480, 600, 600]


class Script:
    """A launcher that sees what it is told to see, and notes what it does; its clock notes how long it would sleep."""

    def __init__(self, *seen: Any):
        self.seen = list(seen)
        """In order: a condition, a list of workers, or an error that looking raises."""
        self.done: list[str] = []
        self.slept: list[float] = []
        self.said: list[str] = []
        self._now: Any = None
        self.tpu = self.gcloud = self

    def look(self) -> SliceState:
        self._now = self.seen.pop(0)
        if isinstance(self._now, Exception):
            raise self._now
        return SliceState("ready", "READY", 2) if isinstance(self._now, list) else SliceState(self._now, self._now, 2)

    def status(self) -> dict[int, WorkerStatus]:
        return dict(enumerate(self._now))

    def logs(self, lines: int) -> str:
        return "[0] the last lines"

    def say(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.done.append(name)

    def watch(self, restarts: int = 10) -> int:
        launcher, job = cast(Launcher, self), cast(Job, SimpleNamespace(key=KEY))
        return Babysitter(launcher, job, 60.0, restarts, sleep=self.slept.append).run()


def test_from_nothing_over_a_preemption_to_the_end() -> None:
    script = Script(
        "missing", "waiting", [NONE, NONE], [RUNNING, RUNNING], "gone", [NONE, NONE], [exited(0), exited(0)]
    )
    assert script.watch() == 0
    assert script.done == ["create", "setup", "start", "delete", "create", "setup", "start"]
    assert script.slept == [15, 60, 60, 15]
    assert script.said[-1] == "READY; worker 0 ended with 0; worker 1 ended with 0; done"


def test_a_run_that_stopped_early_is_started_again_without_setting_up() -> None:
    script = Script([RUNNING] * 2, [exited(4)] * 2, [RUNNING] * 2, [exited(3)] * 2, [exited(0)] * 2)
    assert script.watch() == 0
    assert script.done == ["stop", "start", "stop", "start"]
    assert script.slept == [60, 15, 60, 30]


def test_the_others_get_time_to_end_before_they_are_stopped() -> None:
    one_ended = [exited(3), RUNNING]
    script = Script([RUNNING] * 2, one_ended, one_ended, one_ended, [exited(0)] * 2)
    assert script.watch() == 0
    assert script.done == ["stop", "start"]
    assert script.slept == [60, 60, 60, 15]


def test_a_mistake_is_not_tried_again() -> None:
    script = Script([RUNNING] * 2, [exited(3), exited(2)])
    assert script.watch() == 2
    assert script.done == ["stop"]
    assert script.said[-2:] == ["[0] the last lines", "worker 1 ended with exit code 2; not tried again"]


@pytest.mark.parametrize(
    ("code", "error"), [(3, LockstepError), (4, Interrupted), (137, LaunchError)], ids=["3", "4", "killed"]
)
def test_it_gives_up_after_so_many_restarts(code: int, error: type[Exception]) -> None:
    script = Script([RUNNING] * 2, *[[exited(code)] * 2] * 3)
    with pytest.raises(error, match="must end within 2 restarts, got worker 0 ended with"):
        script.watch(restarts=2)
    assert script.done.count("start") == 2


def gcloud_error(said: str) -> GcloudError:
    return GcloudError(["gcloud"], 1, said)


def test_missing_capacity_is_waited_for_without_end_and_faults_are_not() -> None:
    capacity, passing = gcloud_error("no more capacity in the zone"), gcloud_error("UNAVAILABLE")
    script = Script(*[capacity] * 8, passing, passing, [exited(0)] * 2)
    assert script.watch(restarts=2) == 0
    assert script.slept == [15, 30, 60, 120, 240, 480, 600, 600, 600, 600]
    with pytest.raises(GcloudError):
        Script(passing, passing, passing).watch(restarts=2)


def test_an_error_that_waiting_does_not_mend_ends_it() -> None:
    script = Script(gcloud_error("PERMISSION_DENIED"))
    with pytest.raises(GcloudError, match="roles/tpu.admin"):
        script.watch()
    assert script.slept == []


# --- on the stand-in -------------------------------------------------------------------------------------------------

LEARNER = """
import json, os, pathlib, sys, time, yaml
words = dict(word.partition("=")[::2] for word in sys.argv[2:])
directory = pathlib.Path(yaml.safe_load(open(sys.argv[1]))["run"]["dir"])
mine = directory / f"checkpoint{words['hosts.index']}"
assert words["checkpoint.resume"] == "auto", words
if os.environ.get("CODE_OF_1") and words["hosts.index"] == "1":
    print("a mistake")
    sys.exit(int(os.environ["CODE_OF_1"]))
step = int(mine.read_text()) if mine.exists() else 0
print("goes on from step", step)
if step == 0:
    mine.write_text("7")
    time.sleep(60)
print("finished")
"""


@pytest.fixture
def learner(tmp_path: Path, checkout: Path) -> Path:
    """A checkout whose run.py saves one step, then waits for its end; the second time it goes on from there."""
    (checkout / "scripts" / "run.py").write_text(LEARNER)
    git(checkout, "add", "-A")
    return checkout


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words for babysit: a config with a run.dir that is shared and outlives the machines."""
    monkeypatch.setattr(babysit, "FIRST_PAUSE", 0.05)
    run_dir = tmp_path / "shared"
    run_dir.mkdir()
    path = tmp_path / "training.yaml"
    path.write_text(json.dumps({"run": {"dir": str(run_dir)}, "checkpoint": {"every": 1, "resume": "never"}}))
    return ["babysit", "--type", "v5e-16", "--spot", "--poll", "0.1", "--run-dir-survives", str(path)]


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.full
@pytest.mark.parametrize("names", [("grpo",), ("grpo-0", "grpo-1")], ids=["one slice", "two slices"])
def test_a_preempted_slice_is_replaced_with_the_others_and_the_run_goes_on(
    stand_in: StandIn,
    learner: Path,
    training: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    count = len(names)

    def take_away() -> None:
        eventually(lambda: all((tmp_path / "shared" / f"checkpoint{host}").exists() for host in range(2 * count)))
        stand_in.preempt(names[-1])

    words = [*training, "--code", str(learner), "--slices", str(count), f"meshes.slices={count}"]
    thread = meanwhile(take_away)
    assert main(words) == 0
    thread.join()
    err = capsys.readouterr().err
    assert stand_in.load()["made"] == 2
    made = [verb for verb in stand_in.verbs() if verb.split()[1] in ("create", "delete")]
    assert made == ["queued-resources create", "queued-resources delete", "queued-resources create"]
    for home in (stand_in.home(worker, name) for name in names for worker in (0, 1)):
        assert (home / ".tpu_grpo/job/log").read_text() == "goes on from step 7\nfinished\n"
    lost = "" if count == 1 else "queued resource ACTIVE, node grpo-1 PREEMPTED (HEALTHY)"
    assert f"{lost}; recreate\n" in err  # of one slice: by the state of the node, or of the request
    assert f"worker {2 * count - 2} ended with 0; worker {2 * count - 1} ended with 0; done" in err
    assert main(words) == 0  # done already
    assert stand_in.load()["made"] == 2


@pytest.mark.full
def test_a_mistake_on_one_worker_ends_it_with_its_code_and_last_lines(
    stand_in: StandIn, learner: Path, training: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*training, "--code", str(learner), "--env", "CODE_OF_1=2"]) == 2
    err = capsys.readouterr().err
    assert "[1] a mistake" in err
    assert "worker 1 ended with exit code 2; not tried again" in err
    assert stand_in.load()["made"] == 1
    assert stand_in.processes() == []  # the other one was stopped


@pytest.mark.full
def test_a_run_dir_on_the_workers_own_disk_is_found_there(
    stand_in: StandIn, learner: Path, training: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing speaks against /mnt/b from here; the workers know better."""
    words = [word for word in training if word != "--run-dir-survives"]
    assert main([*words, "--code", str(learner), "run.dir=/mnt/b/x"]) == 2
    assert "run.dir must outlive the machine, got /mnt/b/x, which is on " in capsys.readouterr().err
    assert not (stand_in.home(0) / ".tpu_grpo/job").exists()
