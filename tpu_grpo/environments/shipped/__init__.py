"""Environments that ship, by their names in a config."""

from collections.abc import Mapping
from types import MappingProxyType

SHIPPED: Mapping[str, str] = MappingProxyType({})
"""Where the class of each is: package.module:Class."""
