"""List every setting with its type, default and meaning, for --help."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from tpu_grpo.config.data import RewardSpec
from tpu_grpo.config.run_config import RunConfig
from tpu_grpo.config.section import Section


def settings() -> Iterator[tuple[str, str, str, str]]:
    """Yield every setting as (name, type, default, meaning), in the order of the sections."""
    yield from _settings_of(RunConfig, "")


def _settings_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _settings_of(kind, f"{prefix}{name}.")
        elif entry := _entry_of(kind):
            default = "unset" if info.default is None else str([e.name for e in info.default])
            yield prefix + name, "list", default, info.description or ""
            if entry is not RewardSpec or not prefix:  # described once
                yield from _settings_of(entry, f"{prefix}{name}[i].")
        else:
            default = "required" if info.is_required() else _yaml_scalar(info.get_default())
            yield prefix + name, _type_name(kind), default, " ".join((info.description or "").split())


def _entry_of(kind: Any) -> type[Section] | None:
    """Return the section that a list holds: RewardSpec of ``tuple[RewardSpec, ...]``, also of that or None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(filter(None, map(_entry_of, get_args(kind))), None)
    inside = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inside if isinstance(inside, type) and issubclass(inside, Section) else None


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join("unset" if a is type(None) else _type_name(a) for a in get_args(kind))
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    return getattr(kind, "__name__", str(kind)).lower() if not get_origin(kind) else "mapping"


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "unset"
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
