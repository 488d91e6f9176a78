"""Values and digests of what a run depends on, compared between its hosts and with the run that it continues.

    hosts.agree_all(fingerprints(config))             # before anything is built
    hosts.agree_all(model_fingerprints(directory))    # for a built-in model, after it was trained
    changed_settings(before, config.values())                  # "optimizer.learning_rate: 1e-06 -> 0.0001"

tpu_grpo/config/setting_names.py says how a change of each setting affects results.
"""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpu_grpo.config import (
    BUILTIN,
    EVERYTHING,
    GYM,
    HUB,
    AlgorithmSection,
    Effect,
    ModelSection,
    RunConfig,
    TeacherSpec,
    effect_of,
)
from tpu_grpo.config.plugins import source_file
from tpu_grpo.data.record_files import is_address
from tpu_grpo.observe.summary import versions
from tpu_grpo.records.short_texts import shortened

OWN_SETTINGS = {"hosts.index", "run.dir"}
"""Settings that may differ between hosts: the number of the host, and the directory of its files."""
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
"""Variables that change what is compiled, or how sums are split, in addition to JAX_*."""
OWN_ENVIRONMENT = {"JAX_COMPILATION_CACHE_DIR"}
SHOWN = 60
"""Messages show this many characters of a value at most."""
ABSENT = "absent"
WEIGHTS_BYTES = 64 * 2**20
"""Model files larger than this hold weights. A continued run needs them only for a reference model. So their content
is compared if the run has a reference model, else only their size."""


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Return what hosts must agree on, as text by name: settings, versions, environment, digests of all files read."""
    found = {f"setting {name}": repr(value) for name, value in config.values().items() if name not in OWN_SETTINGS}
    found |= {f"version of {name}": value for name, value in versions().items()}
    variables = (name for name in os.environ if name.startswith("JAX_") or name in ENVIRONMENT)
    found |= {f"environment variable {n}": os.environ[n] for n in sorted(variables) if n not in OWN_ENVIRONMENT}
    return found | _digests(_files(config.model, config.data_paths, config.plugins, config.teachers))


def model_fingerprints(directory: Path) -> dict[str, str]:
    """Return the digest of every file of a model's directory, by name; the tokenizer's files are included."""
    return _digests(_model_files(directory))


def _digests(files: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return digests by name. An unreadable file gets a text instead; the code that opens it later raises the error."""

    def digest(named: tuple[str, Path]) -> tuple[str, str]:
        name, path = named
        try:
            return name, _sha256(path)
        except OSError as error:
            return name, f"not readable: {type(error).__name__}"

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(digest, files))


def _files(
    model: ModelSection,
    data: Mapping[str, str],
    plugins: Iterable[tuple[str, str, str]],
    teachers: Iterable[TeacherSpec] = (),
) -> Iterator[tuple[str, Path]]:
    directory = Path(model.path).expanduser()
    if model.builtin is None and directory.is_dir():
        yield from _model_files(directory)
    for teacher in teachers:
        if (directory := _directory(teacher.as_model())) is not None:
            yield from ((f"{name} of the teacher {teacher.shown}", file) for name, file in _model_files(directory))
    if (adapters := model.lora.path) is not None:
        from tpu_grpo.models.lora import SETTINGS_FILE, TENSORS_FILE  # only needed here

        for name in (SETTINGS_FILE, TENSORS_FILE):
            yield f"adapter file {name}", adapters.expanduser() / name
    for setting, given in data.items():
        yield from _data_files(setting, given)
    for _, kind, name, source in _code(plugins):
        yield f"source of {kind} {name}", source


def _data_files(setting: str, given: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the data files, or of the source of the user's data function; none for URLs and the Hub."""
    path = Path(given).expanduser()
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            yield f"data file {file.relative_to(path)} of {setting}", file
    elif is_address(given):
        return
    elif not path.exists() and (matches := sorted(glob.glob(str(path), recursive=True))):
        yield from ((f"data file {match} of {setting}", Path(match)) for match in matches)
    elif ":" not in given or path.exists():
        yield f"data file of {setting}", path
    elif (source := source_file(given)) is not None and not given.startswith((BUILTIN, GYM, HUB)):
        yield f"source of {setting}", source


def _model_files(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        yield f"model file {path.name}", path


@dataclass(frozen=True)
class Change:
    """A setting or file that differs from the earlier run's."""

    name: str
    """The setting; entries of lists are numbered, as in rewards.0.weight."""
    old: str
    new: str
    effect: Effect

    def __str__(self) -> str:
        old, new = (shortened(text, SHOWN) for text in (self.old, self.new))
        return f"{self.name}: {self.old} -> {self.new}" if old == new else f"{self.name}: {old} -> {new}"

    @property
    def meaning(self) -> str:
        """Describe the effect of the change on results."""
        return {
            "none": "results do not depend on it",
            "rounding": "results compare, but not to the bit",
            "results": "allowed; results before and after do not compare",
        }[self.effect]

    def is_in(self, names: Sequence[str]) -> bool:
        """Whether one of the names is this setting, a section that contains it, or all."""
        return any(name in (self.name, EVERYTHING) or self.name.startswith(f"{name}.") for name in names)


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], *, rate_ends_with_run: bool = False
) -> list[Change]:
    """List the settings that differ, in the order of the config, between the values of two configs.

    ``rate_ends_with_run`` says whether the learning rate now depends on the last step of the run.
    """
    names = [*now, *(name for name in before if name not in now)]
    texts = {name: (_text(before, name), _text(now, name)) for name in names}
    return [
        Change(name, a, b, effect_of(name, rate_ends_with_run=rate_ends_with_run))
        for name, (a, b) in texts.items()
        if a != b
    ]


def changed_sources(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """List the files whose content differs between two runs, by the setting that names them in both; see `sources`."""
    return [
        Change(setting, f"{file} {old.get(file, ABSENT)}", f"{file} {new.get(file, ABSENT)}", "results")
        for setting, new in now.items()
        if (old := before.get(setting)) is not None
        for file in {**old, **new}
        if old.get(file) != new.get(file)
    ]


def sources(
    plugins: Iterable[tuple[str, str, str]],
    section: ModelSection,
    algorithm: AlgorithmSection,
    teachers: Sequence[TeacherSpec] = (),
) -> dict[str, dict[str, str]]:
    """Map each setting that names the user's code or a model to the digests of its files by file name.

    Modules that the user's files import are left out. Data is compared elsewhere, by a digest of the sampled prompts.
    """
    found = {
        setting: {path.name: f"sha256 {_sha256(path)[:16]}"} for setting, _, _, path in _code(plugins) if path.is_file()
    }
    model = _directory(section)
    of_start = any(teacher.path is None for teacher in teachers)
    no_reference = algorithm.beta == 0.0 and algorithm.tunix is None and not of_start
    if model is not None:
        found["model.path"] = {
            path.name: f"{size} bytes"
            if (size := path.stat().st_size) > WEIGHTS_BYTES and no_reference
            else f"sha256 {_sha256(path)[:16]}"
            for path in sorted(model.iterdir())
            if path.is_file()
        }
    for number, teacher in enumerate(teachers):
        if (directory := _directory(teacher.as_model())) is not None:
            files = (file for file in sorted(directory.iterdir()) if file.is_file())
            found[f"teachers.{number}.path"] = {file.name: f"sha256 {_sha256(file)[:16]}" for file in files}
    return found


def _directory(model: ModelSection | None) -> Path | None:
    """Return the directory of a model, if it is on this machine and not built in."""
    if model is None or model.builtin is not None:
        return None
    path: Path | None = Path(model.path).expanduser()
    if model.hub is not None:
        from tpu_grpo.models.fetching import fetched  # only needed here

        path = fetched(model.hub)
    return path if path is not None and path.is_dir() else None


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, ABSENT)
    if value is None:
        return "unset"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _code(plugins: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str, Path]]:
    """Yield (setting, kind, name, file) of each plugin that the user wrote."""
    for setting, kind, name in plugins:
        if (source := source_file(name)) is not None:
            yield setting, kind, name, source


def _sha256(path: Path) -> str:
    state = path.stat()
    return _sha256_of(path, state.st_size, state.st_mtime_ns)


@cache
def _sha256_of(path: Path, size: int, changed: int) -> str:
    """Digest a file; cached until its size or modification time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
