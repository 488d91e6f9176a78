"""Writes adapters to files in the layout of Hugging Face's PEFT library, and reads them to start from.

    <directory>/adapter_model.safetensors   the two matrices of every module
    <directory>/adapter_config.json         rank, alpha, modules and base model

The files' names and shapes beside those of the trainer's model, for N heads of width H:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, D]
    layers.0.attn.q_proj.w_lora_a                                    [D, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [N*H, rank]
    layers.0.attn.q_proj.w_lora_b                                    [rank, N, H]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tpu_grpo.config import LoraSection
from tpu_grpo.errors import CheckpointError
from tpu_grpo.models.json_files import read_json
from tpu_grpo.models.messages import listed

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
    tensors = {_published_name(name): _published(name, value) for name, value in adapters.items()}
    save_file(tensors, unfinished / TENSORS_FILE, metadata={"format": "pt"})
    settings = _settings(section, {name.rpartition(".")[0] for name in adapters}, base)
    (unfinished / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


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
        value, old = tensors.get(_published_name(name)), leaf[...]
        wanted = _published(name, np.empty(old.shape, np.float32)).shape
        if value is None or value.shape != wanted:
            found = "none" if value is None else list(value.shape)
            raise CheckpointError(
                f"{directory / TENSORS_FILE} must hold {_published_name(name)} {list(wanted)}, got {found}; give the "
                "adapters of this model"
            )
        own = value.T.reshape(old.shape).astype(old.dtype)
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
        "target_modules": sorted(_published_module(module) for module in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _published_module(module: str) -> str:
    return f"model.{module.replace('.attn.', '.self_attn.')}"


def _published_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"base_model.model.{_published_module(module)}.lora_{leaf[-1].upper()}.weight"


def _published(name: str, value: np.ndarray) -> np.ndarray:
    """Reshape A from [*inputs, rank] to [rank, inputs], or B from [rank, *outputs] to [outputs, rank]."""
    matrix = value.reshape(-1, value.shape[-1]) if name.endswith("_a") else value.reshape(value.shape[0], -1)
    return np.ascontiguousarray(matrix.T)
