"""Adapters for classes whose actions are texts, one file each; the first that fits a class takes it.

The option ``adapter`` names one where a class does not show what it is.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter
from tpu_grpo.environments.adapters.gym import GymAdapter
from tpu_grpo.environments.adapters.openenv import OpenenvAdapter
from tpu_grpo.environments.adapters.skyrl import SkyrlAdapter
from tpu_grpo.environments.adapters.tunix import TunixAdapter
from tpu_grpo.records.errors import EpisodeError

OPTION = "adapter"
TOOLS = "tools"
"""The value of the option for a class that is one of tools, though one of them is called ``step``."""
ADAPTERS: Mapping[str, type[Adapter]] = MappingProxyType(
    {"tunix": TunixAdapter, "openenv": OpenenvAdapter, "skyrl": SkyrlAdapter, "gym": GymAdapter}
)


def adapter_for(target: Any, options: Mapping[str, Any]) -> type[Adapter] | None:
    """Return the adapter for a class; None for one of tools.

    Raises:
        EpisodeError: for an option ``adapter`` that names none.
    """
    if (named := options.get(OPTION)) is not None:
        if named not in (*ADAPTERS, TOOLS):
            raise EpisodeError(
                f"the environment's option adapter must be one of {', '.join(ADAPTERS)}, {TOOLS}, got {named!r}"
            )
        return ADAPTERS.get(named)
    return next((adapter for adapter in ADAPTERS.values() if adapter.fits(target)), None)


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are the class's own."""
    return {name: value for name, value in options.items() if name != OPTION}
