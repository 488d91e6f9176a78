"""What sampling cost: launches, steps, rows that were occupied, and the seconds of the host."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from jax.profiler import TraceAnnotation
from jaxtyping import Int


@dataclass
class EngineUse:
    """What an engine has done so far, and the host's seconds by what it did."""

    schedule: float = 0.0
    """Choosing the next batch and reserving its cache slots."""
    launch: float = 0.0
    """Building inputs and calling compiled programs."""
    wait: float = 0.0
    """Waiting for the devices."""
    collect: float = 0.0
    """Appending sampled tokens to their requests."""
    prefills: int = 0
    """Launches of a prefill step."""
    accepted: int = 0
    """Rows whose prompts they completed, so that decode steps go on with them."""
    retracted: int = 0
    """Rows that were put back because the cache ran short, and were computed anew later."""
    launches: int = 0
    """Launches of decode steps."""
    steps: int = 0
    """Decode steps of all launches."""
    tokens: int = 0
    """Tokens that decode steps sampled."""
    places: int = 0
    """Tokens that they would have sampled with as many rows as run at once."""
    environments: float = 0.0
    """Waiting for environments, with nothing to do."""
    turns: int = 0
    """Turns of conversations that have ended."""
    later_tokens: int = 0
    """Prompt tokens of those turns that were not the first of their conversations."""
    later_cached: int = 0
    """Those of them that were found in the prefix cache."""

    @contextmanager
    def time(self, what: Literal["schedule", "launch", "wait", "collect", "environments"]) -> Iterator[None]:
        """Add the seconds of the block to this field, which also names the block in a timeline."""
        start = time.perf_counter()
        with TraceAnnotation(what):
            yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - start)

    def count_launch(self, counts_b: Int[np.ndarray, " b"], places: int) -> None:
        """Add a launch of decode steps that sampled so many tokens of each row, with ``places`` rows at once."""
        steps = int(counts_b.max())
        self.launches += 1
        self.steps += steps
        self.tokens += int(counts_b.sum())
        self.places += steps * places

    def count_turn(self, prompt_tokens: int, cached_tokens: int, *, first: bool) -> None:
        """Add a turn that has ended, and how much of its prompt was cached."""
        self.turns += 1
        self.later_tokens += 0 if first else prompt_tokens
        self.later_cached += 0 if first else cached_tokens

    def __sub__(self, before: "EngineUse") -> "EngineUse":
        return EngineUse(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    @property
    def figures(self) -> dict[str, float]:
        """The metrics of a rollout; shares of decode steps only if there were any, and of turns likewise."""
        values = {"rollout/wait_seconds": self.wait}
        if self.prefills:
            values["rollout/prefills"] = self.prefills
            values["rollout/accepted_rows"] = self.accepted / self.prefills
        if self.retracted:
            values["rollout/retracted"] = self.retracted
        if self.launches:
            values["rollout/tokens_per_launch"] = self.tokens / self.launches
            values["rollout/occupied_rows"] = self.tokens / self.places
        if self.turns:
            values["rollout/environment_wait_seconds"] = self.environments
            values["rollout/served_turns"] = self.turns
        if self.later_tokens:
            values["rollout/turn_cached_share"] = self.later_cached / self.later_tokens
        return values


def total_use(uses: Iterable[EngineUse]) -> EngineUse:
    """Add up what several engines have done."""
    total = EngineUse()
    for use in uses:
        for field in fields(use):
            setattr(total, field.name, getattr(total, field.name) + getattr(use, field.name))
    return total
