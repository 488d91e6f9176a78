"""Holds the rules for config.json that families share."""

from __future__ import annotations

from typing import Any

from tpu_grpo.models.families.family import SettingRule

_OTHER_CHECKPOINT = "the libraries do not have it, so train a checkpoint without it"


def off(setting: str, remedy: str = _OTHER_CHECKPOINT) -> SettingRule:
    """Make the rule that a setting must be false, 0 or null."""
    return SettingRule(setting, "false, 0 or null", lambda value: not value, remedy)


def null(setting: str, remedy: str) -> SettingRule:
    """Make the rule that a setting must be null."""
    return SettingRule(setting, "null", lambda value: value is None, remedy)


def number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_ROPE_SCALING = null(
    "rope_scaling",
    "the libraries do not scale its positions: set it to null to train within the original context length",
)
NO_ATTENTION_BIAS = off("attention_bias")

PLAIN = (
    null(
        "rope_parameters",
        "the libraries have one base of positions for all layers: it must hold a rope_theta, no other than one at the "
        "top level",
    ),
    SettingRule("partial_rotary_factor", "1", lambda value: value in (1, None), "Tunix's model rotates whole heads"),
    off("attention_dropout", "Tunix's model has no dropout: set it to 0"),
    off("quantization_config", "train the unquantized checkpoint"),
)
"""The rules of every family."""

COMMON = (
    *PLAIN,
    SettingRule("hidden_act", "silu", lambda value: value == "silu", "the libraries always compute silu"),
    off("use_sliding_window", "the libraries attend to everything: set it to false if no sequence exceeds the window"),
    SettingRule(
        "layer_types",
        "full_attention in every layer",
        lambda value: value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value)),
        "the libraries attend to everything in every layer",
    ),
)
"""The rules of every family that computes silu and attends to everything."""
