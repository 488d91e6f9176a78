"""Small random Qwen3 checkpoints in Hugging Face's format, for every test that needs a model but not its knowledge.

write_random_qwen3(tmp_path / "model", layers=2, tied=False, rope_theta=5e5)
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file


def write_random_qwen3(
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
    rope_theta: float = 1e6,
    seed: int = 0,
    scale: float = 0.08,
    dtype: DTypeLike = np.float32,
    shards: int = 1,
) -> Path:
    """Write config.json and safetensors of a random Qwen3; the same arguments write the same numbers.

    Matrices are normal with standard deviation ``scale``, norm weights uniform in [0.7, 1.3]. With ``shards`` > 1 the
    tensors are dealt over that many files with an index. Returns ``directory``, created if need be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
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
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
        "torch_dtype": np.dtype(dtype).name,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(directory, _random_tensors(qwen3_shapes(config), seed, scale, dtype), shards)
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


def qwen3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Qwen3 of this config.json publishes."""
    hidden, head_dim, ffw = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffw, hidden),
        "mlp.up_proj": (ffw, hidden),
        "mlp.down_proj": (hidden, ffw),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, scale: float, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.uniform(0.7, 1.3, shape) if len(shape) == 1 else scale * rng.standard_normal(shape)).astype(dtype)
        for name, shape in shapes.items()
    }
