"""Writes tests/models/transformers5: small random checkpoints as transformers 5 saves them, and what it computes.

python3.11 -m venv venv5
venv5/bin/pip install transformers==5.24.0 torch==2.13.0
venv5/bin/python tests/models/make_transformers5.py

Of a family that this package supports, a directory is all of a checkpoint and ``expected.npz`` in it: tokens [1, 40],
the float32 logits [1, 8, V] after every fifth of them, a text with its ids, and the ids of MESSAGES by the chat
template. Of others there is the config.json alone.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TokenizersBackend,  # pyrefly: ignore[missing-module-attribute]
)

OUT = Path(__file__).parent / "transformers5"
TEXT = "Ünïcode 123 <|im_start|>user\n two  spaces,\tand 4567.\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "2+2?"}]
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    "qwen3_yarn": ("qwen3", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": False}),
    "gemma3": (
        "gemma3",
        {"text_config": SIZES | GEMMA3, "vision_config": VISION, "mm_tokens_per_image": 4, "eos_token_id": [257]},
    ),
    "gemma4_text": ("gemma4_text", {**GEMMA4, **GEMMA4_EXPERTS}),
    "gemma4": (
        "gemma4",
        {
            "text_config": SIZES | GEMMA4,
            "vision_config": VISION | {"num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4},
            "eos_token_id": [257],
        },
    ),
}
"""What is saved: (model_type, settings besides SIZES)."""
OTHERS = (
    *("olmo2", "olmo3", "smollm3", "gemma", "qwen2_moe", "qwen3_next", "qwen3_5_text"),
    *(
        "gpt_oss",
        "deepseek_v3",
        "mixtral",
        "ministral",
        "granite",
        "glm4",
        "cohere2",
        "phimoe",
        "nemotron",
        "llama4_text",
    ),
)


def tokenizer(name: str) -> TokenizersBackend:
    """Tokenizers of 264 tokens: Qwen2's of bytes as its own class or as TokenizersBackend; Llama's and Gemma's."""
    added: dict[str, Any] = {
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|end|>"],
    }
    is_gemma = name.startswith("gemma")
    if is_gemma or name in ("llama", "mistral"):
        pieces = ["<pad>", "<|im_end|>", "<bos>" if is_gemma else "<s>", "<unk>"]
        pieces += [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "<|im_start|>", "<|end|>", "e"]
        vocabulary: Any = {piece: i for i, piece in enumerate(pieces)}
        kind = transformers.GemmaTokenizer if is_gemma else transformers.LlamaTokenizer
        made: Any = kind(vocab=vocabulary, merges=[], bos_token=pieces[2], unk_token="<unk>", **added)
    else:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        vocabulary = {chr(b): b for b in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], **{**added, "unk_token": None})
        made.add_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(4)])
        if name != "qwen2":
            made = TokenizersBackend(tokenizer_object=made._tokenizer, **added)
    made.chat_template = CHAT_TEMPLATE
    return made


def save(name: str, model_type: str, settings: dict[str, Any]) -> None:
    directory = OUT / name
    torch.manual_seed(0)
    wanted = {k: v for k, v in SIZES.items() if model_type != "phi3" or k != "head_dim"}
    if "text_config" in settings:
        wanted = {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(wanted | settings)))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith(("bias", "scale")):
            torch.nn.init.normal_(parameter, 0.0 if model_type.startswith(("gemma2", "gemma3")) else 1.0, 0.3)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1.0, 0.3)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer(name).save_pretrained(directory)
    again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    read = AutoTokenizer.from_pretrained(directory)
    tokens = np.random.default_rng(0).integers(0, 264, (1, 40))
    with torch.no_grad():
        logits = again(input_ids=torch.tensor(tokens)).logits.numpy()[:, 4::5]
    asked = read.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ids = read(TEXT)["input_ids"]
    np.savez_compressed(directory / "expected.npz", tokens=tokens, logits=logits, text=TEXT, ids=ids, asked=asked)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    for name, (model_type, settings) in FAMILIES.items():
        save(name, model_type, settings)
    (OUT / "others").mkdir()
    for model_type in OTHERS:
        config = AutoConfig.for_model(model_type)
        config.architectures = [transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        (OUT / "others" / f"{model_type}.json").write_text(config.to_json_string())


if __name__ == "__main__":
    main()
