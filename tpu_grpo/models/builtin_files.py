"""Writes a taught model as a Hugging Face checkpoint directory, and checks whether such a directory is whole.

``teaching.json`` is written last and lists every other file with its digest. It shows whether writing was cut short, or
a file has changed since.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.models.builtin_teaching import Recipe
from tpu_grpo.models.hf_config import CONFIG_FILE
from tpu_grpo.models.publishing import write_tensors

RECORD = "teaching.json"
_MAX_POSITIONS = 4096


def write_checkpoint(
    directory: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, params: nnx.State, record: Mapping[str, Any]
) -> None:
    """Write weights, config, tokenizer, and ``record`` with the files' digests into an existing empty directory."""
    _write_json(directory / CONFIG_FILE, hugging_face_config(recipe, tokenizer))
    leaves = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
    write_tensors(directory, abstract_checkpoint(directory), leaves.__getitem__, np.dtype(np.float32))
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    files = {path.name: _digest(path) for path in sorted(directory.iterdir())}
    _write_json(directory / RECORD, {**record, "files": files})


def is_whole(directory: Path) -> bool:
    """Whether the directory holds a record and every file it lists, unchanged."""
    try:
        files = json.loads((directory / RECORD).read_text())["files"]
        return all(_digest(directory / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def hugging_face_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the content of the model's ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "intermediate_size": recipe.mlp_width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": recipe.norm_eps,
        "rope_theta": recipe.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": _MAX_POSITIONS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute and write the model."""
    return {name: version(name) for name in ("jax", "google-tunix", "optax", "transformers", "safetensors")}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
