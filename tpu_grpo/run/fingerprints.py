"""What must be the same on every host before anything is built, as names and short values.

    hosts.agree_all(fingerprints(config))
    hosts.agree_all(model_fingerprints(directory))    # again, where the model is built in and was taught just now

Every setting is a value of its own, so that a disagreement names the setting; files are compared by sha256.
"""

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpu_grpo.config import BUILTIN, GYM, HUB, RunConfig
from tpu_grpo.config.plugins import source_file
from tpu_grpo.data.locations import is_address
from tpu_grpo.models.lora import SETTINGS_FILE, TENSORS_FILE
from tpu_grpo.observe.summary import versions

OWN_SETTINGS = {"hosts.index", "run.dir", "run.compilation_cache"}
"""Settings that may differ: which host this is, and where it keeps its files."""
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")
"""Variables beside JAX_* that change what is compiled, or how sums are split."""
OWN_ENVIRONMENT = {"JAX_COMPILATION_CACHE_DIR"}


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Name -> value of everything hosts must agree on: settings, versions, environment, and all files that are read."""
    found = {f"setting {name}": value for name, value in _settings(config.model_dump(mode="json"))}
    found |= {f"version of {name}": value for name, value in versions().items()}
    found |= {f"environment variable {name}": os.environ[name] for name in _variables()}
    return found | _digests(dict(_files(config)))


def model_fingerprints(directory: Path) -> dict[str, str]:
    """Name -> digest of every file of a model's directory, tokenizer included."""
    return _digests(dict(_model_files(directory)))


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    """A file that cannot be read is a value too: the message that names it comes from whoever opens it."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(_sha256, files.values()), strict=True))


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _settings(value, f"{name}.")
        elif name not in OWN_SETTINGS:
            yield name, repr(value)


def _variables() -> list[str]:
    names = (n for n in os.environ if n.startswith("JAX_") or n in ENVIRONMENT)
    return sorted(n for n in names if n not in OWN_ENVIRONMENT)


def _files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    model = Path(config.model.path).expanduser()
    if not config.model.path.startswith(BUILTIN) and model.is_dir():
        yield from _model_files(model)
    if (adapters := config.model.lora.path) is not None:
        for name in (SETTINGS_FILE, TENSORS_FILE):
            yield f"adapter file {name}", adapters.expanduser() / name
    for setting, given in config.data_paths.items():
        yield from _data_files(setting, given)
    if (source := source_file(config.algorithm.name)) is not None:
        yield f"source of algorithm {config.algorithm.name}", source
    for environment in config.environment.names.values():
        if (source := source_file(environment)) is not None:
            yield f"source of environment {environment}", source
    for reward in (*config.rewards, *(config.evaluation.rewards or ())):
        if (source := source_file(reward.name)) is not None:
            yield f"source of reward {reward.name}", source


def _data_files(setting: str, given: str) -> Iterator[tuple[str, Path]]:
    """Files whose contents, or code, the prompts come from; what is made or fetched is compared once it is there."""
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


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"not readable: {type(error).__name__}"
