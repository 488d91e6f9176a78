"""Keeping one run going on machines that are taken away: look, decide, act, sleep.

What is done depends on what is seen and nothing else, so that it may be killed and started again at any time:

    machine missing                         create it
    machine gone (preempted, failed)        delete it, create it
    machine not ready yet                   wait
    ready, our run is not on it             set it up, start the run; also a run that ended before this watch began
    running on every worker                 wait
    ended with 0 on every worker            done
    a worker ended with 1 or 2              a mistake that repeating does not mend: stop all, show its last lines
    otherwise ended (3, 4, killed, lost)    stop what still runs, start again; at most so many times

The run goes on from its newest checkpoint, because it is started with checkpoint.resume=auto and the same run.dir.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tpu_grpo.errors import Interrupted, LaunchError, LockstepError
from tpu_grpo.launching.gcloud import GcloudError
from tpu_grpo.launching.machine import Condition
from tpu_grpo.launching.workers import WorkerStatus

type Action = Literal["create", "recreate", "wait", "start", "restart", "done", "fail"]

FINAL_CODES = (1, 2)
SHOWN_LINES = 30
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0


class Hands(Protocol):
    """What the loop does things with."""

    def look(self) -> tuple[Condition, str, int]:
        """Condition of the machine, what was said of it, and its number of workers."""
        ...

    def status(self) -> Mapping[int, WorkerStatus]:
        """The newest run on every worker."""
        ...

    def create(self) -> None:
        """Ask for the machine."""
        ...

    def delete(self) -> None:
        """Give it back."""
        ...

    def setup(self) -> None:
        """Give every worker the code and its environment."""
        ...

    def start(self) -> None:
        """Start the run on every worker."""
        ...

    def stop(self) -> None:
        """End what still runs."""
        ...

    def logs(self, lines: int) -> str:
        """The end of every worker's log."""
        ...


@dataclass(frozen=True)
class Patience:
    """How long and how often."""

    poll_seconds: float = 60.0
    restarts: int = 10
    """Starts on the same machine after a run ended early, and failures of gcloud in a row; preemptions do not count."""
    grace_polls: int = 2
    """Looks that the other workers get to end by themselves once one failed."""


def decide(condition: Condition, workers: Mapping[int, WorkerStatus], expected: int, key: str, seen: bool) -> Action:
    """What to do next.

    Args:
        condition: of the machine.
        workers: newest run of each; empty unless the machine is ready.
        expected: how many workers there should be.
        key: of our run; another's is not ours to judge.
        seen: whether our run was started, or seen running, by this watch; an older failure is no reason to give up.

    Raises:
        LaunchError: somebody else's run is going on.
    """
    if condition != "ready":
        return {"missing": "create", "gone": "recreate", "waiting": "wait"}[condition]  # type: ignore[return-value]
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
    """The loop."""

    def __init__(
        self, hands: Hands, key: str, patience: Patience, sleep: Callable[[float], None], say: Callable[[str], None]
    ):
        self._hands, self._key, self._patience = hands, key, patience
        self._sleep, self._say = sleep, say
        self._restarts = 0
        self._failures = self._tries = 0
        """Of gcloud in a row; those that only wait for capacity are not failures."""
        self._seen = False
        self._partly = 0
        """Looks in a row at which some workers had ended and others not."""
        self._said = ""

    def run(self) -> int:
        """Watch until the run ended for good; returns its exit code: 0, or that of the first worker that failed.

        Raises:
            LaunchError: gcloud failed in a way that waiting does not mend, or too often.
            Interrupted, LockstepError: the run ended early too often, by its last exit code.
        """
        while True:
            try:
                code = self._once()
                self._failures = self._tries = 0
            except GcloudError as error:
                self._count_failure(error)
                continue
            if code is not None:
                return code

    def _once(self) -> int | None:
        condition, said, expected = self._hands.look()
        workers = self._hands.status() if condition == "ready" else {}
        action = decide(condition, workers, expected, self._key, self._seen)
        self._tell(f"{said}; {_summary(workers)}{action}")
        if action in ("restart", "fail", "done") and self._still_ending(workers):
            return None
        match action:
            case "create" | "recreate":
                if action == "recreate":
                    self._hands.delete()
                self._hands.create()
                self._sleep(FIRST_PAUSE)
            case "start":
                self._hands.setup()
                self._begin()
            case "restart":
                self._restart(workers)
            case "done":
                return 0
            case "fail":
                return self._fail(workers)
            case "wait":
                self._seen |= condition == "ready"
                self._sleep(self._patience.poll_seconds)
        return None

    def _still_ending(self, workers: Mapping[int, WorkerStatus]) -> bool:
        """Wait a little for workers that still run: they end by themselves, and say why."""
        if not any(status.state == "running" for status in workers.values()):
            self._partly = 0
            return False
        self._partly += 1
        if self._partly > self._patience.grace_polls:
            self._partly = 0
            return False
        self._sleep(self._patience.poll_seconds)
        return True

    def _restart(self, workers: Mapping[int, WorkerStatus]) -> None:
        self._hands.stop()
        if self._restarts >= self._patience.restarts:
            self._say(self._hands.logs(SHOWN_LINES))
            ended = f"the run must end within {self._patience.restarts} restarts, got {_summary(workers)}"
            remedy = "look at the logs above; --restarts allows more"
            kind = {3: LockstepError, 4: Interrupted}.get(_worst(workers) or 0, LaunchError)
            raise kind(f"{ended}{remedy}")
        self._sleep(pause(self._restarts))
        self._restarts += 1
        self._begin()

    def _begin(self) -> None:
        self._hands.start()
        self._seen = True

    def _fail(self, workers: Mapping[int, WorkerStatus]) -> int:
        self._hands.stop()
        code = next(s.exit_code for s in workers.values() if s.exit_code in FINAL_CODES)
        failed = [worker for worker, status in workers.items() if status.exit_code in FINAL_CODES]
        self._say(self._hands.logs(SHOWN_LINES))
        self._say(f"worker {', '.join(map(str, failed))} ended with exit code {code}; not tried again")
        assert code is not None
        return code

    def _count_failure(self, error: GcloudError) -> None:
        if not (
            error.explanation.passes or error.explanation.kind in ("quota", "unknown", "worker", "missing", "exists")
        ):
            raise error
        self._failures += error.explanation.kind != "capacity"
        if self._failures > self._patience.restarts:
            raise error
        seconds = pause(self._tries)
        self._tries += 1
        self._say(f"{error}\nlooking again in {seconds:g} s")
        self._sleep(seconds)

    def _tell(self, line: str) -> None:
        if line != self._said:
            self._say(line)
        self._said = line


def pause(times: int) -> float:
    """Seconds before the next try: doubled each time, up to ten minutes."""
    return min(FIRST_PAUSE * 2**times, LONGEST_PAUSE)


def _summary(workers: Mapping[int, WorkerStatus]) -> str:
    words = [
        f"worker {worker} {status.state}" + (f" with {status.exit_code}" if status.exit_code is not None else "")
        for worker, status in sorted(workers.items())
    ]
    return "".join(f"{word}; " for word in words)


def _worst(workers: Mapping[int, WorkerStatus]) -> int | None:
    codes = [status.exit_code for status in workers.values() if status.exit_code]
    return codes[0] if codes and len(set(codes)) == 1 else None
