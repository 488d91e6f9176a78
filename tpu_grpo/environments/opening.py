"""Opens the environments that a config names; the core of this package (config/plugins.py) enters this room here.

loaded = load_environments(config.environment, config.rewards)    # finds the classes, before jax is imported
environments = loaded.open(tokenizer, config.data.max_prompt_tokens, {}, keep=False)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import EnvironmentSection, RewardSpec
from tpu_grpo.environments.actions import COLUMN, LoadedEnvironment
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.records.errors import DataError, EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tpu_grpo.environments.episodes import Environments


@dataclass(frozen=True)
class LoadedEnvironments:
    """The environments of a run, found and checked."""

    by_name: Mapping[str, LoadedEnvironment]
    """By their names in the data column `environment`; by "" if there is only one."""
    section: EnvironmentSection

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if the data lacks the column that selects the environment, EpisodeError if it lacks one that
        ``reset`` requires."""
        if "" not in self.by_name and COLUMN not in columns:
            raise DataError(
                f"several environments need a column {COLUMN!r} that chooses among {', '.join(self.by_name)}, the data "
                f"has {', '.join(columns)}; add it"
            )
        for key, environment in self.by_name.items():
            given = [column for column in columns if not key or column != COLUMN]
            if missing := [column for column in environment.requires if column not in given]:
                raise EpisodeError(
                    f"environment {environment.name}: reset requires {missing[0]!r}, which is no column of the data; "
                    f"columns: {', '.join(given) or 'none'}. Add the column (data.columns gives one another name), or "
                    "give the parameter a default"
                )

    def tools(self, record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the prompt of a record offers."""
        name = "" if "" in self.by_name else str(record.get(COLUMN))
        if name not in self.by_name:
            raise DataError(
                f"the column {COLUMN!r} must name one of the environments {', '.join(self.by_name)}, got {name!r} in "
                f"{where}"
            )
        return self.by_name[name].tools

    def open(
        self, tokenizer: "PreTrainedTokenizerFast", max_prompt_tokens: int, switches: Mapping[str, Any], *, keep: bool
    ) -> "Environments":
        """Open the environments; ``switches`` are further arguments of the chat template.

        With ``keep``, the attributes of environments are kept after conversations, for rewards that read them. Raises
        ConfigError for a chat template that cannot write tools or several turns.
        """
        from tpu_grpo.environments.chat_format import ChatFormat  # these import transformers
        from tpu_grpo.environments.episodes import Environments
        from tpu_grpo.environments.pool import EnvironmentPool

        chat_formats = {
            name: ChatFormat(tokenizer, environment.tools, self.section.tool_format, switches)
            for name, environment in self.by_name.items()
        }
        pool = EnvironmentPool(self.by_name, self.section, keep)
        return Environments(self.by_name, chat_formats, pool, self.section, max_prompt_tokens)


def load_environments(section: EnvironmentSection, specs: Sequence[RewardSpec]) -> LoadedEnvironments:
    """Load the environments of a run; ``specs`` are its rewards, those of evaluations included.

    Raises:
        EpisodeError: for an environment that cannot be found or whose class is not an environment, and if no
            environment gives the rewards that the config asks for.
    """
    loaded = {name: load_environment(source, section.options, name) for name, source in section.names.items()}
    names = ", ".join(environment.name for environment in loaded.values())
    if any(spec.name == "environment" for spec in specs) and not any(one.gives_reward for one in loaded.values()):
        raise EpisodeError(
            f"the reward environment, which is the only one unless rewards names others, needs an environment with "
            f"get_reward, get_turn_rewards or step, got {names} without; add one of these methods, or set rewards"
        )
    if section.turn_credit == "turn" and not any(one.gives_turn_rewards for one in loaded.values()):
        raise EpisodeError(
            f"environment.turn_credit=turn needs an environment with get_turn_rewards or step, got {names} without; "
            "add one of them, or leave it at episode"
        )
    return LoadedEnvironments(loaded, section)
