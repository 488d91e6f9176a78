"""A conversation as the pool knows it: what is asked of its environment, until when, and what it answered."""

from dataclasses import dataclass

from tpu_grpo.environments.actions import Failed, LoadedEnvironment, Reply
from tpu_grpo.environments.forked import ForkedEnvironments
from tpu_grpo.environments.requests import Act, Request, late
from tpu_grpo.environments.shared import SharedEnvironments
from tpu_grpo.records.episode import Failure

FORK_SECONDS = 120.0
"""A process has this time to be forked, after those of others; the environment's time begins when it is there."""


@dataclass
class Pooled:
    """One conversation."""

    key: int
    number: int
    loaded: LoadedEnvironment
    home: ForkedEnvironments | SharedEnvironments
    request: Request | None = None
    """What is asked and not answered."""
    made: int = 0
    """How many calls of its turn have been made."""
    deadline: float = float("inf")
    asked_at: float = 0.0
    """When it was asked that, or began to wait for a process."""
    reply: Reply | None = None
    """What was answered and not taken."""
    is_placed: bool = False
    """Whether it has an environment."""
    has_begun: bool = False
    """Whether its process is there, which is forked after those of others."""
    failed: Failed | None = None
    """Why it has none any more."""

    @property
    def has_more_calls(self) -> bool:
        """Whether its turn has a call after the present one."""
        return isinstance(self.request, Act) and self.made + 1 < len(self.request.action.calls)

    def lateness(self, timeout: float) -> Failure:
        """Say what did not come in time: an answer, within ``timeout`` seconds, or its process."""
        if self.has_begun:
            assert self.request is not None
            return late(self.request, self.loaded.takes, timeout, self.made)
        text = f"had no process after {FORK_SECONDS:g} s; see which threads its import starts, and what else runs"
        return Failure("late", text)
