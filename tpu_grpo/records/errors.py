"""The errors that this package raises on purpose. All derive from `TpuGrpoError`, most also from a standard exception.

A message gives the rule that was broken, the value found and the remedy; scripts print it without a traceback and
exit with ``exit_code``.
"""

import errno
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGEST_REWARD = 1e15
"""A reward, times its weight, may not be larger in size: squares of float32 gradients would overflow."""


class TpuGrpoError(Exception):
    """Root of the package's errors."""

    exit_code = 1
    was_printed = False
    """Whether the user has seen the message."""


class ConfigError(TpuGrpoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class CheckpointError(TpuGrpoError, ValueError):
    """A model or run checkpoint that is missing, broken, or not what the run needs."""

    exit_code = 2


class DataError(TpuGrpoError, ValueError):
    """Data that is missing or malformed; the message names the file and line, if there is one."""

    exit_code = 2


class RewardError(TpuGrpoError, RuntimeError):
    """A reward that cannot be loaded, that raised, or that did not return one number per completion."""

    exit_code = 2


class EpisodeError(TpuGrpoError, RuntimeError):
    """An environment that cannot be loaded, or that failed in a conversation."""

    exit_code = 2


class CallbackError(TpuGrpoError, RuntimeError):
    """A user's callback that raised, or returned something other than True, False or None."""

    exit_code = 2


class RequestError(TpuGrpoError, ValueError):
    """A generation request that the engine can never serve, because it is empty, too long, or exceeds the cache."""

    exit_code = 2


class WeightsError(TpuGrpoError, ValueError):
    """Parameters of the trainer and of the sampler that do not match."""

    exit_code = 2


class NonFiniteError(TpuGrpoError, ArithmeticError):
    """A loss, gradient or log-probability that is not finite, or a log-probability above 0."""


class LockstepError(TpuGrpoError, RuntimeError):
    """Hosts that disagree, or a host that was lost."""

    exit_code = 3


class DiskError(TpuGrpoError, OSError):
    """A file that cannot be written, or can no longer be opened; what was written before is kept."""


class LaunchError(TpuGrpoError, RuntimeError):
    """A TPU that could not be obtained, or a command on its workers that failed."""


class PlanningError(TpuGrpoError, RuntimeError):
    """A compilation for a TPU slice that did not finish."""


class Interrupted(TpuGrpoError):
    """The run was asked to stop, and saved a checkpoint first."""

    exit_code = 4


_DISKS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EFBIG: "have the limit on the size of files raised (ulimit -f)",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "allow this user to write there",
    errno.EPERM: "allow this user to write there",
    errno.EIO: "see what the kernel says of the device",
    errno.ESTALE: "mount it again",
    errno.EMFILE: "have the limit on open files raised (ulimit -n)",
    errno.ENFILE: "have the limit on open files raised",
}
"""The remedies for operating system errors that a disk causes, by errno."""


def disk_error(error: OSError) -> DiskError | None:
    """Convert an operating system error to a DiskError; return None if its cause is not a disk."""
    if isinstance(error, DiskError):
        return error
    if error.errno not in _DISKS:
        return None
    where = f" {error.filename}" if error.filename else " what this command writes"
    return DiskError(
        f"the disk must take{where}, got: {os.strerror(error.errno)}; {_DISKS[error.errno]}, or name a directory "
        "elsewhere; what was saved stays as it is"
    )


@contextmanager
def disk_errors_explained(explain: Callable[[OSError | ValueError], DiskError | None] | None = None) -> Iterator[None]:
    """Raise a DiskError in place of an error whose cause is a disk.

    Args:
        explain: converts the error, or returns None if its cause is not a disk; by default `disk_error`.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        explained = explain(error) if explain else disk_error(error) if isinstance(error, OSError) else None
        if explained is None or explained is error:
            raise
        raise explained from error


def say(error: TpuGrpoError) -> None:
    """Print an error's message to stderr, once, without a traceback and without terminal control characters."""
    if not error.was_printed:
        error.was_printed = True
        what = str(error) if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"
        print(without_controls(what), file=sys.stderr, flush=True)


def without_controls(text: str) -> str:
    """Return a text with characters that control a terminal escaped, except newlines and tabs.

    >>> without_controls("a\x1b[2J\tb")
    'a\\x1b[2J\tb'
    """
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
