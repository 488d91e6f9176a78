"""The decoding of a whole step, simulated: rows take slots, leave them when they end, and others take their places.

The engines of a host go through it together, a step each in a round (engine_steps.py), until the last row has ended.
One launch makes several steps, so that the host's time is shared by them; a launch ends early where a row ends and
others wait. The tail, in which few long rows keep the devices from anything else, is in it. Rounds between which no row
ends or enters are alike but for the growing context, and are counted at once:

    slots 2, lengths 3 1 2      round   1 2 3 4 5
                                slot 0  - a - a a       - rows enter: a step of their own
                                slot 1  - b - c c       c takes b's slot
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tpu_grpo.launching.tpus import Generation
from tpu_grpo.planning.engine_steps import Seconds, add, decode_step, host_seconds, round_seconds
from tpu_grpo.planning.sizes import EngineSizes

StepSeconds = Callable[[int, float, float], tuple[Seconds, float]]
"""Takes the rows of a step, the tokens of their context together, and the steps of its launch; returns (seconds on
devices of the step, seconds of the host of the launch)."""


def step_seconds(sizes: EngineSizes, generation: Generation, rungs: Sequence[int]) -> StepSeconds:
    """Make the seconds of an engine's steps, whose rows are padded to the first of ``rungs`` that is large enough."""

    def seconds(rows: int, cached_tokens: float, steps: float) -> tuple[Seconds, float]:
        padded = next(rung for rung in rungs if rung >= rows)
        return decode_step(sizes, generation, padded, cached_tokens), host_seconds(sizes, rows, steps)

    return seconds


@dataclass
class _Engine:
    """The rows of one engine: those that run, by the step after which they end, and those that wait."""

    waiting: list[int]
    """Lengths, the next one last."""
    prompt: int
    slots: int
    steps: int = 0
    """The decode steps so far."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (last step, steps before the first) of the running rows."""
    begins: int = 0
    """The sum of the steps before the first."""

    def admit(self) -> int:
        """Give free slots to rows that wait, and return to how many."""
        count = min(self.slots - len(self.ends), len(self.waiting))
        for _ in range(count):
            heapq.heappush(self.ends, (self.steps + self.waiting.pop(), self.steps))
            self.begins += self.steps
        return count

    @property
    def steps_left(self) -> int:
        """The steps until the next row ends."""
        return self.ends[0][0] - self.steps

    def cached(self, steps: int) -> float:
        """Return the tokens of context of all running rows together, a mean over the next ``steps`` steps."""
        return len(self.ends) * (self.prompt + self.steps + (steps + 1) / 2) - self.begins

    def advance(self, steps: int) -> None:
        """Take this many steps; rows that then end leave their slots."""
        self.steps += steps
        while self.ends and self.ends[0][0] == self.steps:
            self.begins -= heapq.heappop(self.ends)[1]


def decode(
    engines: Sequence[Sequence[int]], *, prompt: int, slots: int, step: StepSeconds, launch_steps: int = 1
) -> dict[str, float]:
    """Return the seconds of decoding rows of these lengths, by engine of one host, after prompts of ``prompt`` tokens.

    Rows that take slots cost their engine a step, in which their prompts are found in the cache. Other steps share
    the host's time with those of their launch, of which there are at most ``launch_steps``. While no row waits, the
    devices have the next launch before the host has done its part of this one, unless launches have one step.
    """
    states, total = [_Engine(list(reversed(lengths)), prompt, slots) for lengths in engines], dict[str, float]()
    while any(state.ends or state.waiting for state in states):
        entered = [state.admit() for state in states]
        running = [(state, count) for state, count in zip(states, entered, strict=True) if state.ends]
        rounds = 1 if any(entered) else min(state.steps_left for state, _ in running)
        costs = [
            step(count, count * prompt, 1) if count else _shared(state, rounds, step, launch_steps)
            for state, count in running
        ]
        ahead = launch_steps > 1 and not any(entered) and not any(state.waiting for state in states)
        add(total, round_seconds(costs, ahead=ahead), rounds)
        for state, count in running:
            state.advance(0 if count else rounds)
    return total


def _shared(state: _Engine, rounds: int, step: StepSeconds, launch_steps: int) -> tuple[Seconds, float]:
    """Return the seconds of one of an engine's next ``rounds`` steps; the host's are those of a launch, shared out."""
    launches = math.ceil(rounds / launch_steps) if state.waiting else rounds / launch_steps
    device, host = step(len(state.ends), state.cached(rounds), rounds / launches)
    return device, host * launches / rounds
