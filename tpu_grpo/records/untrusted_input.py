"""Reads untrusted files and texts within limits on size, nesting depth and time.

Data, checkpoints, configs and the files of a run may have been written by anybody. Reading a pipe may never return,
/dev/zero never ends, a line of gigabytes fills the memory, and JSON nested 50,000 deep exceeds Python's recursion
limit. For all of these, the functions here raise errors that callers handle for broken files anyway:

    open_file(path)      OSError for anything but a regular file
    read_file(path)      OSError for a large file, too
    lines_of(file)       DataError for a long line
    parse_json(text)     json.JSONDecodeError for any text that cannot be used
    bounded(30.0)        TimeoutError for code that takes longer, MemoryError for code that needs too much memory
"""

import errno
import json
import os
import re
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from tpu_grpo.records.errors import DataError

LARGEST = 2**28
"""The most bytes of a file that is read as a whole; the largest tokenizers have a tenth of this."""
LONGEST = 2**26
"""The most bytes or characters of a line, with its newline."""
DEEPEST = 100
"""The deepest nesting of JSON that is accepted."""


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading; raises OSError immediately for anything else."""
    if path.is_dir():
        _refuse(path, errno.EISDIR)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return _refuse(path, errno.EINVAL)


def _refuse(path: Path, number: int, why: str = "it must be a regular file") -> NoReturn:
    raise OSError(number, f"{os.strerror(number)}: {why}", str(path))


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Read a whole file; raises OSError for more than ``most`` bytes, or anything but a regular file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(most, max(size, 2**20)) + 1)  # as much memory is taken before anything is read
        if len(content) > max(size, 2**20):  # it grows, or does not say its size
            content += file.read(max(0, most + 1 - len(content)))
    if len(content) > most:
        _refuse(path, errno.EINVAL, f"it must have at most {most} bytes")
    return content


def lines_of[Text: (bytes, str)](file: IO[Text], name: str, most: int = LONGEST) -> Iterator[Text]:
    """Yield the lines of a file; raises DataError for ``most`` bytes or characters without a newline."""
    number = 0
    while line := file.readline(most):
        number += 1
        if len(line) == most and line[-1:] not in (b"\n", "\n"):
            raise DataError(f"{name}:{number} must have less than {most} characters in a line, got more; divide it")
        yield line


def parse_json(text: str | bytes, *, whole: bool = False) -> Any:
    """Read JSON.

    Args:
        text: JSON text; bytes must be UTF-8.
        whole: refuse halves of surrogate pairs, which no file in UTF-8 can hold.

    Raises:
        json.JSONDecodeError: the text is not JSON, is nested too deep, or has a number that Python cannot read.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # Python limits the digits of an integer
        raise json.JSONDecodeError(str(error), "", 0) from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise _too_deep()
    if whole and re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise json.JSONDecodeError(f"half of a surrogate pair ({error.object[error.start]!a})", "", 0) from None
    return value


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError(f"more than {DEEPEST} levels", "", 0)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            each
            for part in level
            if isinstance(part, list | dict)
            for each in (part.values() if isinstance(part, dict) else part)
            if isinstance(each, list | dict)
        ]
        if not level:
            return False
    return True


@contextmanager
def bounded(seconds: float, more_bytes: int | None = None) -> Iterator[None]:
    """Limit the time and memory of the block, which runs untrusted Python code such as a template.

    Args:
        seconds: a block that takes longer raises TimeoutError, if it runs on the main thread.
        more_bytes: the memory that the block may add to the process; a block that needs more raises MemoryError.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, _late) if on_main else None
    timer = (0.0, 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if on_main:
            timer = signal.setitimer(signal.ITIMER_REAL, seconds)
        if more_bytes is not None:
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limits = [limit for limit in (soft, in_use + more_bytes) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if on_main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *timer)  # restores an outer timer


def _late(*_: object) -> NoReturn:
    raise TimeoutError("it took too long")
