"""Reads a checkpoint's config.json: its family, and the settings that decide its forward pass.

What the family does not support is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tpu_grpo.models.families import FAMILIES, REFUSED, DecoderConfig, Family
from tpu_grpo.models.families.rope import with_older_rope
from tpu_grpo.models.json_files import read_json
from tpu_grpo.records.errors import CheckpointError

CONFIG_FILE = "config.json"
_KINDS = {"int": "a whole number >= 1", "float": "a number > 0", "bool": "true or false"}


def read_hf_config(directory: Path) -> tuple[dict[str, Any], Family, DecoderConfig]:
    """Return (the content of config.json, its family, the settings that the family takes from it).

    What transformers 5 writes as rope_parameters stands under the names that it had before.

    Raises:
        CheckpointError: for a missing or broken file, an unsupported family, or a setting it does not support.
    """
    hf_config = with_older_rope(read_json(directory / CONFIG_FILE))
    family = _family_of(hf_config, directory)
    _refuse_unsupported(hf_config, family, directory)
    return hf_config, family, _decoder_config(hf_config, family, directory)


def _family_of(hf_config: Mapping[str, Any], directory: Path) -> Family:
    path, model_type = directory / CONFIG_FILE, hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        raise CheckpointError(
            f"{path}: model_type must be one of the supported families ({', '.join(FAMILIES)}), got {model_type!r}"
            f"{f' ({reason})' if reason else ''}; choose a checkpoint of one of them"
        )
    architectures = hf_config.get("architectures")
    if architectures != [family.architecture]:
        raise CheckpointError(
            f"{path}: architectures must be [{family.architecture!r}] for model_type {model_type}, got "
            f"{architectures!r}; choose the causal language model's checkpoint"
        )
    return family


def _refuse_unsupported(hf_config: Mapping[str, Any], family: Family, directory: Path) -> None:
    for rule in family.rules:
        if rule.setting not in hf_config:
            if rule.required:
                raise CheckpointError(
                    f"{directory / CONFIG_FILE}: {rule.setting} must be {rule.accepted}, and it is left out; "
                    f"{rule.remedy}"
                )
        elif not rule.accepts(value := hf_config[rule.setting]):
            raise CheckpointError(
                f"{directory / CONFIG_FILE}: {rule.setting} must be {rule.accepted}, got {value!r}; {rule.remedy}"
            )


def _decoder_config(hf_config: Mapping[str, Any], family: Family, directory: Path) -> DecoderConfig:
    path, wanted = directory / CONFIG_FILE, fields(family.config)
    values = _with_head_dim({**family.defaults, **hf_config}, derived="head_dim" not in family.defaults)
    if missing := [field.name for field in wanted if field.name not in values]:
        raise CheckpointError(f"{path} must give {', '.join(missing)}, which it lacks; copy the model's own again")
    for field in wanted:
        kind, value = str(field.type), values[field.name]
        if kind in _KINDS and not _is_a(kind, value):
            raise CheckpointError(
                f"{path}: {field.name} must be {_KINDS[kind]}, got {value!r}; copy the model's own again"
            )
    config = family.config(**{field.name: values[field.name] for field in wanted})
    if contradiction := config.contradiction():
        raise CheckpointError(f"{path}: {contradiction}; copy the model's own config.json again")
    return config


def _with_head_dim(values: dict[str, Any], *, derived: bool) -> dict[str, Any]:
    """Add the ``head_dim`` that follows from other settings, if the family derives it and it is left out or null."""
    sizes: list[Any] = [values.get(name) for name in ("hidden_size", "num_attention_heads")]
    if not derived or values.get("head_dim") is not None or not all(_is_a("int", size) for size in sizes):
        return values
    return values | {"head_dim": sizes[0] // sizes[1]}


def _is_a(kind: str, value: Any) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    numbers = int if kind == "int" else (int, float)
    return isinstance(value, numbers) and 0 < value < math.inf
