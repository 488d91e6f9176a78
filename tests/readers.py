"""Tests start processes whose stdout and stderr nobody reads any more."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def nobody_reads() -> Iterator[None]:
    """Let stdout and stderr be pipes without a reader, for processes that are started in this block."""
    reads, writes = os.pipe()
    os.close(reads)
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for descriptor in kept:
        os.dup2(writes, descriptor)
    os.close(writes)
    try:
        yield
    finally:
        for descriptor, duplicate in kept.items():
            os.dup2(duplicate, descriptor)
            os.close(duplicate)
