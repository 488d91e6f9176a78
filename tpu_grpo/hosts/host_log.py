"""The log file of each host, and the lines on stderr that show the progress of a run's start.

Every host has a log file ``<run.dir>/logs/host_<index>.log`` with the stages it went through, the warnings of
libraries, and how it ended. Only host 0 prints to stderr: the stages of the start, with the seconds since the process
began:

    [   1.2 s] checking the data
    [   9.8 s] compiling the engine's programs: 3 done
    [  39.8 s] compiling the engine's programs: not finished yet
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_grpo.hosts.ending import this_process
from tpu_grpo.hosts.host_agreement import Hosts

logger = logging.getLogger("tpu_grpo.host")
"""The logger for stages and errors of this host."""
BEGAN = time.monotonic()
EVERY_SECONDS = 5.0
"""The shortest time between two counts that `counted` prints."""
SILENT_SECONDS = 30.0
"""If a stage prints nothing for so long, `with_reminders` says that it goes on."""
_stage, _printed = "", BEGAN


@contextmanager
def host_log(directory: Path, index: int) -> Iterator[None]:
    """Write everything that is logged in the block to this host's file in the directory.

    Stages have the level INFO; from libraries, only warnings and errors are written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    this_process.log = directory / f"host_{index}.log"
    handler = logging.FileHandler(this_process.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s host {index} %(levelname)s %(name)s: %(message)s"))
    loggers = (logging.getLogger(), logger)
    for each in loggers:
        each.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # libraries attach console handlers to the root logger
    logger.info("host %d begins", index)
    try:
        yield
    except BaseException:
        logger.exception("ended in stage %s by", this_process.stage)
        raise
    finally:
        for each in loggers:
            each.removeHandler(handler)
        handler.close()
        this_process.log = None


def announce(hosts: Hosts, what: str) -> None:
    """Print the name of a stage that begins now to stderr, on host 0 only."""
    global _stage, _printed
    if hosts.is_first:
        _stage, _printed = what, time.monotonic()
        _print(what)


def _print(what: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextmanager
def with_reminders(hosts: Hosts) -> Iterator[Callable[[], None]]:
    """While a stage of the block prints nothing, print every 30 seconds that it goes on, on host 0; yield a function
    that ends this early."""
    global _printed
    ended, _printed = threading.Event(), time.monotonic()

    def remind() -> None:
        global _printed
        while not ended.wait(max(0.0, _printed + SILENT_SECONDS - time.monotonic())):
            if time.monotonic() - _printed >= SILENT_SECONDS:
                _printed = time.monotonic()
                _print(f"{_stage}: not finished yet")

    if hosts.is_first:
        threading.Thread(target=remind, name="reminders", daemon=True).start()
    try:
        yield ended.set
    finally:
        ended.set()


@contextmanager
def counted(hosts: Hosts, what: str) -> Iterator[Callable[[], None]]:
    """Announce a stage, and yield a function that counts its calls, from all threads; print the count now and then."""
    announce(hosts, what)
    lock, count, printed_at = threading.Lock(), 0, time.monotonic()

    def tell() -> None:
        nonlocal count, printed_at
        with lock:
            count += 1
            if time.monotonic() - printed_at >= EVERY_SECONDS:
                printed_at = time.monotonic()
                announce(hosts, f"{what}: {count} done")

    yield tell
