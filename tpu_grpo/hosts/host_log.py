"""The log file of each host, and the lines on stderr that show the progress of a run's start.

Every host has a log file ``<run.dir>/logs/host_<index>.log`` with the stages it went through, the warnings of
libraries, and how it ended. Only host 0 prints to stderr: the stages of the start, with the seconds since the process
began:

    [   1.2 s] checking the data
    [   9.8 s] compiling the engine's programs: 3 done
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_grpo.hosts.ending import here
from tpu_grpo.hosts.host_agreement import Hosts

logger = logging.getLogger("tpu_grpo.host")
"""The logger for stages and errors of this host."""
BEGAN = time.monotonic()
EVERY_SECONDS = 5.0
"""The shortest time between two counts that `counted` prints."""


@contextmanager
def host_log(directory: Path, index: int) -> Iterator[None]:
    """Write everything that is logged in the block to this host's file in the directory.

    Stages have the level INFO; from libraries, only warnings and errors are written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    here.log = directory / f"host_{index}.log"
    handler = logging.FileHandler(here.log, encoding="utf-8")
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
        logger.exception("ended in stage %s by", here.stage)
        raise
    finally:
        for each in loggers:
            each.removeHandler(handler)
        handler.close()
        here.log = None


def announce(hosts: Hosts, what: str) -> None:
    """Print the name of a stage that begins now to stderr, on host 0 only."""
    if hosts.is_first:
        print(f"[{time.monotonic() - BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextmanager
def counted(hosts: Hosts, what: str) -> Iterator[Callable[[], None]]:
    """Announce a stage, and yield a function that counts its calls, from all threads; print the count now and then."""
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
