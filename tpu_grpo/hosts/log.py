"""Writes every host's own log, ``<run.dir>/logs/host_<index>.log``: the stages it went through and how it ended.

Consoles show the run once, from host 0; what the others did, and what libraries warned of there, is here.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_grpo.hosts.ending import here

logger = logging.getLogger("tpu_grpo.host")
"""Stages and errors of this host are logged here."""


@contextmanager
def host_log(directory: Path, index: int) -> Iterator[None]:
    """Append everything that is logged in the block to this host's file in the directory.

    Stages come at level INFO; of libraries, warnings and above.
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
