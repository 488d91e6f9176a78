"""Environments of the shapes that TRL's documentation and examples show; the code is this project's own.

The shapes are those of docs/source/grpo_trainer.md (a counter with and without data, several classes by a column),
docs/source/openenv.md (a client of a server within a tool class) and examples/scripts/openenv/ (games that raise when
they are over, one class for two games). Clients answer by themselves here.
"""

import random
from types import SimpleNamespace
from typing import Any


class EchoClient:
    def step(self, action: str) -> Any:
        return SimpleNamespace(observation=SimpleNamespace(reward=len(action) * 0.1, echoed_message=action))


class WordleClient:
    """Wordle with the word crane, of which only the number of guesses and the win are told."""

    def reset(self) -> Any:
        self.history, self.guesses = "You are playing Wordle.\n", 0
        return self._result(0.0, False)

    def step(self, action: str) -> Any:
        self.guesses += 1
        won = action == "[crane]"
        self.history += f"{action} is {'right' if won else 'wrong'}.\n"
        return self._result(float(won), won or self.guesses == 6)

    def _result(self, reward: float, done: bool) -> Any:
        observation = SimpleNamespace(messages=[SimpleNamespace(content=self.history)])
        return SimpleNamespace(observation=observation, reward=reward, done=done)

    def close(self) -> None:
        pass


class CatchClient:
    """Catch: a ball falls in column 3, from row 1 to the paddle in row 10."""

    def reset(self) -> Any:
        self.row, self.paddle = 1, 3
        return self._result()

    def step(self, action: int) -> Any:
        self.row, self.paddle = self.row + 1, self.paddle + action - 1
        return self._result()

    def _result(self) -> Any:
        done = self.row == 10
        reward = (1.0 if self.paddle == 3 else -1.0) if done else None
        return SimpleNamespace(observation=SimpleNamespace(row=self.row, paddle=self.paddle, done=done), reward=reward)


# --- docs/source/grpo_trainer.md -------------------------------------------------------------------------------------


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class IncrementEnvWithData(IncrementEnv):
    def reset(self, target, **kwargs) -> None:
        self.counter, self.target = 0, target


class CodingEnv:
    def reset(self, **kwargs) -> str:
        return f"Compute the {random.randint(1, 20)}th Fibonacci number."

    def run_code(self, code: str) -> str | None:
        """Run Python code.

        Args:
            code: The source.

        Returns:
            What it prints.
        """


class GameEnv:
    def reset(self, **kwargs) -> str:
        return "Reach the goal tile."

    def move(self, action: str) -> str | None:
        """Make a move.

        Args:
            action: One of "up", "down", "left", "right".

        Returns:
            What is seen then.
        """


# --- docs/source/openenv.md ------------------------------------------------------------------------------------------


class EchoToolEnv:
    def __init__(self):
        self.env = EchoClient()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        observation = self.env.step(message).observation
        self.reward = observation.reward
        return observation.echoed_message


class WordleEnv:
    def __init__(self):
        self.client = WordleClient()

    def reset(self, **kwargs) -> str | None:
        self._seen = self.client.reset().observation.messages[0].content
        self.reward, self.done = 0.0, False
        return self._seen

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            What the game answers.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(guess)
        seen, self._seen = self._seen, result.observation.messages[0].content
        self.reward, self.done = result.reward, result.done
        return self._seen[len(seen) :]


# --- examples/scripts/openenv/ ---------------------------------------------------------------------------------------


class CatchEnv:
    def __init__(self):
        self.client = CatchClient()
        self.reward, self.done = 0.0, False

    def reset(self, **kwargs) -> str:
        return self._told(self.client.reset())

    def _told(self, result: Any) -> str:
        seen = result.observation
        self.reward, self.done, away = result.reward or 0.0, seen.done, 3 - seen.paddle
        side = f"{abs(away)} column(s) to the {'RIGHT' if away > 0 else 'LEFT'} of" if away else "directly above"
        where = f"Ball: row {seen.row}/10, column 3/5\nPaddle: column {seen.paddle}/5"
        return f"{where}\nThe ball is {side} the paddle."

    def _do_action(self, action_id: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        return self._told(self.client.step(action_id))

    def move(self, direction: str) -> str:
        """Move the paddle left or right.

        Args:
            direction: Direction to move, either "left" or "right".

        Returns:
            The observation after moving.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._do_action({"left": 0, "right": 2}[direction])

    def stay(self) -> str:
        """Do nothing and let the ball fall one step.

        Returns:
            The observation after staying.
        """
        return self._do_action(1)


class MultiEnv(WordleEnv, CatchEnv):
    """Two games, of which a column names one; the tools of the other raise."""

    def __init__(self):
        self.client: Any = None
        self.active = None

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "wordle")
        if self.active == "wordle":
            self.client = WordleClient()
            return WordleEnv.reset(self)
        self.client = CatchClient()
        return CatchEnv.reset(self)

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.active != "wordle":
            raise ValueError("guess is only available in Wordle")
        return WordleEnv.guess(self, guess)

    def stay(self) -> str:
        """Do nothing and let the ball fall one step.

        Returns:
            The observation after staying.
        """
        if self.active != "catch":
            raise ValueError("stay is only available in Catch")
        return CatchEnv.stay(self)
