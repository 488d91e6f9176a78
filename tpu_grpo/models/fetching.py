"""Downloads the files of a Hugging Face hub model that a run needs into the hub's cache, and pushes models to the hub.

    directory = fetch("Qwen/Qwen3-0.6B")       # or Qwen/Qwen3-0.6B@REVISION
    address = push(Path("my_model"), "me/my-model")

The size is printed before the download. Files in the cache are not downloaded again, and without a network only the
cache is used.
"""

import shutil
import sys
from functools import cache
from pathlib import Path

from tpu_grpo.config import HUB, ModelSection
from tpu_grpo.records.errors import CheckpointError, ConfigError

WANTED = [
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
]
"""Patterns of the files to fetch."""
HUB_SECONDS = 20.0  # a hub that does not answer within this time counts as out of reach
UNWANTED = ["*/*", "consolidated*"]
"""Patterns of files to skip: files in folders, and second copies of the weights under the publisher's own names."""


def model_directory(model: ModelSection) -> Path:
    """Return the directory of a model that is not built in; a model of the hub is downloaded unless it is cached."""
    return Path(model.path).expanduser() if model.hub is None else fetch(model.hub)


@cache
def fetch(name: str) -> Path:
    """Return the local directory of owner/model or owner/model@revision, after downloading what the cache lacks.

    The number and size of the files are printed to stderr before a download. A process asks the hub only once.

    Raises:
        CheckpointError: the model does not exist or the user has no access to it, the disk lacks room, or the cache
            lacks the model and there is no network.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    def is_missing(file: str) -> bool:
        return not isinstance(try_to_load_from_cache(repository, file, revision=found.sha), str)

    repository, _, revision = name.partition("@")
    try:
        found = HfApi().model_info(repository, revision=revision or None, files_metadata=True, timeout=HUB_SECONDS)
        published = {file.rfilename: file.size or 0 for file in found.siblings or ()}
        wanted = list(filter_repo_objects(published, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        if missing := list(filter(is_missing, wanted)):
            needed = sum(published[file] for file in missing)
            _check_room(name, needed)
            what = f"fetching {name}: {len(missing)} files, {_shown(needed)}, into {_cache_directory()}"
            print(what, file=sys.stderr, flush=True)
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except CheckpointError:
        raise
    except Exception as error:  # network errors, and whatever the library raises for an answer of another shape
        refused = isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError))
        if not refused and (directory := fetched(name)) is not None:
            return directory
        raise CheckpointError(
            f"model.path={HUB}{name} must be a model of the Hugging Face hub that can be fetched from here, got "
            f"{type(error).__name__}: {str(error).strip()}; correct the name, log in with `hf auth login` if access to "
            "it must be asked for, or copy the model here and give its directory"
        ) from error


def fetched(name: str) -> Path | None:
    """Return the directory of a model in the hub's cache, without a request to the hub; None if the cache lacks it."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        return None
    return found if (found / "config.json").is_file() else None


def push(directory: Path, name: str) -> str:
    """Upload a model to a repository of the hub; a repository that does not exist is created as private.

    Returns:
        The repository's address.

    Raises:
        ConfigError: the hub cannot be reached, or refuses the upload.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message="Export of tpu_grpo")
    except (OSError, ValueError) as error:  # includes network errors
        raise ConfigError(
            f"--push must be OWNER/NAME of the Hugging Face hub, where you may write, got {name} "
            f"({type(error).__name__}: {str(error).strip()}); log in with `hf auth login`, or set HF_TOKEN to a token "
            f"that may write: the model is in {directory}, and `hf upload {name} {directory}` sends it"
        ) from error
    return f"{hub.endpoint}/{name}"


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


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
