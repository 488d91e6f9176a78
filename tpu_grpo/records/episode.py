"""The records of a conversation between the policy and an environment: one episode for each row of a rollout.

A row's `Completion` holds all tokens after the first prompt, in the order in which they came, and says which of them
the policy sampled. For two turns, with what the environment answered (o) between them:

    token_ids   [a0 a1 a2 o0 o1 b0 b1]
    sampled     [ 1  1  1  0  0  1  1]
    turns       Turn(start=0, end=3), Turn(start=5, end=7)
    branches    Branch(prompt=p, start=0, end=7)

A branch is a sequence that the policy saw as it is, and so a training sample. Most episodes have one. Another begins
where the chat template changes the past, as Qwen3's does when it drops earlier thinking: its prompt is that past.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

Ending = Literal["answered", "done", "turns", "tokens", "failed"]
"""Why an episode ended: the policy called no tool; the environment was done; environment.max_turns; the tokens of the
whole conversation, or of a turn; the environment failed."""
FailureKind = Literal["raised", "late", "died", "memory", "wrong"]
"""How an environment failed: it raised, did not answer in time, its process ended, it took too much memory, or it gave
what is neither text nor a number."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, and the environment's answer."""

    start: int
    """The place of its first token in ``Completion.token_ids``."""
    end: int
    """The place after its last token. The answer's tokens follow, up to the next turn or the end; where the template
    changes the past, they are in the prompt of the next branch instead, at its end."""
    text: str
    """What the policy wrote, special tokens left out."""
    calls: tuple[str, ...] = ()
    """The names of the tools that it called; "" for a call that could not be read."""
    answer: str = ""
    """What the environment answered; empty if the conversation ended with the turn."""
    observed: int = 0
    """How many tokens the policy saw of the answer, with what the template writes around it; 0 if it saw none."""
    reward: float | None = None
    """What the environment gave for this turn, if it gives anything for single turns."""
    errors: int = 0
    """How many of its calls could not be read, or raised."""


@dataclass(frozen=True)
class Branch:
    """A sequence as the policy saw it: some tokens of a completion after a prompt of their own."""

    prompt: tuple[int, ...]
    start: int
    end: int
    """The tokens ``Completion.token_ids[start:end]`` follow the prompt."""
    experts: Integer[np.ndarray, "S layers k"] | None = None
    """The experts that the engine used, as in `Completion`, if they are replayed."""


@dataclass(frozen=True)
class Failure:
    """How an environment failed."""

    kind: FailureKind
    text: str
    """What happened, in words that follow the environment's name."""
    trace: str = ""
    """The text of the traceback, where there is one."""
    reward: float | None = None
    """What the conversation is worth instead of its rewards; None for nothing, so that it counts nowhere."""


@dataclass(frozen=True)
class KeptEnvironment:
    """The state of an environment after its episode, for the rewards that read it."""

    source: str
    """Its class, as path.py:Class or package.module:Class."""
    state: bytes
    """Its attributes, and why some could not be kept; only a worker opens it (workers/attributes.py)."""


@dataclass(frozen=True)
class Episode:
    """The conversation of one row."""

    prompt: str
    """The first prompt as the policy saw it, with tools and the first observation."""
    branches: tuple[Branch, ...]
    turns: tuple[Turn, ...]
    ending: Ending
    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation as messages, the prompt's first."""
    environment: str
    """The environment's name in the config's table, or that of its class."""
    reward: float | None = None
    """What ``get_reward`` gave, or the sum over the turns; None if the environment gives no reward, or failed."""
    failure: Failure | None = None
    kept: KeptEnvironment | None = None
    seconds: float = 0.0
    """How long the policy waited for the environment."""

    @property
    def last_words(self) -> str:
        """What the policy wrote in its last turn; empty if it had none."""
        return self.turns[-1].text if self.turns else ""
