"""Counts the programs that XLA compiles in this process: after the second step of a run there should be none."""

import threading
from types import TracebackType
from typing import Any

import jax.monitoring

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""The event that jax (0.10.2) records each time an executable is made, and not when a call finds it in memory."""


class CompilationCounter:
    """Counts compilations since it was created, until it is closed.

        with CompilationCounter() as counter:
            jitted(x)      # first call with this shape: counter.count rises by one
            jitted(x)      # does not rise

    What an operation outside ``jax.jit`` needs counts too: each eager op is a program of its own for each new shape,
    and making an array can take several (``jnp.ones(5) + 1`` takes three). A jitted function called inside another
    is part of the outer program and counts nothing. A program that the persistent compilation cache on disk supplies
    counts like any other, because it holds the step up as well; so the count does not depend on that cache.
    """

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @property
    def count(self) -> int:
        """Return how many programs were compiled so far, by any thread."""
        return self._count

    def close(self) -> None:
        """Stop counting; a second call does nothing."""
        if self._open:
            self._open = False
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> "CompilationCounter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, event: str, duration_secs: float, **attributes: Any) -> None:
        if event == BACKEND_COMPILE:
            with self._lock:
                self._count += 1
