"""What tests of the config ask it for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import TeacherSpec, load_config
from tpu_grpo.config.data_sections import SourceSpec
from tpu_grpo.records.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = sorted((REPOSITORY / "configs").rglob("*.yaml"))


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def file_message(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of what a dumped config holds, in its order; options and columns are leaves, though mappings."""
    for key, value in tree.items():
        if key == "rewards" and not prefix:
            yield "rewards", [reward["name"] for reward in value]
            yield from leaves(value[0] | {"name": "required"}, "rewards[i].")
        elif key == "sources":
            yield "data.sources", value
            yield from leaves(SourceSpec(path="required").model_dump(mode="json"), "data.sources[i].")
        elif key == "teachers":
            yield key, value
            yield from leaves(TeacherSpec().model_dump(mode="json"), "teachers[i].")
        elif isinstance(value, dict) and key not in ("options", "columns"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
