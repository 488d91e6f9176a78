"""A verifiers taskset of several turns: guess one of ten numbers with four guesses.

    4730-4739?    4734
    higher        4737
    lower         4736

The reward is 1 if the number was found. The policy is the built-in model of demo_guessing_cpu.yaml, which often takes
higher for lower.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingData(vf.TaskData):
    """The range is the prompt."""

    secret: int


class GuessingTask(vf.Task[GuessingData]):
    """Scores a game."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 if a guess was right, else 0."""
        return float(any(guess(message.content) == self.data.secret for message in trace.assistant_messages))


class GuessingConfig(vf.TasksetConfig):
    """Options of the taskset, such as --env.taskset.guesses 3."""

    count: int = Field(1000, ge=1)
    guesses: int = Field(4, ge=1)
    seed: int = 0


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    """Tasks to find a number of four digits, each in a range of ten."""

    def load(self) -> Iterator[GuessingTask]:
        """Yield ``count`` tasks; the same seed gives the same ones."""
        rng = random.Random(self.config.seed)
        for _ in range(self.config.count):
            lowest = 10 * rng.randint(100, 999)
            data = GuessingData(prompt=f"{lowest}-{lowest + 9}?", secret=rng.randint(lowest, lowest + 9))
            yield GuessingTask(data, self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    """One seat, whose harness runs within the process."""

    agent: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="verifiers_chat"), runtime=vf.SubprocessConfig())


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    """Says after each guess whether the number is higher or lower."""

    async def run(self, task: GuessingTask, agents: vf.Agents) -> None:
        """Play one game in one conversation."""
        secret, guesses = task.data.secret, self.taskset.config.guesses
        async with agents.agent.interaction(task) as conversation:
            segment = await conversation.turn()  # the task's prompt is the first message
            for _ in range(guesses - 1):
                given = guess(segment.last_reply)
                if segment.terminated or given == secret:
                    break
                segment = await conversation.turn("higher" if given is None or given < secret else "lower")


def guess(text: str | None) -> int | None:
    """Return the number that a guess consists of; None for anything else."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
