"""Detects that another host died, hangs, failed or decided differently, wherever the main thread is.

Two threads per process: one talks to the coordination service, and may block in it; the other only looks at the clock,
and ends the process. Both run while the main thread computes, compiles or waits in a collective, all of which release
the interpreter's lock; so a host that is only slow is not taken for a lost one. Where something never releases it, such
as a user's reward in C, no thread can run: a process of its own, which hears nothing any more, ends this one.
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

from tpu_grpo.hosts.coordination_service import attacked, read_told
from tpu_grpo.hosts.ending import End, alone, end_after, end_process, exit_code, here, host_names, leave_when_done
from tpu_grpo.hosts.host_agreement import Hosts
from tpu_grpo.hosts.host_log import logger
from tpu_grpo.records.errors import Interrupted, LockstepError

ROOT = "tpu_grpo/watch"
OWN_ERROR_SECONDS = 1.0
"""The time in which a host that hears of a failure may find the same error itself, as hosts that disagree do."""
TOLD_SECONDS = 0.2
"""While a failure is being told, hosts look so often whether all know."""
LOCAL_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")
"""Runtime errors that begin so are this host's own, and say nothing about another host."""
REMEMBERED = 4096
"""The number of steps of each activity in lockstep that are kept for comparison."""

SILENT_LOOKS = 10
"""A process that was silent for so many looks, of a tenth of the timeout each, is ended. One that was stopped with its
guard, such as by a machine that slept, misses only one."""
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
"""The program of that process; it ends with the one that it guards, whose pipe closes."""

type Beat = tuple[int, dict[str, tuple[int, str]]]
"""A heartbeat: its number, and for each thing that hosts decide alike the last step and its digest."""


class Progress:
    """The position of this host in each activity that hosts do in lockstep; its heartbeats carry the latest.

    Hosts that drive one engine and decide differently launch different programs, and wait in collectives that never
    end: none of them gets to the comparison after the rollout. But each has noted what it decided before it launched:

        host 0: replica 0 at step 7, digest a1     host 1: replica 0 at step 9, digest c4
        host 1 remembers b2 for its step 7: both end, and step 7, or an earlier one, is where they parted

    The main thread writes it, and the threads of `Watch` read it.
    """

    def __init__(self) -> None:
        self._noted: dict[str, dict[int, str]] = {}

    def note(self, what: str, step: int, digest: str) -> None:
        """Record what this host is about to do at a step; hosts that do the same record the same."""
        noted = self._noted.setdefault(what, {})
        noted[step] = digest
        for old in list(islice(noted, max(0, len(noted) - REMEMBERED))):
            del noted[old]

    def latest(self) -> dict[str, tuple[int, str]]:
        """Return the latest step of each activity, for the other hosts."""
        return {what: next(reversed(noted.items())) for what, noted in self._noted.copy().items() if noted}

    def contradiction(self, others: Mapping[str, tuple[int, str]]) -> str | None:
        """Return what another host decided differently, by its heartbeat; None if nothing is known."""
        for what, (step, digest) in others.items():
            own = self._noted.get(what, {}).get(step)
            if own is not None and own != digest:
                return f"{what} at step {step}, {own[:12]} here and {digest[:12]} there"
        return None


progress = Progress()
"""This process notes its progress here."""
_watching: list["Watch"] = []
"""What watches over the hosts of this process now: one, or none."""


def end_all_hosts(error: BaseException, what: str) -> None:
    """End this host and the others because of an error on a thread that the main one cannot hear of in time.

    The exit code is that of the error, and ``what`` says what came of it. Without other hosts nothing is done.
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

    Leaving the block without an error, or because the run was interrupted (on every host), waits for the other hosts.
    Leaving it with an error tells them, and the error goes on. If it may be a lost host's doing, such as a collective
    whose connection closed, the heartbeats are awaited first, and the lost host is named.

    A host silent for ``timeout_seconds`` is lost; ``every`` is the seconds between heartbeats. One host is not watched.
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
        """When this host heard that another one failed."""
        self._all_know = threading.Event()
        """Set once every other host has failed, or knows of the failure."""
        self._threads: list[threading.Thread] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name the stage of the block, for timelines, and for the last message of a process that ends in it."""
        before, here.stage = here.stage, name
        began = time.monotonic()
        logger.info("%s begins", name)
        named = nullcontext()
        if "jax" in sys.modules:  # not in a process' first stages; without it there is no timeline
            from jax.profiler import TraceAnnotation

            named = TraceAnnotation(name)
        with named:
            yield
        logger.info("%s ends after %.3f s", name, time.monotonic() - began)
        here.stage = before  # not after an error: that is where this process was when it happened

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
            here.leaving_with = exit_code(error)
            self.report_end(End("failed", here.leaving_with, f"{type(error).__name__}: {error}"))
            leave_when_done()
            self._stop.set()
            return
        self.hosts.barrier("the end of the run")
        if error is not None:  # from now on a host that has left is not lost
            here.leaving_with = Interrupted.exit_code
        self._stop.set()
        self._talk_now.set()
        for thread in self._threads:  # one that returned from C++ into an interpreter that has ended would crash it
            thread.join(2 * self.every)

    def rule_out_a_lost_host(self, error: BaseException) -> None:
        """Return if no other host is lost; an error that a lost one may have caused is believed after the timeout."""
        if _may_be_a_lost_host(error):
            time.sleep(self.timeout_seconds + 2 * self.every)  # ends here if one is

    def report_end(self, own: End) -> None:
        """Make the other hosts end, with this host's name and message; returns once they know, or cannot be reached.

        They end with 4 where this host was stopped before anything was to be saved, else with 3. This host goes on, and
        is to end by itself: it is no longer ended for what happens to the others.
        """
        if self.hosts.service is None:
            return
        here.leaving_with = here.leaving_with or own.code
        if own.outcome == "stopped" and own.code == Interrupted.exit_code:
            told = End("stopped", own.code, f"host {self.hosts.index} was stopped: {own.message}")
        else:
            message = f"LockstepError: host {self.hosts.index} failed: {own.message}"
            told = End("failed", LockstepError.exit_code, message)
        self._failure = json.dumps(asdict(told))
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
            with suppress(JaxRuntimeError):  # no answer; if it lasts, the other thread ends the process
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
            told: Beat = read_told(beat, Beat, key)
            if last and told[0] < read_told(last, Beat, key)[0]:
                raise attacked(key, "an earlier value again")
            self._beats[index] = (beat, now)
            if self._failure is None and (difference := progress.contradiction(told[1])):
                end_process(
                    f"host {index} and this host must decide alike in what they share, and differ in {difference}; set "
                    "hosts.check=step to find the first step that differs"
                )
        failures = {index: seen[f"failure/{index}"] for index in self._others if f"failure/{index}" in seen}
        if failures and self._heard_at is None:
            index, message = next(iter(failures.items()))
            here.cause, self._heard_at = read_told(message, End, f"{ROOT}/failure/{index}"), now
            service.put(f"{ROOT}/heard/{me}", b"", overwrite=True)
        if all(f"heard/{index}" in seen or index in failures for index in self._others):
            self._all_know.set()

    def _end_with_the_others(self, waited: float) -> None:
        """End because another host failed, when all know why; host 0, through which they talk, is the last."""
        patience = 2 * self.every if not self._all_know.is_set() else min(self.every, OWN_ERROR_SECONDS)
        if waited >= patience:
            self._let_the_others_leave()
            if self._failure is None:
                end_process("another host failed")

    def _let_the_others_leave(self) -> None:
        """Let host 0, whose end closes the others' connections, be the last."""
        if self.hosts.is_first:
            time.sleep(min(self.every, OWN_ERROR_SECONDS) + 2 * TOLD_SECONDS)

    # --- the thread that looks at the clock --------------------------------------------------------------------------

    def _look(self) -> None:
        pause = min(self.every, self.timeout_seconds / (2 * SILENT_LOOKS))
        looked = time.monotonic()
        assert self._guard.stdin is not None
        while not self._stop.wait(pause):
            with suppress(BrokenPipeError):  # somebody ended the guard
                os.write(self._guard.stdin.fileno(), b".")
            now = time.monotonic()
            if now - looked > self.timeout_seconds / 2:  # it is this process that was stopped: the clocks start again
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
    """Run one of the threads; a host that no longer watches must not go on as if it did."""
    try:
        run()
    except Exception as error:
        what = f"this host cannot watch the others any more: {type(error).__name__}: {error}"
        end_process(what, code=exit_code(error))


def _may_be_a_lost_host(error: BaseException | None) -> bool:
    """Return whether an error looks like a broken collective; gloo raises ValueError, others jax's runtime error."""
    from jax.errors import JaxRuntimeError

    if error is None:
        return False
    if isinstance(error, ValueError) and "Gloo" in str(error):
        return True
    if isinstance(error, JaxRuntimeError) and not str(error).startswith(LOCAL_ERRORS):
        return True
    return _may_be_a_lost_host(error.__cause__)
