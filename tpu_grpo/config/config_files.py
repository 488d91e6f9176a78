"""YAML and overrides become a RunConfig, or errors that name setting, value and remedy."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tpu_grpo.config.run_config import RunConfig, known_names
from tpu_grpo.config.setting_names import listed_name, nearest
from tpu_grpo.config.yaml_dialect import read_yaml
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.outside import read_file

LARGEST_CONFIG = 2**22
"""A config has at most so many bytes."""


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``section.key=value`` overrides in order.

    A run that is given no name has that of its file: grpo of experiments/grpo.yaml.

    Raises:
        ConfigError: for an unreadable file, an unknown key (with the nearest known one) or a wrong value.
    """
    tree: dict[str, Any] = _read_yaml(Path(path)) if path is not None else {}
    for text in overrides:
        _apply_override(tree, text)
    if path is not None:
        _name_by_file(tree, Path(path))
    return parse_config(tree)


def changed_config(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Apply ``section.key=value`` overrides, in order, to a nested mapping of settings; raises as ``load_config``."""
    for text in overrides:
        _apply_override(tree, text)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a nested mapping of settings.

    Raises:
        ConfigError: for an unknown key or a wrong value, all of them in one message.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(read_file(path, LARGEST_CONFIG).decode())
    except FileNotFoundError:
        shipped = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise ConfigError(f"config file not found: {path}; shipped configs: {shipped or 'none here'}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} is not readable YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold sections (run:, model:, ...), got a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], text: str) -> None:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override must read section.key=value, got {text!r}; example: run.seed=1")
    try:
        value = read_yaml(raw) if raw else ""
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: the value {raw!r} is not YAML ({error}); {_quoted(name)}") from None
    node = tree
    *sections, key = name.split(".")
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"{name}: {section} is not a section; write lists whole, e.g. rewards='[{{name: gsm8k}}]'"
            )
    node[key] = value


def _name_by_file(tree: dict[str, Any], path: Path) -> None:
    """Name a run without a name by its config file, so that the runs of two files do not share a directory."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")
    run = tree.setdefault("run", {})
    if plain and isinstance(run, dict):
        run.setdefault("name", plain)


def _quoted(name: str) -> str:
    return f"put a text in quotes of its own: {name}='\"...\"'"


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    value = error["input"]
    match error["type"]:
        case "extra_forbidden":
            return f"{where} is not a setting (got {value!r}); {_nearest(where)}"
        case "value_error":
            return f"{where} {error['ctx']['error']}".lstrip()
        case "model_type":
            return f"{where} must be a section, got {value!r}; {_known_in(where)}"
        case "tuple_type":
            return f"{where} must be a list, got {value!r}; write it in brackets: {where}='[...]'"
        case "string_type":
            return f"{where} must be text, got {value!r}; {_quoted(where)}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {message}, got {value!r}; `--help` lists every setting with its type and default"


def _nearest(where: str) -> str:
    section = where.rpartition(".")[0]
    return nearest(where, [name for name in known_names() if name != section]) or _known_in(section)


def _known_in(section: str) -> str:
    inside = [name.rpartition(".") for name in known_names() if not name.endswith("]")]
    known = ", ".join(last for around, _, last in inside if around == listed_name(section))
    return f"known {f'in {section}' if section else 'sections'}: {known}"
