"""Writes a model as a Hugging Face checkpoint directory: safetensors files, config.json and the tokenizer.

    with new_directory(Path("exported")) as directory:     # appears complete or not at all
        write_tensors(directory, checkpoint, read, np.dtype(np.float32), shard_bytes=4 * 2**30)
        write_settings(directory, checkpoint, tokenizer, np.dtype(np.float32), {"eos_token_id": [2], ...})

``read`` returns the values of one leaf (parameter array) of Tunix's model. In addition to this model, memory holds one
leaf and the tensors of files that are not complete yet.
"""

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tpu_grpo.models.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_SETTINGS_FILE,
    Checkpoint,
    read_json,
    tokenizer_settings,
)
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.json_files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_FILE = "generation_config.json"
SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_SETTINGS_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a published tokenizer; the first two always exist, the others may."""

Read = Callable[[str], np.ndarray]
"""Takes the dotted name of a leaf of Tunix's model, and returns its values."""


def check_free(path: Path) -> None:
    """Check that nothing exists at ``path``; raises ConfigError otherwise."""
    if os.path.lexists(path):
        raise ConfigError(f"an export must go to a new directory, got {path}, which is there; name another, or move it")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``, which is renamed to ``path`` at the end of the block.

    On an error the temporary directory is removed. Its files are synced to disk before it is renamed.

    Raises:
        ConfigError: ``path`` exists, at the start or at the end.
    """
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent))
    try:
        yield unfinished
        for file in unfinished.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.umask(umask := os.umask(0))
        unfinished.chmod(0o777 & ~umask)  # mkdtemp makes a directory that only its owner can read
        check_free(path)
        unfinished.rename(path)
    finally:
        if unfinished.exists():
            shutil.rmtree(unfinished)


def write_tensors(
    directory: Path | None, checkpoint: Checkpoint, read: Read, dtype: np.dtype[Any], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write all tensors of a model in one dtype, and an index if there are several files.

    Args:
        directory: where to write; None on a host that writes no files; ``read`` is called there, too, because leaves
            are sharded over hosts.
        checkpoint: gives the model's family and config. Its tensors are not read.
        read: called once for every leaf, in the same order on every host.
        dtype: float32 or bfloat16.
        shard_bytes: the most bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        OSError: a file cannot be written.
    """
    family, config = checkpoint.family, checkpoint.config
    fused = family.fused_tensors(config) if family.is_fused else {}
    whole = {part: name for name, parts in fused.items() for part in parts}
    sizes: dict[str, int] = {}
    for part, shape in checkpoint.shapes.items():
        name = whole.get(part, part)
        sizes[name] = sizes.get(name, 0) + math.prod(shape) * dtype.itemsize
    shards = None if directory is None else _Shards(directory, sizes, shard_bytes)
    waiting: dict[str, np.ndarray] = {}
    for leaf in family.all_leaves(config):
        value = read(leaf.source)
        if shards is None:
            continue
        for part, tensor in leaf.publish(value):
            assert tensor.shape == leaf.shape, f"{part} must be {leaf.shape}, got {tensor.shape}"
            waiting[part] = np.ascontiguousarray(tensor, dtype)
            name = whole.get(part, part)
            parts = fused.get(name, (name,))
            if waiting.keys() >= set(parts):
                tensors = [waiting.pop(each) for each in parts]
                shards.add(name, tensors[0] if len(tensors) == 1 else np.concatenate(tensors))


class _Shards:
    """Collects tensors, and writes each file as soon as all of its tensors were added."""

    def __init__(self, directory: Path, sizes: dict[str, int], shard_bytes: int) -> None:
        from huggingface_hub import split_state_dict_into_shards_factory

        plan = split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=shard_bytes,
        )
        self._directory, self._plan = directory, plan
        self._held: dict[str, dict[str, np.ndarray]] = {file: {} for file in plan.filename_to_tensors}
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
            write_json(directory / INDEX_FILE, index)

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Add a tensor; each name may be added once."""
        file = self._plan.tensor_to_filename[name]
        self._held[file][name] = tensor
        if len(self._held[file]) == len(self._plan.filename_to_tensors[file]):
            save_tensors(self._directory / file, self._held.pop(file))


def write_settings(
    directory: Path,
    checkpoint: Checkpoint,
    tokenizer: "PreTrainedTokenizerFast",
    dtype: np.dtype[Any],
    generation: Mapping[str, Any],
) -> None:
    """Write config.json (with the dtype of the tensors), generation_config.json, and the tokenizer's files.

    The tokenizer's files are copied from the checkpoint's directory. ``generation`` has the stop tokens and sampling
    settings under Hugging Face's names; the ids of the BOS and padding tokens are added here.
    """
    config = dict(checkpoint.hf_config)
    config |= {name: dtype.name for name in ("torch_dtype", "dtype") if name == "torch_dtype" or name in config}
    write_json(directory / CONFIG_FILE, config)
    settings = {"bos_token_id": config.get("bos_token_id"), "pad_token_id": tokenizer.pad_token_id, **generation}
    write_json(directory / GENERATION_FILE, {name: value for name, value in settings.items() if value is not None})
    copy_tokenizer(checkpoint.directory, directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files; settings of transformers 5 are rewritten under the names of transformers 4."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    settings = tokenizer_settings(source)
    if settings and settings != read_json(source / TOKENIZER_SETTINGS_FILE):
        write_json(directory / TOKENIZER_SETTINGS_FILE, settings)


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file with the metadata that transformers expects; raises OSError if writing fails."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # its text is the only place with the system's error
        if (found := re.search(r"\(os error (\d+)\)|code: (\d+)", str(error))) is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, os.strerror(number), str(path)) from error
