"""Several engines of one process, each of which goes on as soon as it would not have to wait."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from tpu_grpo.engine.generation import Generation

POLL_SECONDS = 0.0002
"""While no engine is ready, this long passes between two looks."""


class Waited(NamedTuple):
    """Holds the seconds in which no engine of several was ready."""

    devices: float = 0.0
    """At least one of them was at a launch."""
    environments: float = 0.0
    """All of them waited for environments."""

    def plus(self, other: "Waited") -> "Waited":
        """Add up two."""
        return Waited(self.devices + other.devices, self.environments + other.environments)


def advance_all(generations: Sequence[Generation], until: int | None = None) -> Waited:
    """Advance several generations to their ends, or to an agreed point, each as soon as it would not have to wait.

    No engine waits for another. Engines of one process lie inside its host, so that the order of their launches, which
    may differ from host to host, is nobody else's business; an engine over several hosts is the only one of each.

    Returns:
        The seconds in which no engine was ready. One that is alone counts by itself what it waits for.
    """
    active, waited = list(generations), Waited()
    while len(active) > 1:
        ready = [generation for generation in active if generation.ready]
        if not ready:
            start, computing = time.perf_counter(), any(generation.computing for generation in active)
            time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - start
            waited = waited.plus(Waited(devices=seconds) if computing else Waited(environments=seconds))
        stopped = [generation for generation in ready if not generation.advance(until, wait=False)]
        active = [generation for generation in active if generation not in stopped]
    while active and active[0].advance(until):
        pass
    return waited
