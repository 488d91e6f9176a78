"""Turns YAML and overrides into a RunConfig; errors name the setting, its value, and a remedy."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tpu_grpo.config.run_config import RunConfig, known_names
from tpu_grpo.config.setting_names import ABSENT, SAME_VALUES, listed_name, meant, nearest
from tpu_grpo.config.yaml_dialect import read_yaml
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.untrusted_input import read_file

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED_CONFIGS = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"
"""The directory of the shipped configs: inside an installed package, or beside the package in a checkout."""
LARGEST_CONFIG = 2**22
"""The largest size of a config file, in bytes."""


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``section.key=value`` overrides in order.

    A run without a name is named after the file (grpo for experiments/grpo.yaml), so that configs use different
    directories.

    Raises:
        ConfigError: for an unreadable file, an unknown key (with the nearest known one) or a wrong value.
    """
    tree: dict[str, Any] = _read_yaml(Path(path)) if path is not None else {}
    for text in overrides:
        _apply_override(tree, text)
    name = "" if path is None else re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")
    if name and isinstance(run := tree.setdefault("run", {}), dict):
        run.setdefault("name", name)
    return parse_config(tree)


def changed_config(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Apply ``section.key=value`` overrides, in order, to a nested mapping of settings; raises as ``load_config``."""
    for text in overrides:
        _apply_override(tree, text)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """Validate a nested mapping of settings; raises a ConfigError that lists all unknown keys and wrong values."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        found = {_place(each): each for each in reversed(error.errors())}  # one error per setting: the first
        raise ConfigError("\n".join(_explain(where, each) for where, each in reversed(found.items()))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(read_file(path, LARGEST_CONFIG).decode())
    except FileNotFoundError:
        shipped = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise ConfigError(f"config file not found: {path}; shipped configs: {shipped or 'none here'}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} is not readable YAML: {_problem(error)}; correct it") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold sections (run:, model:, ...), got a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], text: str) -> None:
    name, equals, raw = text.partition("=")
    if not equals or not name:
        example = f"{text}=VALUE" if listed_name(text) in known_names() else "run.seed=1"
        raise ConfigError(f"an override must read section.key=value, got {text!r}; example: {example}")
    try:
        value = read_yaml(raw) if raw else ""
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: the value {raw!r:.200} is not YAML ({_problem(error)}); {_quoted(name)}") from None
    node = tree
    *sections, key = name.split(".")
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"{name}: {section} is not a section; write lists whole, e.g. rewards='[{{name: gsm8k}}]'"
            )
    node[key] = value
    if (other := {"run.epochs": "max_steps", "run.max_steps": "epochs"}.get(name)) and value is not None:
        node.pop(other, None)


def _quoted(name: str) -> str:
    return f"put a text in quotes of its own: {name}='\"...\"'"


def _problem(error: Exception) -> str:
    """Say in one line why a text is not valid YAML, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        what = f"{error.context}, {error.problem}" if str(error.problem).startswith("but ") else error.problem
        return f"{what}, in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())


def _place(error: Any) -> str:
    """Return the name of the setting that an error is about, without the types that pydantic inserts for a union."""
    parts = map(str, error["loc"])
    return ".".join(part for part in parts if not re.fullmatch(r"str|float|(tuple|dict)\[.*", part))


def _explain(where: str, error: Any) -> str:
    value = error["input"]
    match error["type"]:
        case "extra_forbidden":
            return f"{where} is not a setting (got {value!r:.200}); {_suggestion(where, value)}"
        case "value_error":
            return f"{where} {error['ctx']['error']}".lstrip()
        case "model_type":
            is_name = isinstance(value, str) and f"{listed_name(where)}.name" in known_names()
            remedy = f"write {{name: {value[:200]}}}" if is_name else _known_in(where)
            return f"{where} must be a section, got {value!r:.200}; {remedy}"
        case "tuple_type":
            return f"{where} must be a list, got {value!r:.200}; write it in brackets: {where}='[...]'"
        case "string_type":
            return f"{where} must be text, got {value!r:.200}; {_quoted(where)}"
    rule = re.sub(r", (unable to|got a number) .*", "", error["msg"]).removeprefix("Input should ")
    rule = f"must {rule}" if rule.startswith("be ") else f": {rule[0].lower()}{rule[1:]}"
    same = SAME_VALUES.get(str(value).lower())
    is_same = same is not None and f"'{same}'" in rule
    remedy = f"write {where}={same}" if is_same else f"`--help {listed_name(where).removesuffix('[i]')}` says more"
    return f"{where} {rule}, got {value!r:.200}; {remedy}".replace(" : ", ": ", 1)


def _suggestion(where: str, value: Any) -> str:
    """Suggest the intended setting, by other libraries' names, by the last part of the name, or by spelling."""
    section, known = where.rpartition(".")[0], known_names()
    whole = where
    while isinstance(value, dict) and len(value) == 1:  # for trainer.save_freq=5, the error names only trainer
        (key, value), *_ = value.items()
        whole = f"{whole}.{key}"
    if why := ABSENT.get(whole.rpartition(".")[2]):
        return why
    if (setting := meant(whole, known)) is not None:
        return f"did you mean {setting}?"
    return nearest(where, [name for name in known if name != section]) or _known_in(section)


def _known_in(section: str) -> str:
    inside = [name.rpartition(".") for name in known_names() if not name.endswith("]")]
    known = ", ".join(last for around, _, last in inside if around == listed_name(section))
    return f"known {f'in {section}' if section else 'sections'}: {known}"
