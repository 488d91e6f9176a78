"""A conversation as the pool knows it: what is asked of its environment, until when, and what it answered."""

from dataclasses import dataclass

from tpu_grpo.environments.actions import Failed, LoadedEnvironment, Reply
from tpu_grpo.environments.forked import ForkedEnvironments
from tpu_grpo.environments.requests import Act, Request
from tpu_grpo.environments.shared import SharedEnvironments


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
    failed: Failed | None = None
    """Why it has none any more."""

    @property
    def has_more_calls(self) -> bool:
        """Whether its turn has a call behind the present one."""
        return isinstance(self.request, Act) and self.made + 1 < len(self.request.action.calls)
