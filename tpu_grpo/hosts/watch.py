"""Threads that notice when another host died, hangs, failed or decided differently (`Progress`), and end the process.

One thread exchanges heartbeats through the coordination service, and may block there. The other watches the clock, and
ends the process. Both run while the main thread computes, compiles or waits in a collective, all of which release the
GIL; so a slow host is not taken for a lost one. Code that never releases the GIL, such as a user's reward in C, stops
both threads. Then a separate guard process, which gets no more signs of life from them, kills this process.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from typing import Self

from tpu_grpo.hosts.ending import (
    End,
    alone,
    end_after,
    end_process,
    exit_code,
    host_names,
    leave_when_done,
    this_process,
)
from tpu_grpo.hosts.host_agreement import Hosts, attacked, read_told
from tpu_grpo.hosts.host_log import logger
from tpu_grpo.records.errors import Interrupted, LockstepError

ROOT = "tpu_grpo/watch"
OWN_ERROR_SECONDS = 1.0
"""A host that hears of another host's failure waits this long, as it may be about to raise the same error itself."""
TOLD_SECONDS = 0.2
"""While a failure is being announced, hosts check at this interval whether all hosts know."""
LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")
"""Runtime errors that begin with one of these words come from this host itself, not from losing another host."""
REMEMBERED = 4096
"""`Progress` keeps the digests of this many latest steps of each activity."""

SILENT_LOOKS = 10
"""The guard kills a process that was silent for this many intervals, each a tenth of the timeout. If process and guard
were suspended together, such as by a sleeping machine, only one interval is missed."""
GUARD = f"""
import os, select, sys
silent = 0
while silent < {SILENT_LOOKS}:
    silent += 1
    if select.select([0], [], [], float(sys.argv[2]))[0]:
        if not os.read(0, 4096):
            sys.exit()
        silent = 0
os.write(2, b"LockstepError: something has held the interpreter's lock of this host for too long, such as a "
         b"reward in C with workers: 0; the host is ended; give that reward workers: 1\\n")
os.kill(int(sys.argv[1]), 9)
"""
"""The program of the guard process; it ends when the pipe from the guarded process closes."""

type Beat = tuple[int, dict[str, tuple[int, str]]]
"""A heartbeat: (number of the heartbeat, {activity: (latest step, digest of the decision)}), see `Progress`."""


class Progress:
    """Records what this host decided in activities that hosts do in lockstep; heartbeats carry the latest decisions.

    An activity is, for example, the launches of an engine that several hosts drive. If these hosts decide differently,
    they wait in collectives of different programs forever. So each host notes a digest of its decision before a launch:

        host 0: replica 0 at step 7, digest a1     host 1: replica 0 at step 9, digest c4
        host 1 remembers digest b2 for step 7: both end; they first differed at step 7 or earlier

    The main thread writes, and the threads of `Watch` read.
    """

    def __init__(self) -> None:
        self._noted: dict[str, dict[int, str]] = {}

    def note(self, what: str, step: int, digest: str) -> None:
        """Record the digest of what this host is about to do in activity ``what`` at a step, such as a launch."""
        noted = self._noted.setdefault(what, {})
        noted[step] = digest
        for old in list(islice(noted, max(0, len(noted) - REMEMBERED))):
            del noted[old]

    def latest(self) -> dict[str, tuple[int, str]]:
        """Return the latest step and digest of each activity, for the other hosts."""
        return {what: next(reversed(noted.items())) for what, noted in self._noted.copy().items() if noted}

    def contradiction(self, others: Mapping[str, tuple[int, str]]) -> str | None:
        """Compare with another host's heartbeat; return a description of a different decision, or None."""
        for what, (step, digest) in others.items():
            own = self._noted.get(what, {}).get(step)
            if own is not None and own != digest:
                return f"{what} at step {step}, {own[:12]} here and {digest[:12]} there"
        return None


progress = Progress()
"""The progress of this process."""
_watching: list["Watch"] = []
"""The active `Watch` of this process, if there is one."""


def end_all_hosts(error: BaseException, what: str) -> None:
    """End all hosts because of an error on another thread: the main thread may be waiting for the other hosts.

    The exit code is that of the error; ``what`` describes the error's effect. Does nothing without other hosts.
    """
    for watch in _watching:
        watch.rule_out_a_lost_host(error)
        end = End("failed", exit_code(error), f"{type(error).__name__}: {what}: {error}")
        end_after(end.message, end.code, lambda watch=watch, end=end: watch.report_end(end))


class Watch:
    """Ends this process with exit code 3 and one message when another host is lost or failed.

        with Watch(hosts) as watch:
            with watch.stage("rollout"):
                ...

    At the end of the block, or if all hosts were interrupted in it, `Watch` waits for the other hosts. If an error
    leaves the block, `Watch` tells the other hosts. A lost host may have caused the error, for example by closing a
    collective's connection; then `Watch` first waits for heartbeats, and names a lost host.

    A host is lost after ``timeout_seconds`` without a heartbeat; ``every`` is the seconds between heartbeats. With a
    single host nothing is watched.
    """

    def __init__(self, hosts: Hosts, timeout_seconds: float = 45.0, every: float = 5.0) -> None:
        if not 0 < 2 * every <= timeout_seconds:
            raise ValueError(f"timeout_seconds must hold two heartbeats, got {timeout_seconds:g}, with every={every:g}")
        self.hosts = hosts
        self.timeout_seconds = timeout_seconds
        self.every = every
        self._others = [index for index in range(hosts.count) if index != hosts.index]
        self._stop = threading.Event()
        self._talk_now = threading.Event()
        self._failure: str | None = None
        self._heard_at: float | None = None
        """When this host heard that another host failed; None before."""
        self._all_know = threading.Event()
        """Set once every other host has failed, or knows of the failure."""
        self._threads: list[threading.Thread] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Set the process's stage during the block; profiles, the log and the message of an early end show it."""
        before, this_process.stage = this_process.stage, name
        began = time.monotonic()
        logger.info("%s begins", name)
        named = nullcontext()
        if "jax" in sys.modules:  # the first stages come before jax; they need no timeline
            from jax.profiler import TraceAnnotation

            named = TraceAnnotation(name)
        with named:
            yield
        logger.info("%s ends after %.3f s", name, time.monotonic() - began)
        this_process.stage = before  # not after an error, so that its message names this stage

    def __enter__(self) -> Self:
        if self.hosts.service is None:
            return self
        now = time.monotonic()
        self._answered = now
        self._beats: dict[int, tuple[bytes, float]] = dict.fromkeys(self._others, (b"", now))
        self._threads = [
            threading.Thread(target=_watchful, args=[run], daemon=True) for run in (self._talk, self._look)
        ]
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", "-c", GUARD, str(os.getpid()), str(self.timeout_seconds / SILENT_LOOKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        for thread in self._threads:
            thread.start()
        _watching.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.hosts.service is None:
            return
        _watching.remove(self)
        if error is not None and not isinstance(error, Interrupted):
            self.rule_out_a_lost_host(error)
            this_process.leaving_with = exit_code(error)
            self.report_end(End("failed", this_process.leaving_with, f"{type(error).__name__}: {error}"))
            leave_when_done()
            self._stop.set()
            return
        self.hosts.barrier("the end of the run")
        if error is not None:  # interrupted: from now on a host that leaves is not lost
            this_process.leaving_with = Interrupted.exit_code
        self._stop.set()
        self._talk_now.set()
        for thread in self._threads:  # returning from C++ after the interpreter has ended would crash
            thread.join(2 * self.every)

    def rule_out_a_lost_host(self, error: BaseException) -> None:
        """If a lost host may have caused ``error``, wait for heartbeats; this returns only if no host is lost."""
        if _may_be_a_lost_host(error):
            time.sleep(self.timeout_seconds + 2 * self.every)  # the process ends here if a host is lost

    def report_end(self, own: End) -> None:
        """Make the other hosts end, with this host's name and message; returns once they know, or cannot be reached.

        Their exit code is 4 if this host was stopped before there was anything to save, else 3. This host goes on, and
        must end by itself: a lost or failed host no longer ends it.
        """
        if self.hosts.service is None:
            return
        this_process.leaving_with = this_process.leaving_with or own.code
        if own.outcome == "stopped" and own.code == Interrupted.exit_code:
            sent = End("stopped", own.code, f"host {self.hosts.index} was stopped: {own.message}")
        else:
            message = f"LockstepError: host {self.hosts.index} failed: {own.message}"
            sent = End("failed", LockstepError.exit_code, message)
        self._failure = json.dumps(asdict(sent))
        self._talk_now.set()
        end = time.monotonic() + 3 * self.every
        while not (self._all_know.wait(TOLD_SECONDS) or alone.is_set()) and time.monotonic() < end:
            pass
        if self._all_know.is_set():
            self._let_the_others_leave()

    # --- the thread that talks ---------------------------------------------------------------------------------------

    def _talk(self) -> None:
        from jax.errors import JaxRuntimeError

        count = 0
        while not self._stop.is_set():
            count += 1
            with suppress(JaxRuntimeError):  # no answer; if that lasts, the other thread ends the process
                self._exchange(count)
            if self._heard_at is not None and self._failure is None:
                self._end_with_the_others(time.monotonic() - self._heard_at)
            self._talk_now.wait(self.every if self._failure is self._heard_at is None else TOLD_SECONDS)
            self._talk_now.clear()

    def _exchange(self, count: int) -> None:
        service, me = self.hosts.service, self.hosts.index
        assert service is not None
        service.put(f"{ROOT}/beat/{me}", json.dumps([count, progress.latest()]).encode(), overwrite=True)
        if self._failure is not None:
            service.put(f"{ROOT}/failure/{me}", self._failure.encode(), overwrite=True)
        seen = service.list(ROOT)
        if f"beat/{me}" not in seen:
            raise attacked(f"{ROOT}/beat/{me}", "nothing any more")
        now = time.monotonic()
        self._answered = now
        for index in self._others:
            beat = seen.get(f"beat/{index}", b"")
            if beat == self._beats[index][0]:
                continue
            key, last = f"{ROOT}/beat/{index}", self._beats[index][0]
            heartbeat: Beat = read_told(beat, Beat, key)
            if last and heartbeat[0] < read_told(last, Beat, key)[0]:
                raise attacked(key, "an earlier value again")
            self._beats[index] = (beat, now)
            if self._failure is None and (difference := progress.contradiction(heartbeat[1])):
                end_process(
                    f"host {index} and this host must decide alike in what they share, and differ in {difference}; set "
                    "hosts.check=step to find the first step that differs"
                )
        failures = {index: seen[f"failure/{index}"] for index in self._others if f"failure/{index}" in seen}
        if failures and self._heard_at is None:
            index, message = next(iter(failures.items()))
            this_process.cause, self._heard_at = read_told(message, End, f"{ROOT}/failure/{index}"), now
            service.put(f"{ROOT}/heard/{me}", b"", overwrite=True)
        if all(f"heard/{index}" in seen or index in failures for index in self._others):
            self._all_know.set()

    def _end_with_the_others(self, waited: float) -> None:
        """End this process after another host's failure, once all hosts know of it or time is up; host 0 ends last."""
        patience = 2 * self.every if not self._all_know.is_set() else min(self.every, OWN_ERROR_SECONDS)
        if waited >= patience:
            self._let_the_others_leave()
            if self._failure is None:
                end_process("another host failed")

    def _let_the_others_leave(self) -> None:
        """On host 0, whose end closes all connections, wait until the other hosts have ended."""
        if self.hosts.is_first:
            time.sleep(min(self.every, OWN_ERROR_SECONDS) + 2 * TOLD_SECONDS)

    # --- the thread that looks at the clock --------------------------------------------------------------------------

    def _look(self) -> None:
        pause = min(self.every, self.timeout_seconds / (2 * SILENT_LOOKS))
        looked = time.monotonic()
        assert self._guard.stdin is not None
        while not self._stop.wait(pause):
            with suppress(BrokenPipeError):  # somebody killed the guard
                os.write(self._guard.stdin.fileno(), b".")
            now = time.monotonic()
            if now - looked > self.timeout_seconds / 2:  # this process itself was suspended: restart the clocks
                self._answered = now
                self._beats = {index: (beat, now) for index, (beat, _) in self._beats.items()}
            looked = now
            if now - self._answered > self.timeout_seconds:
                alone.set()
                end_process(
                    f"lost host 0: the coordination service it runs has not answered for {now - self._answered:.0f} s"
                )
            silent = {index: now - at for index, (_, at) in self._beats.items() if now - at > self.timeout_seconds}
            if silent:
                end_process(f"lost {host_names(list(silent))}: no heartbeat for {max(silent.values()):.0f} s")
        self._guard.stdin.close()
        self._guard.wait()


def _watchful(run: Callable[[], None]) -> None:
    """Run a thread's function; if it raises, end the process, because a host must not go on without `Watch`."""
    try:
        run()
    except Exception as error:
        what = f"this host cannot watch the others any more: {type(error).__name__}: {error}"
        end_process(what, code=exit_code(error))


def _may_be_a_lost_host(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, looks like a broken collective.

    Gloo raises ValueError, other collectives jax's runtime error.
    """
    from jax.errors import JaxRuntimeError

    while error is not None:
        if isinstance(error, ValueError) and "Gloo" in str(error):
            return True
        if isinstance(error, JaxRuntimeError) and not str(error).startswith(LOCAL_ERRORS):
            return True
        error = error.__cause__
    return False
