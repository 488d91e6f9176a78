"""A verifiers taskset with two seats, both played by the policy: a proposer adds two numbers, a checker adds them anew.

    proposer:  47+38=    85
    checker:   47+38=    75

Each seat has a conversation and a reward of its own, 1 for the right sum. The bridge reports their mean, here 0.5.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["TwoSeatsEnv", "TwoSeatsTaskset"]


class SumData(vf.TaskData):
    """A sum, whose question is in the field prompt."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Scores one seat."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right sum, else 0."""
        return float(trace.last_reply == self.data.answer)


class TwoSeatsConfig(vf.TasksetConfig):
    """Options of the taskset, such as --env.taskset.count 100."""

    count: int = Field(1000, ge=1)
    seed: int = 0


class TwoSeatsTaskset(vf.Taskset[SumTask, TwoSeatsConfig]):
    """Sums of two numbers from 10 to 99."""

    def load(self) -> Iterator[SumTask]:
        """Yield ``count`` tasks; the same seed gives the same ones."""
        rng = random.Random(self.config.seed)
        for _ in range(self.config.count):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


SEAT = vf.AgentConfig(harness=vf.HarnessConfig(id="verifiers_chat"), runtime=vf.SubprocessConfig())


class TwoSeatsEnvConfig(vf.EnvConfig):
    """The seats; with --env.checker.model and --env.checker.client.base-url another model plays the checker."""

    proposer: vf.AgentConfig = SEAT
    checker: vf.AgentConfig = SEAT


class TwoSeatsEnv(vf.Env[TwoSeatsEnvConfig]):
    """Lets both seats answer, one after the other."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """Play one episode."""
        await agents.proposer.run(task)
        await agents.checker.run(task)

    async def finalize(self, task: SumTask, episode: vf.Episode) -> None:
        """Record in both traces whether the seats agree."""
        agree = len({trace.last_reply for trace in episode.traces}) == 1
        for trace in episode.traces:
            trace.record_metric("agree", float(agree))
