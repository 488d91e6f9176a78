"""Writes adapters to files in the layout of Hugging Face's PEFT library, and reads them to start from.

    <directory>/adapter_model.safetensors   the two matrices of every module
    <directory>/adapter_config.json         rank, alpha, modules and base model

The files' names and shapes beside those of the trainer's model, for N heads of width H:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, D]
    layers.0.attn.q_proj.w_lora_a                                    [D, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [N*H, rank]
    layers.0.attn.q_proj.w_lora_b                                    [rank, N, H]

A module that holds several projections has one A and, for P of them, a B of [rank, P, N, H]. It is written as P modules
that have A in common.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tpu_grpo.config import LoraSection
from tpu_grpo.models.families import projections
from tpu_grpo.models.json_files import read_json
from tpu_grpo.models.messages import listed
from tpu_grpo.models.publishing import save_tensors, write_json
from tpu_grpo.records.errors import CheckpointError

if TYPE_CHECKING:
    from flax import nnx

TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
LISTED = 3
"""The number of modules that an error lists before it counts the rest."""


def write_adapters(directory: Path, adapters: Mapping[str, np.ndarray], section: LoraSection, base: str) -> None:
    """Write the trainer's adapters, by dotted name, as adapters of the model ``base``, and replace the directory."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_adapter_files(unfinished, adapters, section, base)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


def write_adapter_files(directory: Path, adapters: Mapping[str, np.ndarray], section: LoraSection, base: str) -> None:
    """Write both files into a directory that is there."""
    tensors = {part: matrix for name, value in adapters.items() for part, matrix in _published(name, value).items()}
    save_tensors(directory / TENSORS_FILE, tensors)
    write_json(directory / CONFIG_FILE, _settings(section, {name.rpartition(".")[0] for name in adapters}, base))


def load_adapters(model: nnx.Module, section: LoraSection) -> None:
    """Set the model's adapters, in place, to those in ``section.path``. Every host reads the files.

    Raises:
        CheckpointError: for files that are missing or broken, or adapters of other sizes, alpha or modules.
    """
    import jax
    from flax import nnx

    assert section.path is not None
    directory = section.path.expanduser()
    state = nnx.state(model, nnx.LoRAParam)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    _check_settings(directory, section, {name.rpartition(".")[0] for name in leaves})
    tensors = _read_tensors(directory)
    for name, leaf in leaves.items():
        old = leaf[...]
        own = _own(name, old.shape, tensors, directory / TENSORS_FILE).astype(old.dtype)
        leaf[...] = jax.make_array_from_callback(old.shape, old.sharding, lambda index, own=own: own[index])
    nnx.update(model, state)


def _check_settings(directory: Path, section: LoraSection, modules: Collection[str]) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"model.lora.path must be a directory with {TENSORS_FILE} and {CONFIG_FILE}, got {directory}, which is "
            "none; a run leaves its own under adapters/<step>"
        )
    found, wanted = read_json(directory / CONFIG_FILE), _settings(section, modules, "")
    for name, setting in (("r", "rank"), ("lora_alpha", "alpha")):
        if found.get(name) != wanted[name]:
            raise CheckpointError(
                f"model.lora.{setting} must be {found.get(name)}, that of the adapters in {directory}, got "
                f"{wanted[name]}; set it so"
            )
    if (theirs := set(found.get("target_modules") or ())) != (ours := set(wanted["target_modules"])):
        raise CheckpointError(
            f"model.lora.targets and model.lora.layers must give the modules of the adapters in {directory}; it has "
            f"{listed(sorted(theirs - ours), LISTED)} besides, and lacks {listed(sorted(ours - theirs), LISTED)}; "
            "choose the same modules"
        )


def _read_tensors(directory: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(directory / TENSORS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory / TENSORS_FILE} is not a whole safetensors file: {error}; copy it again"
        ) from error


def _settings(section: LoraSection, modules: Collection[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": sorted(part for module in modules for part in _published_modules(module)),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _published_modules(module: str) -> list[str]:
    return [f"model.{part.replace('.attn.', '.self_attn.')}" for part in projections(module)]


def _published_names(name: str) -> list[str]:
    module, _, leaf = name.rpartition(".")
    return [f"base_model.model.{part}.lora_{leaf[-1].upper()}.weight" for part in _published_modules(module)]


def _published(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Name the matrices of every projection: A [*inputs, rank] as [rank, inputs], B [rank, *outputs] as its transpose.

    All projections of a module have its A, and B is cut into theirs.
    """
    names = _published_names(name)
    is_a = name.endswith("_a")
    parts = [value] * len(names) if is_a or len(names) == 1 else np.moveaxis(value, 1, 0)
    matrices = [part.reshape(-1, part.shape[-1]) if is_a else part.reshape(part.shape[0], -1) for part in parts]
    return {name: np.ascontiguousarray(matrix.T) for name, matrix in zip(names, matrices, strict=True)}


def _own(name: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray], file: Path) -> np.ndarray:
    """Undo `_published`: put a leaf of this shape together from the file's tensors."""
    found = []
    for part, matrix in _published(name, np.empty(shape, np.float32)).items():
        value = tensors.get(part)
        if value is None or value.shape != matrix.shape:
            has = "none" if value is None else list(value.shape)
            raise CheckpointError(
                f"{file} must hold {part} {list(matrix.shape)}, got {has}; give the adapters of this model"
            )
        found.append(value.T)
    if not name.endswith("_a"):
        return np.stack(found, axis=1).reshape(shape)
    if any((other != found[0]).any() for other in found):
        raise CheckpointError(
            f"{file} must hold the same A for {', '.join(_published_names(name))}, which are one module here, got "
            "different ones; give adapters that this program wrote"
        )
    return found[0].reshape(shape)
