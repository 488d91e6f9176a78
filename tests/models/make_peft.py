"""Writes adapters of many kinds with PEFT, on the models of tests/models/transformers5, and what PyTorch computes.

    torch_venv5/bin/python tests/models/make_peft.py [FOLDER]     # tests/models/peft_adapters; see CONTRIBUTING.md

A folder per kind has adapter_config.json, adapter_model.safetensors and, unless such adapters are refused,
``expected.npz``: tokens [1, 12], and the float32 log-probabilities [1, 3, V] after every fourth of them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

BASES, OUT = Path(__file__).parent / "transformers5", Path(__file__).parent / "peft_adapters"
QV = ["q_proj", "v_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "suffixes": ("qwen3", {"target_modules": QV, "r": 3}),
    "expression": ("llama", {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qo]_proj|mlp\.down_proj)"}),
    "all_linear": ("mistral", {"target_modules": "all-linear", "lora_alpha": 3}),
    "some_layers": ("qwen2", {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": 1}),
    "layers_pattern": ("llama", {"target_modules": QV, "layers_to_transform": [0], "layers_pattern": ["layers"]}),
    "excluded": ("qwen3_yarn", {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*|.*mlp.*"}),
    "rslora": ("qwen3", {"target_modules": ["q_proj", "gate_proj"], "use_rslora": True, "r": 3}),
    "patterns": (
        "qwen3",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 1, "down_proj": 4, "proj": 3, ".*v_proj": 1},
            "alpha_pattern": {"v_proj": 1, r"self_attn\.v_proj": 9, r"model.layers.0.mlp\.(gate|up)_proj": 7},
        },
    ),
    "gemma2": ("gemma2", {"target_modules": [*QV, "k_proj", "o_proj"], "rank_pattern": {"0.self_attn.v_proj": 1}}),
    "gemma2_values": ("gemma2", {"target_modules": ["v_proj"]}),
    "phi3": ("phi3", {"target_modules": "all-linear"}),
    "experts": ("qwen3_moe", {"target_modules": QV}),
    "harmless": (
        "mistral",
        {
            "target_modules": ["down_proj"],
            "bias": "all",  # the model has none
            "fan_in_fan_out": True,  # of GPT-2's modules only
            "lora_dropout": 0.3,
            "init_lora_weights": "orthogonal",
        },
    ),
}
"""What is loaded: name -> (base model, settings of LoraConfig besides r=2 and lora_alpha=5)."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "use_dora": ("qwen3", {"target_modules": QV, "use_dora": True}),
    "modules_to_save": ("qwen3_yarn", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "bias": ("qwen2", {"target_modules": QV, "bias": "lora_only"}),
    "lora_bias": ("qwen2", {"target_modules": QV, "lora_bias": True}),
    "trainable_token_indices": ("qwen3_yarn", {"target_modules": QV, "trainable_token_indices": [3, 5]}),
    "embed_tokens": ("qwen3_yarn", {"target_modules": ["embed_tokens", "q_proj"]}),
    "lm_head": ("qwen3_yarn", {"target_modules": ["lm_head", "q_proj"]}),
    "target_parameters": ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "init_lora_weights": ("qwen3", {"target_modules": QV, "init_lora_weights": "pissa"}),
    "layer_replication": ("llama", {"target_modules": QV, "layer_replication": [[0, 2], [1, 2]]}),
    "alora_invocation_tokens": ("qwen3", {"target_modules": QV, "alora_invocation_tokens": [3]}),
}
"""What changes a model in another way; the name is what an error must name."""


def write(folder: Path, base: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    directory, loaded = BASES / base, {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(directory, **loaded)
    config = LoraConfig(**({"r": 2, "lora_alpha": 5, "task_type": "CAUSAL_LM"} | settings))
    model = get_peft_model(plain, config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 1.0 if "magnitude" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory, **loaded), str(folder)).eval()
    tokens = np.random.default_rng(0).integers(0, 264, (1, 12))
    with torch.no_grad():
        logits = again(input_ids=torch.tensor(tokens)).logits
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1).numpy()[:, 3::4]
    np.savez_compressed(folder / "expected.npz", tokens=tokens, logprobs=logprobs)
    (folder / "README.md").unlink(missing_ok=True)
    settings_file = folder / "adapter_config.json"
    content = json.loads(settings_file.read_text()) | {"base_model_name_or_path": base}
    settings_file.write_text(json.dumps(content, indent=2) + "\n")


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for name, (base, settings) in (KINDS | REFUSED).items():
        write(out / name, base, settings)
        if name in REFUSED:
            (out / name / "expected.npz").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else OUT)
