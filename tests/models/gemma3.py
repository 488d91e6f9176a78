"""Small Gemma 3 checkpoints with more layers than its pattern is long, and windows shorter than the tests' rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.random_checkpoint import write_random

PUBLISHED: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000,
    "rope_theta": 1_000_000,
    "layer_types": ...,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": PUBLISHED
    | {
        "layers": 8,
        "hidden": 48,
        "kv_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "rope_scaling": ...,
        "sliding_window": 7,
        "sliding_window_pattern": 6,
    },
    "4b": PUBLISHED
    | {
        "layers": 12,
        "heads": 8,
        "kv_heads": 4,
        "query_pre_attn_scalar": 16,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 10,
    },
    "27b": PUBLISHED
    | {
        "layers": 7,
        "heads": 8,
        "hidden": 80,
        "tied": False,
        "query_pre_attn_scalar": 10,  # hidden / heads
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"],
    },
}
"""Options of `write_random`, after the published sizes of these names; the last one has its layers otherwise."""


def write_shape(directory: Path, shape: str, **changed: Any) -> Path:
    return write_random("gemma3_text", directory, **(dict[str, Any](scale=0.12) | SHAPES[shape] | changed))


def as_seen_with_images(directory: Path, prefix: str = "language_model.model.") -> Path:
    """Rewrite a text model's directory as that of a model which also sees images, with as little as is published."""
    config = json.loads((directory / "config.json").read_text())
    shared = {name: config.pop(name) for name in ("torch_dtype", "eos_token_id", "bos_token_id") if name in config}
    del config["architectures"]
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (directory / "config.json").write_text(json.dumps(whole | shared | {"vision_config": {"hidden_size": 8}}))
    head = "lm_head." if prefix == "model.language_model." else "language_model.lm_head."
    tensors = load_file(directory / "model.safetensors")
    renamed = {n.replace("model.", prefix, 1).replace("lm_head.", head, 1): tensor for n, tensor in tensors.items()}
    images = ("model.vision_tower.w", "model.multi_modal_projector.w")
    if prefix == "language_model.model.":
        images = ("vision_tower.w", "multi_modal_projector.w")
    save_file(renamed | dict.fromkeys(images, np.ones((3, 2), np.float32)), directory / "model.safetensors")
    return directory
