"""The user's cache of what this package makes: where it is, and how processes that want the same thing take turns."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "TPU_GRPO_CACHE"


def cache_directory() -> Path:
    """Return where things are kept: ``$TPU_GRPO_CACHE`` if set, else the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("tpu_grpo")).expanduser().absolute()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file; the system releases it also when the process dies.

    Raises:
        OSError: for a path that cannot be written.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
