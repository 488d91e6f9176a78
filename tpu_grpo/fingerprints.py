"""What must be the same on every host before a run starts, as names and short values.

    hosts.agree_all(fingerprints(config, directory_of_the_model))

Every setting is a value of its own, so that a disagreement names the setting; files are compared by sha256.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.metrics.summary import versions

OWN_SETTINGS = {"hosts.index", "run.dir"}
"""Settings that may differ: which host this is, and where it keeps its files."""
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables beside JAX_* that change what is compiled."""
OWN_ENVIRONMENT = {"JAX_COMPILATION_CACHE_DIR"}


def fingerprints(config: RunConfig, model: Path) -> dict[str, str]:
    """Name -> value of everything hosts must agree on."""
    found = {f"setting {name}": value for name, value in _settings(config.model_dump(mode="json"))}
    found |= {f"version of {name}": value for name, value in versions().items()}
    found |= {f"environment variable {name}": os.environ[name] for name in _variables()}
    files = dict(_files(config, model))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_sha256, files.values())
        found |= dict(zip(files, digests, strict=True))
    return found


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


def _files(config: RunConfig, model: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(p for p in model.iterdir() if p.is_file()):
        yield f"model file {path.name}", path
    for setting, given in (("data.path", config.data.path), ("evaluation.path", config.evaluation.path)):
        if given and not given.startswith(BUILTIN):
            yield f"data file of {setting}", Path(given).expanduser()
    for reward in config.rewards:
        if (source := _source_of(reward.name)) is not None:
            yield f"source of reward {reward.name}", source


def _source_of(name: str) -> Path | None:
    where, colon, _ = name.rpartition(":")
    if not colon:
        return None  # shipped with this package, whose version is compared
    if where.endswith(".py"):
        return Path(where)
    spec = importlib.util.find_spec(where)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
