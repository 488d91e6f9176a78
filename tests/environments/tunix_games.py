"""An environment of Tunix, with Tunix."""

from typing import Any

from tunix.rl.agentic.environments.base_environment import BaseEnv, BaseTaskEnv, EnvStepResult


class Guess(BaseTaskEnv):
    """Guess the number of the task."""

    def _initial_observation(self) -> Any:
        return {"question": self.task["question"]}

    def _step_impl(self, action: Any) -> EnvStepResult:
        is_right = action == self.task["answer"]
        return EnvStepResult(observation="yes" if is_right else "no", reward=float(is_right), done=is_right, info={})


class Plain(BaseEnv):
    """Made of the columns and options together."""

    def __init__(self, question: str, answer: str, size: int):
        super().__init__()
        self.question, self.answer, self.size = question, answer, size

    def reset(self) -> Any:
        return f"{self.question} (of {self.size})", {}

    def step(self, action: Any) -> Any:
        return {}, float(action == self.answer), True, {}
