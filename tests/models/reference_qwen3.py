"""Qwen3's forward pass in float64 NumPy, written from its published definition, to check the loaded model against.

Arrays: B rows, T tokens, D hidden size, N query heads, K key and value heads, H head size, V vocabulary.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def reference_logprobs(directory: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """Log-probabilities [B, T, V] of the next token, computed from the checkpoint's files alone."""
    config = json.loads((directory / "config.json").read_text())
    weights = {n: w.astype(np.float64) for f in directory.glob("*.safetensors") for n, w in load_file(f).items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens_BT]
    for i in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{i}."): v for n, v in weights.items() if n.startswith(f"model.layers.{i}.")}
        x = x + _attention(_rms_norm(x, w["input_layernorm.weight"], eps), w, config)
        x = x + _mlp(_rms_norm(x, w["post_attention_layernorm.weight"], eps), w)
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    logits = _rms_norm(x, weights["model.norm.weight"], eps) @ head.T
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _attention(x_BTD: np.ndarray, w: dict[str, np.ndarray], config: dict) -> np.ndarray:
    rows, length, _ = x_BTD.shape
    eps, theta, size = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]

    def heads(name: str, count: int) -> np.ndarray:
        return (x_BTD @ w[f"self_attn.{name}.weight"].T).reshape(rows, length, count, size)

    query_count, key_count = config["num_attention_heads"], config["num_key_value_heads"]
    q_BTNH = _rotate(_rms_norm(heads("q_proj", query_count), w["self_attn.q_norm.weight"], eps), theta)
    k_BTKH = _rotate(_rms_norm(heads("k_proj", key_count), w["self_attn.k_norm.weight"], eps), theta)
    v_BTKH = heads("v_proj", key_count)
    causal = np.tril(np.ones((length, length), bool))
    mixed_BTNH = np.empty_like(q_BTNH)
    for n in range(query_count):
        k = n * key_count // query_count  # consecutive query heads share a key head
        scores = np.einsum("bth,bsh->bts", q_BTNH[:, :, n], k_BTKH[:, :, k]) / np.sqrt(size)
        scores = np.where(causal, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        mixed_BTNH[:, :, n] = np.einsum("bts,bsh->bth", probs, v_BTKH[:, :, k])
    return mixed_BTNH.reshape(rows, length, -1) @ w["self_attn.o_proj.weight"].T


def _rotate(x_BTNH: np.ndarray, theta: float) -> np.ndarray:
    """Rotate dimension i with dimension i + H/2 by ``position * theta^(-2i/H)``."""
    length, size = x_BTNH.shape[1], x_BTNH.shape[-1]
    angles_TH = np.arange(length)[:, None] * theta ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angles_TH)[None, :, None, :]
    turned = (x_BTNH[..., : size // 2] + 1j * x_BTNH[..., size // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def _mlp(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    gate = x @ w["mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
