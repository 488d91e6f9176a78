"""The end of a run: its message, its report, and how a thread other than the main thread ends the process.

A run ends in one of these ways, with the exit codes of tpu_grpo/records/errors.py:

    done, or an error of this host   the main thread returns or raises; `Watch` (watch.py) tells the other hosts
    another host is lost or failed   `end_process`, from the threads of `Watch`: 3
    a thread meets an error          `end_after`: the code of the error
    SIGINT or SIGTERM                `SignalledStop`: at the first signal, the run saves a checkpoint and ends with 4.
                                     Before the first step, it ends with 4 immediately, but not before the hosts have
                                     met, so that the others can be told. A second signal ends it with 1
    SIGHUP                           the terminal was closed, or its connection was lost: the run goes on

Host 0 runs jax's coordination service, through which hosts talk; when host 0 ends, the other hosts abort. So hosts
that stop leave together: each reports to the service that it has left, and host 0 leaves last.

The main thread may be inside a collective that never returns, where no exception can reach it. ``os._exit`` ends the
process nevertheless, without waiting for threads or for jax's own shutdown, which would wait for hosts that are gone.
Code that ends the process must neither raise nor wait for long: perhaps nobody reads this process' output any more,
its pipe is full, or the disk of its log is full, gone or hanging.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, Self

from tpu_grpo.records.errors import Interrupted, LockstepError, TpuGrpoError, disk_error

Outcome = Literal["done", "stopped", "failed"]
LEAVING_SECONDS = 15.0
"""Time limit for the main thread to print its own error, write the report, and end."""
WRITING_SECONDS = 1.0
"""Time limit for writing the last message to stderr and the log."""
TELLING_SECONDS = 12.0
"""Time limit for writing the report."""
HASTE_SECONDS = 3.0
"""Time limit for writing the report when a signal ends the process immediately."""
TELLING_HOSTS_SECONDS = 12.0
"""Time limit for telling the other hosts of an end: two of their polls of the coordination service."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPING = "the run stops as soon as nothing is lost, and saves a checkpoint; the same signal again ends it at once"
AT_START = "the run is ended before its first step"
KEPT = "the run ends before its first step, as soon as all hosts have met; the same signal again ends this host at once"
AT_ONCE = "the run is ended at once; its newest checkpoint stays where it is"


@dataclass(frozen=True)
class End:
    """How a run ended, for its report."""

    outcome: Outcome
    """``stopped`` means that a signal, or the user's code, asked the run to stop."""
    code: int
    """The exit code of the process."""
    message: str = ""
    """The last message of the run; may be empty."""

    @classmethod
    def by(cls, error: BaseException | None) -> "End":
        """Describe the end of a run that raised ``error``, or that is done if ``error`` is None."""
        match error:
            case None:
                return cls("done", 0)
            case Interrupted():
                return cls("stopped", error.exit_code, str(error))
            case KeyboardInterrupt():
                return cls("stopped", 1, "the run was interrupted at once; its newest checkpoint stays where it is")
            case OSError() if (explained := disk_error(error)) is not None:
                error = explained
        return cls("failed", exit_code(error), f"{type(error).__name__}: {error}")


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with an error."""
    return error.exit_code if isinstance(error, TpuGrpoError) else 1


class ThisProcess:
    """The state of this process that the functions below need to end it; other code updates it during the run."""

    index: int = 0
    stage: str = "start-up"
    log: Path | None = None
    """The host's log file, once there is one."""
    leaving_with: int | None = None
    """The exit code, if the process is already ending and will print the reason itself."""
    leave: Callable[[], None] | None = None
    """Tells the other hosts that this process has left; on host 0, first waits until all other hosts have left."""
    has_left: bool = False
    """Whether this process has left: from then on, a lost coordination service is not an error."""
    cause: End | None = None
    """The end that another host reported, and that ends all hosts; it is the cause of all later errors."""
    hosts_per_slice: int | None = None
    """The number of hosts of each slice, if there are several slices."""
    at_end: Callable[[End], None] | None = None
    """Writes the report; called with the `End` if a thread other than the main thread ends this process."""


this_process = ThisProcess()
alone = threading.Event()
"""Set once the coordination service is gone, so that no other host can be told anything."""
_ending = threading.Lock()


def host_names(indices: Sequence[int]) -> str:
    """Return the names of hosts for messages: "host 1", "hosts 0, 2, 3", or with slices "hosts 4, 5 (slice 1)"."""
    listed = ", ".join(map(str, indices))
    if this_process.hosts_per_slice:
        of = sorted({index // this_process.hosts_per_slice for index in indices})
        listed += f" (slice{'s' * (len(of) > 1)} {', '.join(map(str, of))})"
    return f"host{'s' * (len(indices) != 1)} {listed}"


# --- ending this process ---------------------------------------------------------------------------------------------


def end_process(message: str, code: int = LockstepError.exit_code) -> NoReturn:
    """End this process immediately because of another host, with the reason in ``this_process.cause``, or else
    ``message``."""
    cause = this_process.cause or End("failed", code, f"LockstepError: {message}")
    end_after(cause.message, cause.code, outcome=cause.outcome)


def end_after(
    line: str,
    code: int,
    tell_others: Callable[[], None] = lambda: None,
    *,
    outcome: Outcome = "failed",
    seconds: float = TELLING_SECONDS,
) -> NoReturn:
    """Print a line and the stage of this process, tell the other hosts, write the report, and end the process.

    Only the first call acts; a later call blocks until the process ends. If the main thread is already ending with its
    own error, it gets ``LEAVING_SECONDS`` to print that error. The line is printed before the other hosts are told,
    because host 0 may end as soon as it is told, and the end of host 0 ends this process.

    The report of ``this_process.at_end`` gets ``seconds``.
    """
    with _ending:  # never released
        if this_process.leaving_with is not None:
            time.sleep(LEAVING_SECONDS)
            os._exit(this_process.leaving_with)
        this_process.leaving_with = code
        whole = f"{line} (seen by host {this_process.index}, in stage {this_process.stage})\n".encode()
        # Not through sys.stderr or the logging module, whose locks the main thread may hold.
        writes: list[Callable[[], object]] = [lambda: os.write(2, whole)]
        if (log := this_process.log) is not None:
            writes.append(lambda: _append(log, whole))
        in_time(writes)
        tell_others()

        if (report := this_process.at_end) is not None:
            in_time([lambda: report(End(outcome, code, line))], seconds)
        _exit(code)


def leave_when_done(*, together: bool = False) -> None:
    """End this process with ``this_process.leaving_with`` once its main thread has ended, or after ``LEAVING_SECONDS``.

    Threads that wait for other hosts, such as those that save a checkpoint, are abandoned: Python would join them
    before it calls ``atexit`` functions. ``together`` says that all hosts end in this way; host 0 then ends last.
    """

    def leave() -> None:
        if together and this_process.leave is not None:
            this_process.leave()
        _exit(this_process.leaving_with or 1)

    def leave_after_main_thread() -> None:
        threading.main_thread().join(LEAVING_SECONDS)
        leave()

    atexit.register(leave)  # runs before jax's exit function, which would wait for the other hosts
    threading.Thread(target=leave_after_main_thread, daemon=True).start()


def in_time(calls: Sequence[Callable[[], object]], seconds: float = WRITING_SECONDS) -> None:
    """Make calls that may fail or never return, each on its own thread, and wait up to ``seconds`` for all of them."""
    threads: list[threading.Thread] = []
    for call in calls:
        thread = threading.Thread(target=_quietly, args=[call], daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python starts no thread while it shuts down
            _quietly(call)
        else:
            threads.append(thread)
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _exit(code: int) -> NoReturn:
    in_time([logging.shutdown, sys.stdout.flush, sys.stderr.flush])
    os._exit(code)


def _append(path: Path, line: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _quietly(call: Callable[[], object]) -> None:
    with suppress(OSError, ValueError):  # closed streams raise ValueError
        call()


# --- stopping because of a signal ------------------------------------------------------------------------------------


class StepAbandoned(Exception):
    """A step was abandoned before it changed anything, because the run is to stop."""


class StopRequest:
    """Records whether the run was asked to stop, by a signal or by ``also_asks``, which is called after every step."""

    def __init__(self, also_asks: Callable[[], bool] = lambda: False) -> None:
        self._also_asks = also_asks
        self.signalled = False
        """Whether a signal has come."""
        self._begun = False
        self._may_abandon = False

    @property
    def asked(self) -> bool:
        """Whether a signal has come, or ``also_asks`` returns True; read once after every step."""
        return self.signalled or self._also_asks()

    def begin(self) -> None:
        """Mark that steps begin: from now on a run that is asked to stop has something to save."""
        self._begun = True

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Let a signal end this block; the work of the block is then discarded. Raises StepAbandoned if a signal comes
        during the block, or came before."""
        self._may_abandon = True
        again, before = self._abandon_again, sys.unraisablehook
        sys.unraisablehook = lambda dropped: again() if dropped.exc_type is StepAbandoned else before(dropped)
        try:
            if self.signalled:
                raise StepAbandoned
            yield
            if self.signalled:  # the exception was dropped, and the block ended before it was raised again
                raise StepAbandoned
        finally:
            self._may_abandon, sys.unraisablehook = False, before

    def _abandon_again(self) -> None:
        """Raise StepAbandoned again: Python has dropped it, as of finalizers and the garbage collector's callbacks."""
        self._may_abandon = True
        signal.signal(signal.SIGVTALRM, lambda *_: self._abandon())
        later = 0.5  # seconds, because an exception within this hook would be dropped, too
        threading.Timer(later, signal.pthread_kill, [threading.get_ident(), signal.SIGVTALRM]).start()

    def _abandon(self) -> None:
        """Raise StepAbandoned if the main thread is in a block of `abandoning`; for signal handlers."""
        if self._may_abandon:
            self._may_abandon = False
            raise StepAbandoned


class InterruptedStop(StopRequest):
    """A context manager for a run in the user's program: Ctrl-C, or a notebook's stop button, asks it to stop.

    The first SIGINT asks the run to stop. A second SIGINT, or a SIGINT before the first step, raises KeyboardInterrupt.
    Outside the main thread, or if Python's default SIGINT handler has been replaced, signals are not handled here.
    """

    def __enter__(self) -> Self:
        self._answers = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._answers:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._answers:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signalled or not self._begun:
            raise KeyboardInterrupt
        self.signalled = True
        with suppress(RuntimeError):  # the signal came during another print
            print(f"SIGINT: {STOPPING}", file=sys.stderr)
        self._abandon()


class SignalledStop(StopRequest):
    """A stop request by SIGINT or SIGTERM, for a ``with`` block in the main thread.

        with SignalledStop(meets_others=True) as stop:
            ...                             # hosts meet; the first signal is remembered
            stop.hosts_met(tell_others)     # ends the process if a signal has come
            ...                             # the run is built; the first signal ends the process
            stop.begin()                    # the first signal now sets stop.asked, and the second ends the process
            with stop.abandoning():         # this work may be discarded: a signal raises StepAbandoned
                ...
            if stop.asked: ...

    Python runs signal handlers only in the main thread, which may be inside a compiler for minutes. So another thread
    reads the signals as the system delivers them, prints messages, and ends the process. ``meets_others`` says that
    there may be other hosts; they would wait in vain for this host if this host ended before all have met.
    """

    def __init__(self, *, meets_others: bool = False) -> None:
        super().__init__()
        self._answered = False
        self._meeting = meets_others
        self._kept: str | None = None
        self._tell_others: Callable[[End], None] = lambda end: None
        self._thread = threading.Thread(target=self._read_signals, daemon=True, name="signals")

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # worker processes inherit this
        self._woken_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, Interrupted) and (self.signalled or this_process.leave is not None)
        signal.set_wakeup_fd(self._woken_before)
        for number, handler in self._before.items():  # a signal sent to all hosts may still arrive here
            signal.signal(number, signal.SIG_IGN if stopped else handler)
        os.close(self._writing)  # ends the thread
        self._thread.join()
        os.close(self._reading)
        if stopped:
            this_process.leaving_with = Interrupted.exit_code
            leave_when_done(together=True)  # without waiting for reward threads that still run

    def hosts_met(self, tell_others: Callable[[End], None]) -> None:
        """Note that all hosts have met, so that ``tell_others`` works; end the process if a signal has already come."""
        self._tell_others, self._meeting = tell_others, False
        if self._kept is not None:
            self._end(f"{self._kept}: {AT_START}", Interrupted.exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, which Python may do long after ``_read_signals`` has answered it."""
        self.signalled = self._begun
        self._abandon()

    def _read_signals(self) -> None:
        """Answer signals as they come, whatever the main thread is doing."""
        while numbers := os.read(self._reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._answer(signal.Signals(number).name)

    def _answer(self, name: str) -> None:
        if not self._begun:
            if self._meeting and self._kept is None:
                self._kept = name
                _quietly(lambda: os.write(2, f"{name}: {KEPT}\n".encode()))
                if self._meeting:
                    return
            self._end(f"{name}: {AT_START}", Interrupted.exit_code)
        if self._answered:
            self._end(f"{name}: {AT_ONCE}", 1)
        self._answered = self.signalled = True
        _quietly(lambda: os.write(2, f"{name}: {STOPPING}\n".encode()))

    def _end(self, line: str, code: int) -> NoReturn:
        end = End("stopped", code, line)

        def tell() -> None:
            telling = threading.Thread(target=self._tell_others, args=[end], daemon=True)
            telling.start()
            telling.join(TELLING_HOSTS_SECONDS)

        end_after(line, code, tell, outcome="stopped", seconds=HASTE_SECONDS)
