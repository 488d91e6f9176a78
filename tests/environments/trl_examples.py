# Copyright 2020-2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ruff: noqa: PIE790, RET505, SIM105
# pyright: reportOptionalMemberAccess=false
"""The environments of TRL's documentation and examples, as they stand there.

They are quoted from docs/source/grpo_trainer.md, docs/source/openenv.md and examples/scripts/openenv/ of TRL. Where
they need a server, its client is replaced by a class of the same name that answers by itself; where the documentation
says "see the full docstring above", the docstring is put in. Nothing else is changed.
"""

import random
from types import SimpleNamespace
from typing import Any

ENV_URL = env_url = DEFAULT_WORDLE_URL = DEFAULT_CATCH_URL = "http://localhost:1"
CATCH_ROWS, CATCH_COLS = 10, 5


# --- in place of the servers and their clients -----------------------------------------------------------------------


def EchoAction(message: str) -> Any:
    return message


class EchoEnv:
    def __init__(self, base_url: str):
        pass

    def step(self, action: str) -> Any:
        return SimpleNamespace(observation=SimpleNamespace(reward=len(action) * 0.1, echoed_message=action))


def TextArenaAction(message: str) -> Any:
    return message


class TextArenaEnv:
    """Wordle with the word crane, of which only the number of guesses and the win are told."""

    def __init__(self, base_url: str):
        pass

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


def OpenSpielAction(action_id: int, game_name: str) -> Any:
    return action_id


class OpenSpielEnv:
    """Catch: a ball falls in column 2, from row 0 to the paddle in row 9."""

    def __init__(self, base_url: str):
        pass

    def reset(self) -> Any:
        self.row, self.paddle = 0, 2
        return self._result()

    def step(self, action: int) -> Any:
        self.row, self.paddle = self.row + 1, self.paddle + action - 1
        return self._result()

    def _result(self) -> Any:
        state = [0.0] * 50
        state[self.row * 5 + 2] = state[45 + self.paddle] = 1.0
        done = self.row == 9
        reward = (1.0 if self.paddle == 2 else -1.0) if done else None
        return SimpleNamespace(observation=SimpleNamespace(info_state=state, done=done), reward=reward)

    def close(self) -> None:
        pass


# --- docs/source/grpo_trainer.md -------------------------------------------------------------------------------------


class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
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


class IncrementEnvWithData:
    def reset(self, target, **kwargs) -> None:  # the row's `target` column arrives as a keyword argument
        self.counter = 0
        self.target = target

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:  # exposed as a tool (see the full docstring above)
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class CodingEnv:
    def reset(self, **kwargs) -> str:
        n = random.randint(1, 20)
        return f"Compute the {n}th Fibonacci number."

    def run_code(self, code: str) -> str:  # exposed as a tool only for "coding" examples
        """Run the given Python code and return its stdout.

        Args:
            code: The Python source to execute.

        Returns:
            The captured standard output.
        """
        ...


class GameEnv:
    def reset(self, **kwargs) -> str:
        return "Reach the goal tile."

    def move(self, action: str) -> str:  # exposed as a tool only for "game" examples
        """Apply an action to the game and return the new observation.

        Args:
            action: One of "up", "down", "left", "right".

        Returns:
            The observation after the move.
        """
        ...


# --- docs/source/openenv.md ------------------------------------------------------------------------------------------


class EchoToolEnv:
    def __init__(self):
        self.env = EchoEnv(base_url=ENV_URL)
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        observation = self.env.step(EchoAction(message=message))
        self.reward = observation.observation.reward
        return observation.observation.echoed_message


class WordleEnv:
    def __init__(self):
        self.client = TextArenaEnv(base_url="https://openenv-wordle.hf.space")

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        _full_feedback = result.observation.messages[0].content
        feedback = _full_feedback[len(self._last_full_feedback) :]
        self._last_full_feedback = _full_feedback
        if "You attempted an invalid move" in feedback:
            self.reward = 0.0
        else:
            self.reward = result.reward
        self.done = result.done
        return feedback


# --- examples/scripts/openenv/ ---------------------------------------------------------------------------------------


class CatchEnv:
    ROWS = 10
    COLS = 5

    def __init__(self):
        self.client = OpenSpielEnv(base_url=env_url)
        self.reward = 0.0
        self.done = False

    @staticmethod
    def _format_obs(info_state: list[float]) -> str:
        """Convert the flat 50-float observation into a readable text description."""
        rows, cols = CatchEnv.ROWS, CatchEnv.COLS
        ball_row = ball_col = paddle_col = None
        for idx, val in enumerate(info_state):
            if val == 1.0:
                r, c = divmod(idx, cols)
                if r < rows - 1:
                    ball_row, ball_col = r + 1, c + 1
                else:
                    paddle_col = c + 1
        parts = []
        if ball_row is not None and ball_col is not None:
            parts.append(f"Ball: row {ball_row}/{rows}, column {ball_col}/{cols}")
        if paddle_col is not None:
            parts.append(f"Paddle: column {paddle_col}/{cols}")
        if ball_col is not None and paddle_col is not None:
            diff = ball_col - paddle_col
            if diff < 0:
                parts.append(f"The ball is {abs(diff)} column(s) to the LEFT of the paddle.")
            elif diff > 0:
                parts.append(f"The ball is {diff} column(s) to the RIGHT of the paddle.")
            else:
                parts.append("The ball is directly above the paddle.")
        return "\n".join(parts)

    def reset(self, **kwargs) -> str:
        env_result = self.client.reset()
        self.reward = 0.0
        self.done = env_result.observation.done
        return self._format_obs(env_result.observation.info_state)

    def _do_action(self, action_id: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        env_result = self.client.step(OpenSpielAction(action_id=action_id, game_name="catch"))
        self.reward = env_result.reward or 0.0
        self.done = env_result.observation.done
        return self._format_obs(env_result.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle left or right.

        Args:
            direction: Direction to move, either "left" or "right".

        Returns:
            The observation after moving.
        """
        if direction == "left":
            action_id = 0
        elif direction == "right":
            action_id = 2
        else:
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._do_action(action_id)

    def stay(self) -> str:
        """Do nothing and let the ball fall one step.

        Returns:
            The observation after staying.
        """
        return self._do_action(1)


def _format_catch_obs(info_state: list[float]) -> str:
    """Convert the flat 50-float observation into a readable text description."""
    ball_row = ball_col = paddle_col = None
    for idx, val in enumerate(info_state):
        if val == 1.0:
            r, c = divmod(idx, CATCH_COLS)
            if r < CATCH_ROWS - 1:
                ball_row, ball_col = r + 1, c + 1
            else:
                paddle_col = c + 1
    parts = []
    if ball_row is not None and ball_col is not None:
        parts.append(f"Ball: row {ball_row}/{CATCH_ROWS}, column {ball_col}/{CATCH_COLS}")
    if paddle_col is not None:
        parts.append(f"Paddle: column {paddle_col}/{CATCH_COLS}")
    if ball_col is not None and paddle_col is not None:
        diff = ball_col - paddle_col
        if diff < 0:
            parts.append(f"The ball is {abs(diff)} column(s) to the LEFT of the paddle.")
        elif diff > 0:
            parts.append(f"The ball is {diff} column(s) to the RIGHT of the paddle.")
        else:
            parts.append("The ball is directly above the paddle.")
    return "\n".join(parts)


class MultiEnv:
    wordle_url = DEFAULT_WORDLE_URL
    catch_url = DEFAULT_CATCH_URL

    def __init__(self):
        self._wordle_client = None
        self._catch_client = None
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "wordle")
        self.reward = 0.0
        self.done = False

        if self.active == "wordle":
            if self._wordle_client is not None:
                try:
                    self._wordle_client.close()
                except Exception:
                    pass
            self._wordle_client = TextArenaEnv(base_url=MultiEnv.wordle_url)
            result = self._wordle_client.reset()
            self._last_full_feedback = result.observation.messages[0].content
            self.reward = 0.0
            return self._last_full_feedback
        elif self.active == "catch":
            if self._catch_client is not None:
                try:
                    self._catch_client.close()
                except Exception:
                    pass
            self._catch_client = OpenSpielEnv(base_url=MultiEnv.catch_url)
            result = self._catch_client.reset()
            self.done = result.observation.done
            return _format_catch_obs(result.observation.info_state)
        else:
            raise ValueError(f"Unknown environment: {self.active}")

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
        if self.done:
            raise ValueError("Game over.")
        result = self._wordle_client.step(TextArenaAction(message=guess))
        _full_feedback = result.observation.messages[0].content
        feedback = _full_feedback[len(self._last_full_feedback) :]
        self._last_full_feedback = _full_feedback
        if "You attempted an invalid move" in feedback:
            self.reward = 0.0
        else:
            self.reward = result.reward
        self.done = result.done
        return feedback

    def _catch_action(self, action_id: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        result = self._catch_client.step(OpenSpielAction(action_id=action_id, game_name="catch"))
        self.reward = result.reward or 0.0
        self.done = result.observation.done
        return _format_catch_obs(result.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle left or right.

        Args:
            direction: Direction to move, either "left" or "right".

        Returns:
            The observation after moving.
        """
        if self.active != "catch":
            raise ValueError("move is only available in Catch")
        if direction == "left":
            action_id = 0
        elif direction == "right":
            action_id = 2
        else:
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._catch_action(action_id)

    def stay(self) -> str:
        """Do nothing and let the ball fall one step.

        Returns:
            The observation after staying.
        """
        if self.active != "catch":
            raise ValueError("stay is only available in Catch")
        return self._catch_action(1)
