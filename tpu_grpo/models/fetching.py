"""Fetches a model of the Hugging Face hub: the files that a run needs, once, into the hub's own cache.

    directory = fetch("Qwen/Qwen3-0.6B", say=print)       # or Qwen/Qwen3-0.6B@REVISION

What it takes is said before it begins. What is in the cache already is not fetched again, and without a network the
cache alone is looked at.
"""

import fnmatch
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tpu_grpo.config import HUB
from tpu_grpo.records.errors import CheckpointError

WANTED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "merges.txt",
    "vocab.json",
)
"""Files of these names, in the top directory, make a checkpoint."""
UNWANTED = ("consolidated*",)
"""Some models have their weights twice, under the publisher's own names, too."""


@cache
def fetch(name: str, say: Callable[[str], None]) -> Path:
    """Return the directory of a model of the hub, whose files are fetched if they are not here.

    Args:
        name: owner/model, or owner/model@revision.
        say: is told what has to be fetched, before it is.

    Raises:
        CheckpointError: for a model that is not there or not free to all, a disk without room for it, or no network.
    """
    from huggingface_hub import HfApi, snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if _is_wanted(file.rfilename)}
        missing = _missing(repository, found.sha, sizes)
        if missing:
            needed = sum(sizes[file] for file in missing)
            _check_room(name, needed)
            say(f"fetching {name}: {len(missing)} files, {_shown(needed)}, into {_cache_directory()}")
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(sizes)))
    except (OSError, ValueError) as error:  # of requests, too
        if (directory := fetched(name)) is not None and not _was_refused(error):
            return directory
        raise CheckpointError(
            f"model.path={HUB}{name} must be a model of the Hugging Face hub that can be fetched from here, got "
            f"{type(error).__name__}: {str(error).strip()}; correct the name, log in with `hf auth login` if access to "
            "it must be asked for, or copy the model here and give its directory"
        ) from error


def fetched(name: str) -> Path | None:
    """Return the directory of a model that is in the hub's cache; None if it is not. Nothing is asked of the hub."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        return None
    return found if (found / "config.json").is_file() else None


def _is_wanted(file: str) -> bool:
    here = [pattern for pattern in WANTED if "/" not in file and fnmatch.fnmatchcase(file, pattern)]
    return bool(here) and not any(fnmatch.fnmatchcase(file, pattern) for pattern in UNWANTED)


def _missing(repository: str, revision: str | None, files: Iterable[str]) -> list[str]:
    from huggingface_hub import try_to_load_from_cache

    return [f for f in files if not isinstance(try_to_load_from_cache(repository, f, revision=revision), str)]


def _check_room(name: str, needed: int) -> None:
    place = next(path for path in (_cache_directory(), *_cache_directory().parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise CheckpointError(
            f"model.path={HUB}{name} needs {_shown(needed)} in {_cache_directory()}, and {_shown(free)} are free; make "
            "room, or set HF_HOME to a directory on a larger disk"
        )


def _cache_directory() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _was_refused(error: Exception) -> bool:
    """Say whether the hub has answered, and did not give the model."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    refused: tuple[Any, ...] = (RepositoryNotFoundError, RevisionNotFoundError)
    return isinstance(error, refused)


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
