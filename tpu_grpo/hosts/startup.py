"""Says on stderr how far the start of a run is, with the seconds since its beginning; host 0 speaks for all.

[   1.2 s] checking the data
[   9.8 s] compiling the engine's programs: 3 done
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpu_grpo.hosts.agreement import Hosts

_BEGAN = time.monotonic()
EVERY_SECONDS = 5.0
"""What is counted is said again after so long, at the earliest."""


def announce(hosts: Hosts, what: str) -> None:
    """Say what begins now."""
    if hosts.is_first:
        print(f"[{time.monotonic() - _BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextmanager
def counted(hosts: Hosts, what: str) -> Iterator[Callable[[], None]]:
    """Say what begins now, and now and then how often the function that this yields was called, by any thread."""
    announce(hosts, what)
    lock, count, said = threading.Lock(), 0, time.monotonic()

    def tell() -> None:
        nonlocal count, said
        with lock:
            count += 1
            if time.monotonic() - said >= EVERY_SECONDS:
                said = time.monotonic()
                announce(hosts, f"{what}: {count} done")

    yield tell
