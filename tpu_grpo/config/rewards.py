"""An entry of the list of rewards, and what must hold between entries."""

import bisect
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from tpu_grpo.config.section import PositiveInt, Section


class RewardSpec(Section):
    """One reward of the list."""

    name: str
    """A shipped name (docs/rewards.md lists them), an installed entry point, path.py:function or
    package.module:function."""
    label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What metrics call it; the shipped name or the function's when unset."""
    weight: float | dict[int, float] = 1.0
    """Factor of this reward in the sum; or a schedule {step: factor}, straight lines between the steps named."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments passed to the reward: at every call to a function, once to a class's constructor."""
    only_if: str | None = None
    """Another reward, as metrics call it: rows it does not score above 0 get 0 from this one, unasked."""
    workers: int | None = Field(default=None, ge=0)
    """Processes of its own; 0 calls it in the main process, for what is cheap and cannot hang. Unset: 1 for your own
    rewards and for shipped ones that run foreign code or long computations, 0 for the rest."""
    timeout: float = Field(default=60.0, gt=0.0)
    """Seconds a batch may take."""
    on_error: Literal["stop", "skip", "value"] = "stop"
    """When it raises, is late, dies or returns what is not a number. stop: the run ends and says why; skip: the rows
    concerned go without this reward, and one left without any takes its group's mean; value: they get error_value."""
    error_value: float = 0.0
    """For on_error=value."""
    messages: bool = False
    """Pass each prompt and completion as a list of one message, {role, content}, instead of as a text."""
    recycle: PositiveInt = 1000
    """Calls after which a worker process is replaced by a fresh one."""
    memory_gb: float = Field(default=8.0, gt=0.0)
    """Memory a worker process may allocate."""
    deterministic: bool | None = None
    """The same text always gets the same value: hosts compare it on one group a step. When unset true, but false for
    the shipped judge; set it to false for a reward of your own that asks a model, or draws."""

    @field_validator("weight")
    @classmethod
    def _schedule_has_steps(cls, value: float | dict[int, float]) -> float | dict[int, float]:
        if isinstance(value, dict) and (not value or min(value) < 0):
            raise ValueError(f"must be a number or a schedule {{step: factor}} of steps >= 0, got {value}")
        return value

    @property
    def shown(self) -> str:
        """What metrics call it."""
        return self.label or self.name.rpartition(":")[2]

    def weight_at(self, step: int) -> float:
        """The factor at a step: before the first step of a schedule its first value, after the last its last.

        With ``{100: 0, 200: 1}`` it is 0 at step 100, 0.5 at step 150 and 1 from step 200 on.
        """
        if not isinstance(self.weight, dict):
            return self.weight
        steps = sorted(self.weight)
        later = bisect.bisect_right(steps, step)
        if later in (0, len(steps)):
            return self.weight[steps[min(later, len(steps) - 1)]]
        start, end = steps[later - 1], steps[later]
        done = (step - start) / (end - start)
        return (1.0 - done) * self.weight[start] + done * self.weight[end]


def check_rewards(specs: Sequence[RewardSpec]) -> None:
    """See that rewards are told apart and that ``only_if`` leads somewhere.

    Raises:
        ValueError: for two rewards of one name, a gate that is not there, or gates in a circle.
    """
    shown = [spec.shown for spec in specs]
    if twice := sorted({name for name in shown if shown.count(name) > 1}):
        raise ValueError(
            f"rewards must have names of their own in the metrics, got {twice} twice; give one of them a label"
        )
    gates = {spec.shown: spec.only_if for spec in specs}
    for name, gate in gates.items():
        if gate is not None and gate not in gates:
            raise ValueError(f"rewards: only_if of {name} must name another reward, got {gate!r}; there are {shown}")
        passed = [name]
        while gate is not None:
            if gate in passed:
                raise ValueError(f"rewards: only_if must not lead back, got {' <- '.join([*passed, gate])}; drop one")
            passed.append(gate)
            gate = gates[gate]
