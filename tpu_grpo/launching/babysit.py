"""Keeps one run going on preemptible machines: look, decide, act, sleep.

Each action depends only on what is observed, so this program can be killed and restarted at any time:

    machine missing                         create it
    machine gone (preempted, failed)        delete it, create it
    machine not ready yet                   wait
    ready, our run is not on it             set it up and start the run; also if the run failed before babysitting
    running on every worker                 wait
    ended with 0 on every worker            done
    a worker ended with 1 or 2              an error that a retry won't fix: stop all workers, show the last lines
    any other end (3, 4, killed, lost)      stop what still runs and restart, up to a limit

The run goes on from its newest checkpoint, because it is started with checkpoint.resume=auto and the same run.dir.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from tpu_grpo.launching.gcloud import GcloudError
from tpu_grpo.launching.jobs import Job
from tpu_grpo.launching.launcher import Launcher, WorkerStatus
from tpu_grpo.launching.tpu_slice import Condition, SliceState
from tpu_grpo.records.errors import Interrupted, LaunchError, LockstepError

type Action = Literal["create", "recreate", "wait", "start", "restart", "done", "fail"]

FINAL_CODES = (1, 2)
SHOWN_LINES = 30
GRACE_LOOKS = 2
"""Once one worker has ended, the other workers have this many polls to end by themselves."""
STOP_SECONDS = 60
"""When the run has failed on one worker, the other workers get this long to end before they are killed."""
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0


def decide(condition: Condition, workers: Mapping[int, WorkerStatus], expected: int, key: str, seen: bool) -> Action:
    """Choose what to do next.

    Args:
        condition: the observed state of the machine.
        workers: the newest run of each worker; empty unless the machine is ready.
        expected: how many workers there should be.
        key: the digest of our run; other runs on the machine are not restarted or stopped.
        seen: whether this babysitter started our run or saw it running; if not, a failure of the run is ignored.

    Raises:
        LaunchError: another run is running on the machine.
    """
    if condition != "ready":
        return {"missing": "create", "gone": "recreate", "waiting": "wait"}[condition]  # pyrefly: ignore[bad-return]
    states = list(workers.values())
    others = [status for status in states if not status.job.endswith(f"-{key}")]
    if busy := next((status.job for status in others if status.state == "running"), None):
        raise LaunchError(f"the workers must be free for this run, got {busy} running; `stop` it, or wait for its end")
    complete = not others and len(states) >= expected
    if complete and all(status.state == "running" for status in states):
        return "wait"
    if complete and all(status.exit_code == 0 for status in states):
        return "done"
    if len(others) == len(states) or not (seen or any(status.state == "running" for status in states)):
        return "start"
    return "fail" if any(status.exit_code in FINAL_CODES for status in states) else "restart"


class Babysitter:
    """Keeps one job running on one slice.

    Args:
        launcher: controls the slice.
        job: the run to start.
        poll: the seconds between looks.
        restarts: the most restarts of a run that ended early while its machine stayed, and also the most consecutive
            failures of gcloud; preemptions do not count.
        run_dir: refused if it is on a worker's own disk; None to skip this check.
        sleep: the function that waits for a number of seconds.
    """

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        poll: float,
        restarts: int,
        run_dir: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._launcher, self._job, self._poll, self._most, self._run_dir = launcher, job, poll, restarts, run_dir
        self._sleep, self._say = sleep, launcher.gcloud.say
        self._last_line = ""
        self._seen = False
        self._restarts = 0
        self._partly_ended = 0
        """The number of consecutive looks at which some workers had ended and others had not."""
        self._failures = self._tries = 0
        """``_tries`` counts consecutive errors of gcloud; ``_failures`` leaves out errors for lack of capacity."""

    def run(self) -> int:
        """Watch until the run has finished or failed; returns 0, or the exit code of the first worker that failed.

        Raises:
            LaunchError: gcloud failed too often, or in a way that waiting does not fix; or the run ended too often.
            Interrupted: the run ended too often, and in the last try all failed workers had exit code 4.
            LockstepError: the run ended too often, and in the last try all failed workers had exit code 3.
        """
        while True:
            try:
                code = self._look_and_act()
                self._failures = self._tries = 0
            except GcloudError as error:
                self._wait_after(error)
                continue
            if code is not None:
                return code

    def rehearse(self) -> None:
        """Do every action once, as after a preemption; used in a dry run, which prints the commands."""
        self._launcher.tpu.look()
        self._launcher.tpu.delete()
        self._launcher.tpu.create()
        state = self._launcher.tpu.look()
        self._setup()
        self._start(state)
        self._launcher.status()

    def _look_and_act(self) -> int | None:
        state = self._launcher.tpu.look()
        workers = self._launcher.status() if state.condition == "ready" else {}
        action = decide(state.condition, workers, state.workers, self._job.key, self._seen)
        if (line := f"{state.description}; {_summary(workers)}{action}") != self._last_line:
            self._say(line)
        self._last_line = line
        if action in ("restart", "fail", "done") and self._still_ending(workers):
            return None
        match action:
            case "create" | "recreate":
                if action == "recreate":
                    self._launcher.tpu.delete()
                self._launcher.tpu.create()
                self._sleep(FIRST_PAUSE)
            case "start":
                self._setup()
                self._start(state)
            case "restart":
                self._restart(state, workers)
            case "done":
                return 0
            case "fail":
                return self._fail(workers)
            case "wait":
                self._seen |= state.condition == "ready"
                self._sleep(self._poll)
        return None

    def _still_ending(self, workers: Mapping[int, WorkerStatus]) -> bool:
        """If workers that still run may end by themselves and print why, wait one poll and return True; else False."""
        running = any(status.state == "running" for status in workers.values())
        if not running or self._partly_ended >= GRACE_LOOKS:
            self._partly_ended = 0
            return False
        self._partly_ended += 1
        self._sleep(self._poll)
        return True

    def _setup(self) -> None:
        self._launcher.setup()
        if self._run_dir is not None:
            self._launcher.require_durable(self._run_dir)

    def _start(self, state: SliceState) -> None:
        self._launcher.start(self._job, state)
        self._seen = True

    def _restart(self, state: SliceState, workers: Mapping[int, WorkerStatus]) -> None:
        self._launcher.stop(STOP_SECONDS)
        if self._restarts >= self._most:
            self._say(self._launcher.logs(SHOWN_LINES))
            codes = [status.exit_code for status in workers.values() if status.exit_code]
            by_code = {3: LockstepError, 4: Interrupted}
            kind = by_code.get(codes[0], LaunchError) if len(set(codes)) == 1 else LaunchError
            raise kind(
                f"the run must end within {self._most} restarts, got {_summary(workers)}"
                "look at the logs above; --restarts allows more"
            )
        self._sleep(pause(self._restarts))
        self._restarts += 1
        self._start(state)

    def _fail(self, workers: Mapping[int, WorkerStatus]) -> int:
        self._launcher.stop(STOP_SECONDS)
        failed = {worker: s.exit_code for worker, s in workers.items() if s.exit_code in FINAL_CODES and s.exit_code}
        code = next(iter(failed.values()))
        self._say(self._launcher.logs(SHOWN_LINES))
        self._say(f"worker {', '.join(map(str, failed))} ended with exit code {code}; not tried again")
        return code

    def _wait_after(self, error: GcloudError) -> None:
        self._failures += error.kind != "capacity"
        if not error.is_retriable or self._failures > self._most:
            raise error
        seconds = pause(self._tries)
        self._tries += 1
        self._say(f"{error}\nlooking again in {seconds:g} s")
        self._sleep(seconds)


def pause(times: int) -> float:
    """Return the seconds before the next try, after this many tries: doubling, up to LONGEST_PAUSE."""
    return min(FIRST_PAUSE * 2**times, LONGEST_PAUSE)


def _summary(workers: Mapping[int, WorkerStatus]) -> str:
    return "".join(
        f"worker {worker} {status.state}{'' if status.exit_code is None else f' with {status.exit_code}'}; "
        for worker, status in sorted(workers.items())
    )
