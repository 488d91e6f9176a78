"""Environments that ship, by their names in a config."""

from collections.abc import Mapping
from types import MappingProxyType

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "textarena": "tpu_grpo.environments.shipped.textarena_games:TextArena",
    }
)
"""Where the class of each is: package.module:Class."""
