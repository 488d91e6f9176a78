"""Small random checkpoints in Hugging Face's format, for every test that needs a model but not its knowledge.

write_random_qwen3(tmp_path / "model", layers=2, tied=False, rope_theta=5e5)
write_random("llama", tmp_path / "model", rope_scaling={"rope_type": "llama3", ...})
"""

import ast
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

Shapes = dict[str, tuple[int, ...]]

PUBLISHED: dict[str, dict[str, Any]] = ast.literal_eval(Path(__file__).with_name("published.txt").read_text())
"""What a config.json of each family says besides the sizes; an ellipsis leaves a setting out.

Gemma 2 and 3 have other numbers here than published, so that windows, soft caps, the scale, the epsilon, and the bases
and scaling of positions each change what tests compare. Gemma 3's ``layer_types`` are repeated for all its layers.
"""

GEMMA = ("gemma2", "gemma3_text", "gemma4_text")
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""As in Llama 3.1, but for an original context so short that positions below 100 are beyond it."""
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
"""As published for Qwen3, with a short original context, too."""


def write_random_qwen3(directory: Path, **options: Any) -> Path:
    """``write_random`` of the family that most tests take."""
    return write_random("qwen3", directory, **options)


def write_random(
    model_type: str,
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab: int = 300,
    tied: bool = True,
    seed: int = 0,
    scale: float = 0.08,
    dtype: DTypeLike = np.float32,
    shards: int = 1,
    **settings: Any,
) -> Path:
    """Write config.json and safetensors of a random model; the same arguments write the same numbers.

    Matrices are normal with standard deviation ``scale``, biases too. Norms multiply by numbers that are uniform in
    [0.7, 1.3]: their weights, or 1 + their weights in Gemma. Gemma 2's head is always tied. With
    ``shards`` > 1 the tensors are dealt over that many files with an index. ``settings`` are added to config.json.
    Returns ``directory``, created if need be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "torch_dtype": np.dtype(dtype).name,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | PUBLISHED[model_type]
    config = {name: value for name, value in (config | settings).items() if value is not ...}
    if model_type in GEMMA[1:] and "layer_types" not in settings:
        config["layer_types"] = (config["layer_types"] * layers)[:layers]
        if model_type == "gemma4_text":
            config["layer_types"][-1] = "full_attention"  # of Gemma 4, whatever the checkpoint says
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    offset = 1.0 if model_type in GEMMA[:2] else 0.0
    write_tensors(directory, _random_tensors(published_shapes(config), seed, scale, dtype, offset), shards)
    return directory


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """Write ``tensors`` to model.safetensors, or dealt over ``shards`` files with model.safetensors.index.json."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_sparse(directory: Path, config: dict[str, Any]) -> Path:
    """A bfloat16 checkpoint of any size whose data is a hole in the file: right length, no bytes on disk."""
    header, end = {}, 0
    for name, shape in published_shapes(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return directory


def edit_config(directory: Path, **settings: Any) -> None:
    """Set settings of config.json; an ellipsis removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, **tensors: np.ndarray | None) -> None:
    """Set tensors of model.safetensors by name; None removes one."""
    path = directory / "model.safetensors"
    edited = {**load_file(path), **tensors}
    save_file({name: value for name, value in edited.items() if value is not None}, path)


def published_shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every tensor that a model of this config.json publishes."""
    norm = (config["hidden_size"],)
    layer = {"input_layernorm.weight": norm} | _attention_shapes(config)
    layer |= {"post_attention_layernorm.weight": norm} | _mlp_shapes(config)
    if config["model_type"] in GEMMA:
        layer |= {"pre_feedforward_layernorm.weight": norm, "post_feedforward_layernorm.weight": norm}
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}
    for i in range(config["num_hidden_layers"]):
        if config["model_type"] == "gemma4_text":
            layer = _gemma4_shapes(config, config["layer_types"][i] == "full_attention")
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config["hidden_size"],)
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    return shapes


def _attention_shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads, kv_heads = (config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim", hidden // heads)
    outputs = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    if config["model_type"] == "phi3":
        outputs = {"qkv_proj": sum(outputs.values())}
    shapes: Shapes = {f"self_attn.{name}.weight": (size, hidden) for name, size in outputs.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, heads * head_dim)
    if config["model_type"] == "qwen2":
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _gemma4_shapes(config: dict[str, Any], is_global: bool) -> Shapes:
    """The shapes of one layer, which depend on its kind."""
    hidden, heads, equal = (config[n] for n in ("hidden_size", "num_attention_heads", "attention_k_eq_v"))
    width = config["global_head_dim" if is_global else "head_dim"]
    kv_heads = config["num_key_value_heads"]
    if is_global and equal:
        kv_heads = config["num_global_key_value_heads"] or kv_heads
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    names = ("k", "v") if not (is_global and equal) else ("k",)
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (kv_heads * width, hidden) for name in names}
    shapes |= {"self_attn.q_proj.weight": (heads * width, hidden), "self_attn.o_proj.weight": (hidden, heads * width)}
    shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,), "layer_scalar": (1,)}
    shapes |= _gated("mlp", config["intermediate_size"], hidden)
    if config["enable_moe_block"]:
        experts, inner = config["num_experts"], config["moe_intermediate_size"]
        norms += [f"{name}_feedforward_layernorm_{i}" for name, i in (("post", 1), ("pre", 2), ("post", 2))]
        shapes |= {"experts.gate_up_proj": (experts, 2 * inner, hidden), "experts.down_proj": (experts, hidden, inner)}
        shapes |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,)}
        shapes |= {"router.per_expert_scale": (experts,)}
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def _mlp_shapes(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    if config["model_type"] == "phi3":
        width = config["intermediate_size"]
        return {"mlp.gate_up_proj.weight": (2 * width, hidden), "mlp.down_proj.weight": (hidden, width)}
    if config["model_type"] != "qwen3_moe":
        return _gated("mlp", config["intermediate_size"], hidden)
    shapes: Shapes = {"mlp.gate.weight": (config["num_experts"], hidden)}
    for i in range(config["num_experts"]):
        shapes |= _gated(f"mlp.experts.{i}", config["moe_intermediate_size"], hidden)
    return shapes


def _gated(name: str, width: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, width)}


def _random_tensors(
    shapes: Shapes, seed: int, scale: float, dtype: DTypeLike, norm_offset: float
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        factors = (".weight", "scale", "scalar")
        is_norm = len(shape) == 1 and name.endswith(factors)
        return rng.uniform(0.7, 1.3, shape) - norm_offset if is_norm else scale * rng.standard_normal(shape)

    return {name: tensor(name, shape).astype(dtype) for name, shape in shapes.items()}
