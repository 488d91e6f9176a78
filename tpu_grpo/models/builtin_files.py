"""Writes a taught model as a Hugging Face checkpoint directory, and checks whether such a directory is whole.

``teaching.json`` is written last and lists every other file with its digest. It shows whether writing was cut short, or
a file has changed since.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from tpu_grpo.models.builtin_teaching import Recipe

RECORD = "teaching.json"
_MAX_POSITIONS = 4096

Layout = Callable[[np.ndarray], np.ndarray]


def _same(w: np.ndarray) -> np.ndarray:
    return w


def _from_first(w: np.ndarray) -> np.ndarray:
    """Reshape [in, *out] to [out, in]."""
    return w.reshape(w.shape[0], -1).T


def _from_last(w: np.ndarray) -> np.ndarray:
    """Reshape [*in, out] to [out, in]."""
    return w.reshape(-1, w.shape[-1]).T


# (Tunix's path, Hugging Face's name, the change of layout); {i} is the number of the layer
_LEAVES: tuple[tuple[str, str, Layout], ...] = (
    ("embedder.input_embedding", "model.embed_tokens.weight", _same),
    ("layers.{i}.input_layernorm.w", "model.layers.{i}.input_layernorm.weight", _same),
    ("layers.{i}.attn.q_proj.w", "model.layers.{i}.self_attn.q_proj.weight", _from_first),
    ("layers.{i}.attn.k_proj.w", "model.layers.{i}.self_attn.k_proj.weight", _from_first),
    ("layers.{i}.attn.v_proj.w", "model.layers.{i}.self_attn.v_proj.weight", _from_first),
    ("layers.{i}.attn.q_norm.w", "model.layers.{i}.self_attn.q_norm.weight", _same),
    ("layers.{i}.attn.k_norm.w", "model.layers.{i}.self_attn.k_norm.weight", _same),
    ("layers.{i}.attn.o_proj.w", "model.layers.{i}.self_attn.o_proj.weight", _from_last),
    ("layers.{i}.post_attention_layernorm.w", "model.layers.{i}.post_attention_layernorm.weight", _same),
    ("layers.{i}.mlp.gate_proj.kernel", "model.layers.{i}.mlp.gate_proj.weight", _from_first),
    ("layers.{i}.mlp.up_proj.kernel", "model.layers.{i}.mlp.up_proj.weight", _from_first),
    ("layers.{i}.mlp.down_proj.kernel", "model.layers.{i}.mlp.down_proj.weight", _from_first),
    ("final_norm.w", "model.norm.weight", _same),
)


def write_checkpoint(
    directory: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, params: nnx.State, record: Mapping[str, Any]
) -> None:
    """Write weights, config, tokenizer, and ``record`` with the files' digests into an existing empty directory."""
    tensors = hugging_face_tensors(params, recipe.layers)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", hugging_face_config(recipe, tokenizer))
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


def hugging_face_tensors(params: nnx.State, layers: int) -> dict[str, np.ndarray]:
    """Return the parameters under Hugging Face's names and in its layouts: contiguous matrices [out, in]."""
    by_path = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
    tensors = {}
    for path, name, layout in _LEAVES:
        for i in range(layers) if "{i}" in path else [0]:
            tensors[name.format(i=i)] = np.ascontiguousarray(layout(by_path.pop(path.format(i=i))))
    assert not by_path, f"parameters without a Hugging Face name: {sorted(by_path)}"
    return tensors


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
