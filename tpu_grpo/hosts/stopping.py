"""Stops a run that is asked to, by Ctrl-C or by SIGTERM, as a preemption sends it.

    with SignalledStop() as stop:
        ...                             # what is built; the first signal ends the process
        stop.begin()                    # from now on the first signal only asks, and the second ends the process
        with stop.abandoning():         # what is done here may be thrown away: a signal raises StepAbandoned
            ...
        if stop.asked: ...

Python runs its handlers in the main thread only, which may be inside a compiler for minutes. So what is said, and the
end of the process, come from a thread that reads the numbers of signals as the system delivers them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn, Self

from tpu_grpo.hosts.ending import end_after, here, leave_when_done
from tpu_grpo.records.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TELLING_SECONDS = 2.0
"""The other hosts are told of an end at once for so long."""
HASTE_SECONDS = 3.0
"""An end at once takes so long to write the report and to tell people, at most."""
STOPPING = "the run stops as soon as nothing is lost, and saves a checkpoint; the same signal again ends it at once"
AT_START = "the run is ended before its first step"
AT_ONCE = "the run is ended at once; its newest checkpoint stays where it is"


class StepAbandoned(Exception):
    """A step was given up before it changed anything, because the run is to stop."""


class StopRequest:
    """Knows whether a run was asked to stop.

    Args:
        also_asks: is called after every step; a run that it says yes to stops there.
    """

    def __init__(self, also_asks: Callable[[], bool] = lambda: False) -> None:
        self._also_asks = also_asks
        self._signalled = False
        self._begun = False
        self._may_abandon = False

    @property
    def asked(self) -> bool:
        """Whether a signal has come, or the caller of the run wants it to stop; read once after every step."""
        return self._signalled or self._also_asks()

    @property
    def signalled(self) -> bool:
        """Whether a signal has come."""
        return self._signalled

    def begin(self) -> None:
        """Say that steps begin: from now on a run that is asked to stop has something to save."""
        self._begun = True

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Let a signal end this block, whose work can be thrown away.

        Raises:
            StepAbandoned: a signal comes in the block, or came before.
        """
        self._may_abandon = True
        try:
            if self._signalled:
                raise StepAbandoned
            yield
            if self._signalled:  # an exception that a handler raises is lost if it comes in a finalizer
                raise StepAbandoned
        finally:
            self._may_abandon = False


class SignalledStop(StopRequest):
    """Is asked by SIGINT and SIGTERM, for the time of a ``with`` block in the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self._answered = False
        self.tell_others: Callable[[str], None] = lambda message: None
        """Tells the other hosts that this one ends at once; it may block."""
        self._thread = threading.Thread(target=self._read_signals, daemon=True, name="signals")

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._woken_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._woken_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)  # which ends the thread
        self._thread.join()
        os.close(self._reading)
        if self._signalled and isinstance(error, Interrupted):
            here.leaving_with = error.exit_code
            leave_when_done()  # without the threads of rewards that go on

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run in the main thread, as soon as it is in Python: before the other thread has run, or long after."""
        self._signalled = self._begun
        if self._may_abandon:
            self._may_abandon = False
            raise StepAbandoned

    def _read_signals(self) -> None:
        """Answer signals as they come, whatever the main thread is doing."""
        while numbers := os.read(self._reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._answer(signal.Signals(number).name)

    def _answer(self, name: str) -> None:
        if not self._begun:
            self._end(f"{name}: {AT_START}", Interrupted.exit_code)
        if self._answered:
            self._end(f"{name}: {AT_ONCE}", 1)
        self._answered = self._signalled = True
        with suppress(OSError):  # nobody reads any more
            os.write(2, f"{name}: {STOPPING}\n".encode())

    def _end(self, line: str, code: int) -> NoReturn:
        def tell() -> None:
            telling = threading.Thread(target=self.tell_others, args=[line], daemon=True)
            telling.start()
            telling.join(TELLING_SECONDS)

        end_after(line, code, tell, outcome="stopped", seconds=HASTE_SECONDS)
