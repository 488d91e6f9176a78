"""Makes a directory that is there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpu_grpo.records.errors import ConfigError


def check_free(path: Path) -> None:
    """See that a directory can be made.

    Raises:
        ConfigError: something of this name is there.
    """
    if os.path.lexists(path):
        raise ConfigError(f"an export must go to a new directory, got {path}, which is there; name another, or move it")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a temporary directory beside ``path``, which gets this name at the end of the block.

    On an error it is removed, and nothing has this name. What is written is on disk before it is renamed.

    Raises:
        ConfigError: something of this name is there, at the start or at the end.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent))
    try:
        yield unfinished
        for file in unfinished.iterdir():
            _to_disk(file)
        unfinished.chmod(0o777 & ~_umask())  # temporary directories are their owner's alone
        check_free(path)
        unfinished.rename(path)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
