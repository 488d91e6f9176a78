"""The records of a conversation between the policy and an environment: one episode for each row of a rollout.

A row's `Completion` holds all tokens after the first prompt, in order, and says which of them the policy sampled. For
two turns a and b of the policy, and the environment's answer o between them:

    token_ids   [a0 a1 a2 o0 o1 b0 b1]
    sampled     [ 1  1  1  0  0  1  1]
    turns       Turn(start=0, end=3), Turn(start=5, end=7)
    branches    Branch(prompt=p, start=0, end=7)

A branch is a sequence of tokens exactly as the policy saw it, and is a training sample. Most episodes have one branch.
A new branch begins where the chat template changes earlier turns, as Qwen3's template does by dropping their thinking.
The new branch's prompt is the changed conversation up to that point.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

Ending = Literal["answered", "done", "turns", "tokens", "failed"]
"""Why an episode ended. answered: the policy called no tool. done: the environment was done. turns: the episode reached
environment.max_turns. tokens: the conversation or a turn reached its token limit. failed: the environment failed."""
FailureKind = Literal["raised", "late", "died", "memory", "wrong"]
"""How an environment failed. raised: it raised an exception. late: it did not answer in time. died: its process ended.
memory: it took too much memory. wrong: it returned an invalid value."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, and the environment's answer."""

    start: int
    """The index of the turn's first token in ``Completion.token_ids``."""
    end: int
    """The index after the turn's last token. The answer's tokens follow, up to the next turn or the last token. If a
    new branch begins after this turn, they are instead at the end of the new branch's prompt."""
    text: str
    """The policy's text, without special tokens."""
    calls: tuple[str, ...] = ()
    """The names of the tools that the turn called; "" for a call that could not be parsed."""
    answer: str = ""
    """What the environment answered; empty if the conversation ended with the turn."""
    observed: int = 0
    """The number of tokens of the answer that the policy saw, including those that the chat template adds."""
    reward: float | None = None
    """The environment's reward for this turn; None if it gave none."""
    errors: int = 0
    """The number of tool calls that could not be parsed, or raised."""


@dataclass(frozen=True)
class Branch:
    """A sequence as the policy saw it: a prompt, and then a part of a completion's tokens."""

    prompt: tuple[int, ...]
    start: int
    end: int
    """The tokens ``Completion.token_ids[start:end]`` follow the prompt."""
    experts: Integer[np.ndarray, "_ layers k"] | None = None
    """The experts that the engine used, as in `Completion`; None if they were not recorded."""


@dataclass(frozen=True)
class Failure:
    """How an environment failed."""

    kind: FailureKind
    text: str
    """What happened, worded to follow the environment's name in a message."""
    trace: str = ""
    """The text of the traceback, if there is one."""
    reward: float | None = None
    """The conversation's total reward, which replaces all rewards; if None, the row is unscored."""


@dataclass(frozen=True)
class KeptEnvironment:
    """The state of an environment after its episode, for the rewards that read it."""

    source: str
    """The environment's class, as path.py:Class or package.module:Class."""
    state: bytes
    """The environment's attributes, pickled, and the reasons why others are missing. Only workers may unpickle them:
    see tpu_grpo/workers/attributes.py."""


@dataclass(frozen=True)
class Episode:
    """The conversation of one row."""

    prompt: str
    """The first prompt as the policy saw it, with tools and the first observation."""
    branches: tuple[Branch, ...]
    turns: tuple[Turn, ...]
    ending: Ending
    messages: tuple[Mapping[str, Any], ...]
    """The messages after those of the first prompt, beginning with the policy's first turn."""
    environment: str
    """The environment's name in the config's table, or the name of its class."""
    reward: float | None = None
    """The result of ``get_reward``, or the sum of the turns' rewards; None if the environment gave none, or failed."""
    failure: Failure | None = None
    kept: KeptEnvironment | None = None
    seconds: float = 0.0
    """The time that the policy waited for the environment."""

    @property
    def last_words(self) -> str:
        """What the policy wrote in its last turn; empty if it had none."""
        return self.turns[-1].text if self.turns else ""
