"""What is not as it was when a run is continued: settings, and the files that settings name.

A difference reads ``name: old -> new``. What it does to results is decided in config/setting_names.py.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpu_grpo.config import EFFECTS, Effect, RunConfig, effect_of, listed_name
from tpu_grpo.config.plugins import source_file
from tpu_grpo.run.model import known_directory

SHOWN = 60
"""Messages show so many characters of a value."""
ABSENT = "absent"
WEIGHTS_BYTES = 64 * 2**20
"""Files of a model that are larger hold weights. Only a reference model reads them again when a run is continued, so
without one their size is compared, and with one their content."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was."""

    name: str
    """The setting; entries of lists by their numbers, as in rewards.0.weight."""
    old: str
    new: str
    effect: Effect

    def __str__(self) -> str:
        old, new = _cut(self.old), _cut(self.new)
        return f"{self.name}: {self.old} -> {self.new}" if old == new else f"{self.name}: {old} -> {new}"

    @property
    def meaning(self) -> str:
        """Say what the change does to the results."""
        match self.effect:
            case "none":
                return "results do not depend on it"
            case "rounding":
                return "results compare, but not to the bit"
            case "results":
                return "allowed; results before and after do not compare"

    def is_in(self, names: Sequence[str]) -> bool:
        """Say whether one of the names is that of this setting, or of a section that it lies in."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def changed_settings(before: RunConfig, now: RunConfig) -> list[Change]:
    """List the settings that differ, in the order of the config."""
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (before, now))
    names = [*new, *(name for name in old if name not in new)]
    texts = {name: (_text(old, name), _text(new, name)) for name in names}
    schedule = now.optimizer.schedule
    return [Change(name, a, b, effect_of(name, schedule)) for name, (a, b) in texts.items() if a != b]


def changed_sources(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """List the files whose content differs, of settings that name files both times; see `sources`."""
    return [
        Change(setting, f"{file} {old.get(file, ABSENT)}", f"{file} {new.get(file, ABSENT)}", "results")
        for setting, new in now.items()
        if (old := before.get(setting)) is not None
        for file in {**old, **new}
        if old.get(file) != new.get(file)
    ]


def sources(config: RunConfig) -> dict[str, dict[str, str]]:
    """Setting -> name of a file -> what it holds, as a digest; of the user's own code, and of the model's directory.

    What such a file imports is not looked at. Data has a digest of its own, of the prompts as they are sampled.
    """
    found = {}
    for setting, name in _code(config):
        if (path := source_file(name)) is not None and path.is_file():
            found[setting] = {path.name: _digest(path)}
    if (model := known_directory(config)) is not None:
        whole = config.algorithm.beta > 0.0
        found["model.path"] = {path.name: _described(path, whole) for path in sorted(model.iterdir()) if path.is_file()}
    return found


def _code(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "algorithm.name", config.algorithm.name
    yield "optimizer.name", config.optimizer.name
    yield from (("environment.name", source) for source in config.environment.names.values())
    for where, rewards in (("rewards", config.rewards), ("evaluation.rewards", config.evaluation.rewards or ())):
        yield from ((f"{where}.{index}.name", reward.name) for index, reward in enumerate(rewards))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if listed_name(name) not in EFFECTS:  # a section
            yield from _leaves(value, f"{name}.")
        elif value and any(setting.startswith(listed_name(f"{name}.0.")) for setting in EFFECTS):  # a list of sections
            for index, entry in enumerate(value):
                yield from _leaves(entry, f"{name}.{index}.")
        else:
            yield name, value


def _text(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return ABSENT
    value = values[name]
    if value is None:
        return "unset"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _described(path: Path, whole: bool) -> str:
    size = path.stat().st_size
    return _digest(path) if whole or size <= WEIGHTS_BYTES else f"{size} bytes"


def _digest(path: Path) -> str:
    state = path.stat()
    return _digest_of(path, state.st_size, state.st_mtime_ns)


@cache
def _digest_of(path: Path, size: int, changed: int) -> str:
    """Digest a file; once, as long as it has this size and time of change."""
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
