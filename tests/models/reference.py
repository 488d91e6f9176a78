"""The families' forward passes in float64 NumPy, written from their published definitions, to check models against.

What a checkpoint lacks is left out: biases (Qwen2 has them), norms of queries and keys (Qwen3), experts (Qwen3-MoE),
scaled positions (Llama 3.1).

Arrays: B rows, T tokens, D hidden size, N query heads, K key and value heads, H head size, V vocabulary, E experts.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Weights = dict[str, np.ndarray]


def reference_logprobs(directory: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """Log-probabilities [B, T, V] of the next token, computed from the checkpoint's files alone."""
    config = json.loads((directory / "config.json").read_text())
    weights = {n: w.astype(np.float64) for f in directory.glob("*.safetensors") for n, w in load_file(f).items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens_BT]
    for i in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{i}."): v for n, v in weights.items() if n.startswith(f"model.layers.{i}.")}
        x = x + _attention(_rms_norm(x, w["input_layernorm.weight"], eps), w, config)
        mlp_input = _rms_norm(x, w["post_attention_layernorm.weight"], eps)
        x = x + (_experts(mlp_input, w, config) if "mlp.gate.weight" in w else _mlp(mlp_input, w, "mlp"))
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return _log_softmax(_rms_norm(x, weights["model.norm.weight"], eps) @ head.T)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    peak = x.max(-1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(-1, keepdims=True))


def _attention(x_BTD: np.ndarray, w: Weights, config: dict) -> np.ndarray:
    rows, length, _ = x_BTD.shape
    query_count, key_count = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // query_count)
    turns = _frequencies(size, config["rope_theta"], config.get("rope_scaling"))

    def heads(part: str, count: int) -> np.ndarray:
        projected = x_BTD @ w[f"self_attn.{part}_proj.weight"].T + w.get(f"self_attn.{part}_proj.bias", 0.0)
        split = projected.reshape(rows, length, count, size)
        norm = w.get(f"self_attn.{part}_norm.weight")
        return split if norm is None else _rms_norm(split, norm, config["rms_norm_eps"])

    q_BTNH, k_BTKH = _rotate(heads("q", query_count), turns), _rotate(heads("k", key_count), turns)
    v_BTKH = heads("v", key_count)
    causal = np.tril(np.ones((length, length), bool))
    mixed_BTNH = np.empty_like(q_BTNH)
    for n in range(query_count):
        k = n * key_count // query_count  # consecutive query heads share a key head
        scores = np.einsum("bth,bsh->bts", q_BTNH[:, :, n], k_BTKH[:, :, k]) / np.sqrt(size)
        probs = np.exp(_log_softmax(np.where(causal, scores, -np.inf)))
        mixed_BTNH[:, :, n] = np.einsum("bts,bsh->bth", probs, v_BTKH[:, :, k])
    return mixed_BTNH.reshape(rows, length, -1) @ w["self_attn.o_proj.weight"].T


def _frequencies(size: int, theta: float, scaling: dict | None) -> list[float]:
    """Radians per position of each pair of dimensions; Llama 3.1 slows down those of long wavelengths."""
    frequencies = [theta ** (-2 * i / size) for i in range(size // 2)]
    if scaling is None:
        return frequencies
    assert scaling["rope_type"] == "llama3"
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]

    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            return frequency / factor
        if wavelength < original / high:
            return frequency
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return [scaled(frequency) for frequency in frequencies]


def _rotate(x_BTNH: np.ndarray, frequencies: list[float]) -> np.ndarray:
    """Rotate dimension i with dimension i + H/2 by ``position * frequencies[i]``."""
    length, size = x_BTNH.shape[1], x_BTNH.shape[-1]
    angles_TH = np.arange(length)[:, None] * np.array(frequencies)
    turn = np.exp(1j * angles_TH)[None, :, None, :]
    turned = (x_BTNH[..., : size // 2] + 1j * x_BTNH[..., size // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def _mlp(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    gate = x @ w[f"{name}.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T


def _experts(x_BTD: np.ndarray, w: Weights, config: dict) -> np.ndarray:
    """Every token by itself: its best experts, weighted by their share of the router's softmax."""
    probs_BTE = np.exp(_log_softmax(x_BTD @ w["mlp.gate.weight"].T))
    out_BTD = np.zeros_like(x_BTD)
    for b, t in np.ndindex(x_BTD.shape[:2]):
        chosen = np.argsort(-probs_BTE[b, t])[: config["num_experts_per_tok"]]
        total = probs_BTE[b, t, chosen].sum() if config["norm_topk_prob"] else 1.0
        for e in chosen:
            out_BTD[b, t] += probs_BTE[b, t, e] / total * _mlp(x_BTD[b, t], w, f"mlp.experts.{e}")
    return out_BTD
