"""A verifiers taskset of running sums over several turns, for a policy that knows only digits, '+' and '='.

    47+38=    85
    85+11=    96

The next question begins with the right total, whatever the policy answered. The reward is the share of right answers.
"""

import random
from collections.abc import Iterator
from itertools import accumulate

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from pydantic import Field

__all__ = ["SumsEnv", "SumsTaskset"]

SMALLEST, LARGEST = 10, 99


class SumsData(vf.TaskData):
    """A running sum: numbers [47, 38, 11] ask 47+38= in the prompt and 85+11= after the answer."""

    numbers: list[int]

    @property
    def questions(self) -> list[str]:
        """The question of every turn."""
        totals = accumulate(self.numbers)
        return [f"{total}+{number}=" for total, number in zip(totals, self.numbers[1:], strict=False)]

    @property
    def answers(self) -> list[str]:
        """The right answer of every turn."""
        return [str(total) for total in accumulate(self.numbers)][1:]


class SumsTask(vf.Task[SumsData]):
    """Scores a conversation."""

    @vf.reward
    async def right_turns(self, trace: vf.Trace) -> float:
        """The share of turns with the right answer; a turn that was never played is wrong."""
        given = [(message.content or "").strip() for message in trace.assistant_messages]
        right = self.data.answers
        return sum(one == other for one, other in zip(given, right, strict=False)) / len(right)


class SumsConfig(vf.TasksetConfig):
    """Options of the taskset, such as --env.taskset.turns 3."""

    count: int = Field(1000, ge=1)
    turns: int = Field(2, ge=1, le=4)
    seed: int = 0


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """Running sums whose questions all add two numbers from 10 to 99."""

    def load(self) -> Iterator[SumsTask]:
        """Yield ``count`` tasks; the same seed gives the same ones."""
        rng = random.Random(self.config.seed)
        for _ in range(self.config.count):
            numbers: list[int] = []
            while not numbers or sum(numbers[:-1]) > LARGEST:
                numbers = [rng.randint(SMALLEST, LARGEST) for _ in range(self.config.turns + 1)]
            data = SumsData(numbers=numbers)
            yield SumsTask(data.model_copy(update={"prompt": data.questions[0]}), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    """One seat, asked within the process."""

    agent: vf.AgentConfig = vf.AgentConfig(harness=vf.HarnessConfig(id="verifiers_chat"), runtime=vf.SubprocessConfig())


class SumsEnv(vf.Env[SumsEnvConfig]):
    """Asks the questions one after another in one conversation."""

    async def run(self, task: SumsTask, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as conversation:
            segment = await conversation.turn()  # the task's prompt is the first question
            for question in task.data.questions[1:]:
                if segment.terminated:
                    break
                segment = await conversation.turn(question)
