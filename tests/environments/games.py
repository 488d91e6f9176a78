"""Environments that behave."""

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np


class Counter:
    """The counter of TRL's documentation, told where to go."""

    made = 0

    def __init__(self, first: int = 0):
        type(self).made += 1
        self.counter = first
        self.made_before = type(self).made - 1
        self.drawn = random.random()

    def reset(self, target: int, seed: int = -1, **columns: Any) -> str:
        self.target, self.seed, self.columns = target, seed, columns
        self.rewards: list[float] = []
        return f"Count to {target}."

    def increment(self, step: int, times: int = 1) -> int:
        """Increment the counter.

        Args:
            step: How much is added.
            times: How often.
        """
        self.counter += step * times
        self.rewards.append(float(step))
        return self.counter

    def look(self) -> Any:
        """Look at what the environment knows."""
        return {"seed": self.seed, "columns": self.columns, "made_before": self.made_before, "drawn": self.drawn}

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def get_turn_rewards(self) -> list[float]:
        return self.rewards


class Async:
    """Waits for what it is told, on the loop that it shares."""

    met: ClassVar[list["Async"]] = []

    async def reset(self, **columns: Any) -> None:
        self.columns = columns
        await asyncio.sleep(0)

    async def meet(self, others: int) -> str:
        """Wait until so many have come.

        Args:
            others: How many.
        """
        Async.met.append(self)
        while len(Async.met) < others:
            await asyncio.sleep(0.001)
        return "met"

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    async def write(self, size: int) -> str:
        """Write something long.

        Args:
            size: How long.
        """
        return "x" * size

    async def resist(self) -> str:  # pyrefly: ignore[unexpected-never]
        """Wait, and not be cancelled."""
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    async def fail(self) -> str:
        """Raise something."""
        raise ValueError("no")

    async def leave(self) -> str:
        """Leave the process."""
        raise SystemExit(4)

    async def block(self) -> str:
        """Block the loop."""
        time.sleep(1000)
        return ""

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


class Mixed:
    """Some of what it is asked has to be awaited, and some is not."""

    def reset(self) -> None:
        self.tasks = list[asyncio.Task[str]]()

    def here(self) -> int:
        """Say which process this is."""
        return os.getpid()

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return f"waited {seconds}"

    def write(self, size: int) -> str:
        """Write something long.

        Args:
            size: How long.
        """
        return "x" * size

    async def begin(self) -> str:
        """Begin something that goes on in later turns."""
        self.tasks.append(asyncio.create_task(asyncio.sleep(0.01, "done")))
        return "begun"

    async def look(self) -> str:
        """Wait for it."""
        return await self.tasks.pop()

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def close(self) -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(1000))  # goes no further than the process


class Steps:
    """Takes texts, in the manner of Gym."""

    def __init__(self, form: int = 4):
        self.form = form

    def reset(self, goal: str, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.goal, self.turns = goal, 0
        return f"Say {goal}. Seed {seed}.", {}

    def step(self, action: str) -> Any:
        self.turns += 1
        done = action == self.goal
        observation, reward = ("Yes." if done else "No."), float(done)
        if self.form == 4:
            return observation, reward, done, {}
        return observation, reward, False, done, {}


class Closing:
    """Takes its time to close."""

    def reset(self, path: str) -> None:
        self.path = path

    def get_reward(self) -> float:
        return 0.0

    def close(self) -> None:
        time.sleep(0.3)
        Path(self.path).touch()


_forked_with = set[str]()
os.register_at_fork(after_in_child=lambda: _forked_with.update(sys.modules))


class Knows:
    """Tells about its process."""

    def reset(self) -> Any:
        return {
            "numpy": np.random.randint(10**6),
            "imported": sorted({*sys.modules} - _forked_with),
            "jax": "jax" in sys.modules,
            "platforms": os.environ["JAX_PLATFORMS"],
            "tpu": sorted(name for name in os.environ if name.startswith(("TPU_", "XLA_", "LIBTPU"))),
            "hash": os.environ["PYTHONHASHSEED"],
        }

    def get_reward(self) -> float:
        return 0.0


class Prepared(Knows):
    """Wants a package imported before conversations begin."""

    _imported_before = ("wave",)

    def reset(self) -> Any:
        import wave

        return {"imported": sorted({wave.__name__} & _forked_with)}


class Unprepared(Knows):
    """Wants a package that is not there."""

    _imported_before = ("no_such_package",)
