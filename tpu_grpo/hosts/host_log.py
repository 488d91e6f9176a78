"""Each host's log: written to a file and, while a run starts, to stderr.

Consoles show the run once, from host 0; what the others did, and what libraries warned of there, is in every host's own
``<run.dir>/logs/host_<index>.log``: the stages it went through and how it ended. The start is said with the seconds
since its beginning:

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
"""Stages and errors of this host are logged here."""
BEGAN = time.monotonic()
EVERY_SECONDS = 5.0
"""What is counted is said again after so long, at the earliest."""


@contextmanager
def host_log(directory: Path, index: int) -> Iterator[None]:
    """Write everything that is logged in the block to this host's file in the directory.

    Stages have the level INFO; of libraries, only warnings and errors are written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    here.log = directory / f"host_{index}.log"
    handler = logging.FileHandler(here.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s host {index} %(levelname)s %(name)s: %(message)s"))
    loggers = (logging.getLogger(), logger)
    for each in loggers:
        each.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # libraries hang handlers of the console on the root
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
    """Print the stage that begins now to stderr, on host 0 for all."""
    if hosts.is_first:
        print(f"[{time.monotonic() - BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextmanager
def counted(hosts: Hosts, what: str) -> Iterator[Callable[[], None]]:
    """Print the stage that begins now, and now and then how often the yielded function was called, by any thread."""
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
