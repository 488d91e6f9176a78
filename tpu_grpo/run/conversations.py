"""What a run knows of environments: the calls that it makes. `addition` finds the room that implements them."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpu_grpo.config import EnvironmentSection, RewardSpec
from tpu_grpo.config.plugins import addition
from tpu_grpo.data.rendering import ToolsOf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tpu_grpo.engine.turns import Conversations
    from tpu_grpo.records.stages import Prompt, Request


class Environments(Protocol):
    """The environments of a run, opened."""

    @property
    def places(self) -> int | None:
        """The most conversations on a host that may have their own processes at the same time; None for no limit."""
        ...

    def __call__(self, prompts: "Sequence[Prompt]", requests: "Sequence[Request]") -> "Conversations":
        """Prepare a conversation for each row, from its prompt and from the request that says how to sample it."""
        ...

    def keep_record(self, directory: Path, host: int) -> None:
        """Write the episodes of agents to files, from which a continued run takes them."""
        ...

    def forget(self, step: int) -> None:
        """Delete this host's records of ``step`` and of earlier steps."""
        ...

    def describe(self) -> list[str]:
        """Say in a line for each environment what it offers the policy."""
        ...

    def close(self) -> None:
        """End all environments and their processes."""
        ...


class LoadedEnvironments(Protocol):
    """The environments of a run, found and checked."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError or EpisodeError if the data lacks a column that the environments need."""
        ...

    def tools(self, record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the prompt of a record offers."""
        ...

    def open(
        self, tokenizer: "PreTrainedTokenizerFast", max_prompt_tokens: int, switches: Mapping[str, Any], *, keep: bool
    ) -> Environments:
        """Open the environments; with ``keep``, their attributes are kept after conversations."""
        ...


def load_environments(section: EnvironmentSection, rewards: Sequence[RewardSpec]) -> LoadedEnvironments | None:
    """Load the environments of a run with these rewards; None if it has none. Raises EpisodeError for those that do not
    fit them."""
    return addition("environments").load_environments(section, rewards) if section.is_on else None


def tools_of(loaded: LoadedEnvironments | None) -> ToolsOf | None:
    """Return a function that maps a record to the tools its prompt offers; None for a run without environments."""
    return None if loaded is None else loaded.tools
