"""These are the settings of environments, with which the policy has conversations of several turns."""

from typing import Literal

from pydantic import Field, field_validator

from tpu_grpo.config.counts import AutoOrCount
from tpu_grpo.config.section import Options, PlainName, PositiveInt, Section

ToolFormat = Literal["auto", "hermes", "llama3", "qwen3_coder", "python"]


class EnvironmentSection(Section):
    """These settings say with what the policy has conversations: tools and turns. Without a name there are none, and a
    completion is one answer."""

    name: str | dict[PlainName, str] | None = None
    """Have conversations with this environment: a shipped name (docs/environments.md lists them), path.py:Class or
    package.module:Class; or several, {name: environment}, of which the column `environment` of the data chooses."""
    options: Options = Field(default={})
    """Pass these keyword arguments to the environment's constructor."""
    workers: AutoOrCount = "auto"
    """Let this many conversations have an environment at once on each host, each in a process of its own, and begin the
    next when one is over; the engines of a host share them. Of an environment with async tools, which a process has
    many of, use this many processes. auto: no limit, and one process."""
    timeout: float = Field(default=60.0, gt=0.0)
    """Give each call of a tool, and everything else that an environment is asked, this many seconds."""
    max_turns: PositiveInt = 8
    """End a conversation after this many turns of the policy."""
    max_turn_tokens: PositiveInt | None = None
    """Sample at most this many tokens in a turn; when unset, what is left of rollout.max_new_tokens, which limits the
    whole conversation after its prompt, answers of the environment included."""
    max_observation_tokens: PositiveInt = 512
    """Cut what an environment answers in a turn after this many tokens; the answers to several calls share them."""
    tool_format: ToolFormat = "auto"
    """Read tool calls so. hermes: JSON in <tool_call> tags, as Qwen writes it; llama3: JSON alone; qwen3_coder: XML in
    <tool_call> tags; python: calls as in Python. auto: what the chat template shows."""
    on_error: Literal["stop", "skip", "value"] = "stop"
    """Do this when an environment raises outside of a tool, is late, dies, or gives rubbish. stop: the run ends and
    says why; skip: the conversation ends there and is not learned from, and takes its group's mean where advantages
    are computed; value: it ends there, and every reward, and all together, is error_value. A tool that raises is none
    of these: the policy is told what it raised."""
    error_value: float = 0.0
    """Give this reward to a conversation whose environment failed, when on_error is value."""
    turn_credit: Literal["episode", "turn"] = "episode"
    """Give all turns the advantage of their conversation, or add to each what its own rewards were worth (turn): the
    sum of them from it on, less the mean over the group's conversations that came as far."""
    memory_gb: float = Field(default=8.0, gt=0.0)
    """Let an environment's process allocate this much memory, in GB."""
    recycle: PositiveInt = 1000
    """Replace a process by a fresh one after this many conversations."""
    tool_steps: PositiveInt = 16
    """Go on with a conversation this many decode steps after its turn ended, while others decode; its environment has
    that time for free. Engines that have nothing else to do go on as soon as it has answered."""

    @field_validator("name")
    @classmethod
    def _some_name(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if value is not None and not value:
            raise ValueError(f"must name an environment, got {value!r}; leave it unset for none")
        return value

    @property
    def is_on(self) -> bool:
        """Say whether the policy has conversations."""
        return self.name is not None

    @property
    def names(self) -> dict[str, str]:
        """Return the environments by the names that the column `environment` has for them; "" for the only one."""
        if self.name is None:
            return {}
        return self.name if isinstance(self.name, dict) else {"": self.name}
