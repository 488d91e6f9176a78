"""Computes reference forward passes of the model families in float64 NumPy, from their published definitions.

The module shares no code with the models of the trainer and the sampler. `tpu-grpo check` and the tests compare these
models with it. Parts that a checkpoint lacks are left out: biases (Qwen2), norms of queries and keys (Qwen3, Gemma 3),
experts (Qwen3-MoE), scaled positions (Llama 3.1, YaRN, Gemma 3). Phi-3's fused projections are split.

Arrays: B rows, T tokens, D hidden size, N query heads, K key and value heads, H head size, V vocabulary, E experts.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tpu_grpo.records.json_files import read_json

Weights = dict[str, np.ndarray]


def read_weights(directory: Path) -> Weights:
    """Read all tensors of a checkpoint directory as float64, by name."""
    return {n: w.astype(np.float64) for f in directory.glob("*.safetensors") for n, w in load_file(f).items()}


def reference_logprobs(directory: Path, tokens_BT: np.ndarray, *, changed: Weights | None = None) -> np.ndarray:
    """Compute the log-probabilities [B, T, V] of the next token from the checkpoint's files alone.

    Weights in ``changed`` replace those of the files. If ``changed`` contains the final norm, it must contain all
    weights, because no weights are then read from files.
    """
    config = read_json(directory / "config.json")
    weights = dict(changed or {})
    if "model.norm.weight" not in weights:
        weights = read_weights(directory) | weights
    if config["model_type"] in ("gemma2", "gemma3_text", "gemma4_text"):
        return _gemma(config, weights, tokens_BT)
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens_BT]
    for i in range(config["num_hidden_layers"]):
        w = _layer(weights, i)
        if config["model_type"] == "phi3":
            w |= _split(w, config)
        x = x + _attention(_rms_norm(x, w["input_layernorm.weight"], eps), w, config)
        mlp_input = _rms_norm(x, w["post_attention_layernorm.weight"], eps)
        x = x + (_experts(mlp_input, w, config) if "mlp.gate.weight" in w else _mlp(mlp_input, w, "mlp"))
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return _log_softmax(_rms_norm(x, weights["model.norm.weight"], eps) @ head.T)


def _layer(weights: Weights, layer: int) -> Weights:
    """Return the weights of a layer, by their names within it."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _split(w: Weights, config: dict) -> Weights:
    """Split Phi-3's fused weights: qkv_proj has the rows of q, then k, then v; gate_up_proj has gate, then up."""
    rows = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    qkv, gate_up = w["self_attn.qkv_proj.weight"], w["mlp.gate_up_proj.weight"]
    q, k, v = qkv[: -2 * rows], qkv[-2 * rows : -rows], qkv[-rows:]
    parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v}
    parts |= {"mlp.gate": gate_up[: len(gate_up) // 2], "mlp.up": gate_up[len(gate_up) // 2 :]}
    return {f"{name}_proj.weight": part for name, part in parts.items()}


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    peak = x.max(-1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(-1, keepdims=True))


def _attention(
    x_BTD: np.ndarray,
    w: Weights,
    config: dict,
    *,
    scalar: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """Compute causal attention.

    Scores are divided by the square root of ``scalar``, or of the head size if ``scalar`` is None. Gemma 2 also
    soft-caps scores, and in some layers a token attends to the last ``window`` tokens only, itself included.
    """
    rows, length, _ = x_BTD.shape
    query_count, key_count = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // query_count)
    scaling, theta = config.get("rope_scaling"), config.get("rope_theta", 1e4)
    if window is not None and config["model_type"] == "gemma3_text":
        scaling, theta = None, config.get("rope_local_base_freq", 1e4)
    if config["model_type"] == "gemma4_text":
        scaling = config["rope_parameters"]["sliding_attention" if window else "full_attention"]
        theta = scaling["rope_theta"]
    turns = _frequencies(size, theta, scaling)
    larger = 0.1 * math.log(scaling["factor"]) + 1 if scaling and scaling["rope_type"] == "yarn" else 1.0

    def heads(part: str, count: int) -> np.ndarray:
        projected = x_BTD @ w[f"self_attn.{part}_proj.weight"].T + w.get(f"self_attn.{part}_proj.bias", 0.0)
        split = projected.reshape(rows, length, count, size)
        norm = w.get(f"self_attn.{part}_norm.weight")
        if norm is None:
            return split
        return _rms_norm(split, norm + (config["model_type"] == "gemma3_text"), config["rms_norm_eps"])

    q_BTNH, k_BTKH = _rotate(heads("q", query_count), turns), _rotate(heads("k", key_count), turns)
    v_BTKH = heads("v", key_count)
    if config["model_type"] == "gemma4_text":
        v_BTKH = _rms_norm(v_BTKH, np.ones(size), config["rms_norm_eps"])
    seen = np.tril(np.ones((length, length), bool))
    if window is not None:
        seen &= ~np.tril(seen, -window)
    mixed_BTNH = np.empty_like(q_BTNH)
    for n in range(query_count):
        k = n * key_count // query_count  # consecutive query heads share a key head
        scores = larger**2 * np.einsum("bth,bsh->bts", q_BTNH[:, :, n], k_BTKH[:, :, k]) / np.sqrt(scalar or size)
        probs = np.exp(_log_softmax(np.where(seen, _soft_cap(scores, cap), -np.inf)))
        mixed_BTNH[:, :, n] = np.einsum("bts,bsh->bth", probs, v_BTKH[:, :, k])
    return mixed_BTNH.reshape(rows, length, -1) @ w["self_attn.o_proj.weight"].T


def _frequencies(size: int, theta: float, scaling: dict | None) -> list[float]:
    """Return the rotary frequency (radians per position) of each pair of dimensions; scaling lowers low frequencies."""
    frequencies = [theta ** (-2 * i / size) for i in range(size // 2)]
    if scaling is None or scaling["rope_type"] == "default":
        return frequencies
    if scaling["rope_type"] == "proportional":
        turning = int(scaling["partial_rotary_factor"] * size // 2)
        return [*frequencies[:turning], *[0.0] * (size // 2 - turning)]
    if scaling["rope_type"] == "linear":
        return [frequency / scaling["factor"] for frequency in frequencies]
    if scaling["rope_type"] == "yarn":
        return _yarn(frequencies, theta, scaling)
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


def _yarn(frequencies: list[float], theta: float, scaling: dict) -> list[float]:
    """Scale frequencies by YaRN (Peng et al. 2023, arXiv 2309.00071).

    A frequency of over 32 turns in the original context is kept; a frequency of under 1 turn is divided by the factor.
    In between, the two values are mixed, linearly in the index. The bounds are rounded outwards, as in the published
    code.
    """
    count, original = len(frequencies), scaling["original_max_position_embeddings"]
    first, last = (count * math.log(original / (2 * math.pi * turns), theta) for turns in (32, 1))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * count - 1)
    mixed = []
    for i, frequency in enumerate(frequencies):
        divided = min(max((i - first) / (last - first), 0), 1)
        mixed.append(divided * frequency / scaling["factor"] + (1 - divided) * frequency)
    return mixed


def _rotate(x_BTNH: np.ndarray, frequencies: list[float]) -> np.ndarray:
    """Rotate each pair of dimensions (i, i + H/2) by the angle ``position * frequencies[i]``."""
    length, size = x_BTNH.shape[1], x_BTNH.shape[-1]
    angles_TH = np.arange(length)[:, None] * np.array(frequencies)
    turn = np.exp(1j * angles_TH)[None, :, None, :]
    turned = (x_BTNH[..., : size // 2] + 1j * x_BTNH[..., size // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _mlp(x: np.ndarray, w: Weights, name: str, activation: Callable[[np.ndarray], np.ndarray] = _silu) -> np.ndarray:
    gate, up = (x @ w[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (activation(gate) * up) @ w[f"{name}.down_proj.weight"].T


def _routed(x_BTD: np.ndarray, w: Weights, config: dict) -> np.ndarray:
    """Return the indices [B, T, k] of the k experts that the router chooses per token, likeliest first."""
    return np.argsort(-(x_BTD @ w["mlp.gate.weight"].T), axis=-1)[..., : config["num_experts_per_tok"]]


def _experts(
    x_BTD: np.ndarray,
    w: Weights,
    config: dict,
    *,
    routed_by: np.ndarray | None = None,
    activation: Callable[[np.ndarray], np.ndarray] = _silu,
) -> np.ndarray:
    """Sum the outputs of each token's chosen experts, weighted by the router's softmax; the router sees ``routed_by``,
    or ``x`` if that is None."""
    seen_BTD = x_BTD if routed_by is None else routed_by
    probs_BTE = np.exp(_log_softmax(seen_BTD @ w["mlp.gate.weight"].T))
    out_BTD, chosen_BTk = np.zeros_like(x_BTD), _routed(seen_BTD, w, config)
    for b, t in np.ndindex(x_BTD.shape[:2]):
        chosen = chosen_BTk[b, t]
        total = probs_BTE[b, t, chosen].sum() if config["norm_topk_prob"] else 1.0
        for e in chosen:
            out_BTD[b, t] += probs_BTE[b, t, e] / total * _mlp(x_BTD[b, t], w, f"mlp.experts.{e}", activation)
    return out_BTD


# --- Gemma 2, 3 and 4 ------------------------------------------------------------------------------------------------
# Gemma Team 2024, arXiv 2408.00118, section 2; 2025, arXiv 2503.19786, section 2; and the published implementations


def _gemma(config: dict, weights: Weights, tokens_BT: np.ndarray) -> np.ndarray:
    """Compute Gemma: norms before and after both attention and MLP; in Gemma 2 soft caps, in Gemma 3 norms of queries
    and keys, and other positions in layers with a window. For Gemma 4 see families/gemma4.py."""
    embedding_VD, is_gemma4 = weights["model.embed_tokens.weight"], config["model_type"] == "gemma4_text"
    x = embedding_VD[tokens_BT] * math.sqrt(config["hidden_size"])

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return _rms_norm(x, (not is_gemma4) + weights[f"model.{name}.weight"], config["rms_norm_eps"])

    scores = {"scalar": config.get("query_pre_attn_scalar", 1), "cap": config.get("attn_logit_softcapping")}
    types = config.get("layer_types") or ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    if config["model_type"] != "gemma2" and not config.get("layer_types"):
        period = ["sliding_attention"] * (config.get("sliding_window_pattern", 6) - 1) + ["full_attention"]
        types = period * config["num_hidden_layers"]
    for i in range(config["num_hidden_layers"]):
        layer, w = f"layers.{i}", _layer(weights, i)
        window = config["sliding_window"] if types[i] == "sliding_attention" else None
        of_layer = _of_global(w, config) if is_gemma4 and not window else config
        attended = _attention(norm(x, f"{layer}.input_layernorm"), w, of_layer, window=window, **scores)
        x = x + norm(attended, f"{layer}.post_attention_layernorm")
        mixed = _mlp(norm(x, f"{layer}.pre_feedforward_layernorm"), w, "mlp", _gelu)
        if "router.scale" in w:
            routed = _gemma4_experts(x, norm(x, f"{layer}.pre_feedforward_layernorm_2"), w, config)
            mixed = norm(mixed, f"{layer}.post_feedforward_layernorm_1")
            mixed = mixed + norm(routed, f"{layer}.post_feedforward_layernorm_2")
        x = x + norm(mixed, f"{layer}.post_feedforward_layernorm")
        x = x * w.get("layer_scalar", 1.0)
    head_VD = embedding_VD if config.get("tie_word_embeddings", True) else weights["lm_head.weight"]
    return _log_softmax(_soft_cap(norm(x, "norm") @ head_VD.T, config.get("final_logit_softcapping")))


def _of_global(w: Weights, config: dict) -> dict:
    """Return the settings of Gemma 4's layers without a window; their keys may also be their values."""
    count = config.get("num_global_key_value_heads")
    if config["attention_k_eq_v"]:
        w["self_attn.v_proj.weight"] = w["self_attn.k_proj.weight"]
        config = config | {"num_key_value_heads": count or config["num_key_value_heads"]}
    return config | {"head_dim": config.get("global_head_dim", 512)}


def _gemma4_experts(x_BTD: np.ndarray, inputs_BTD: np.ndarray, w: Weights, config: dict) -> np.ndarray:
    """Sum the outputs of each token's chosen experts for ``inputs``; ``x`` is what the router sees."""
    seen_BTD = _rms_norm(x_BTD, w["router.scale"], config["rms_norm_eps"]) / math.sqrt(config["hidden_size"])
    config = config | {"num_experts_per_tok": config["top_k_experts"], "norm_topk_prob": True}
    experts: Weights = {"mlp.gate.weight": w["router.proj.weight"]}
    for e, (gate_up, down) in enumerate(zip(w["experts.gate_up_proj"], w["experts.down_proj"], strict=True)):
        parts = *np.split(gate_up, 2), w["router.per_expert_scale"][e] * down
        experts |= {
            f"mlp.experts.{e}.{n}_proj.weight": part for n, part in zip(("gate", "up", "down"), parts, strict=True)
        }
    return _experts(inputs_BTD, experts, config, routed_by=seen_BTD, activation=_gelu)


def _soft_cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _gelu(x: np.ndarray) -> np.ndarray:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
