"""Loads exported directories with PyTorch, and compares their log-probabilities with the policy's.

    TORCH_PYTHON tests/run/compare_in_torch.py FOLDER ...

Every folder has an export in ``out`` and what the policy computed in ``expected.npz``: tokens [B, T] and logprobs
[B, T, V]. A line per folder says how far PyTorch is from it, and how large log-probabilities are there. This runs where
torch, transformers and peft are installed, and this package is not.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LOADED = {"dtype": torch.float32, "attn_implementation": "eager"}
"""How models are loaded: PyTorch's own attention would leave out the soft caps of Gemma 2."""


def load(directory: Path) -> torch.nn.Module:
    if (directory / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(directory, **LOADED)
    model = AutoModelForCausalLM.from_pretrained(directory, **LOADED)
    assert model.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    GenerationConfig.from_pretrained(directory).validate(strict=True)
    return model


def main(folders: Sequence[Path]) -> None:
    for folder in folders:
        expected = np.load(folder / "expected.npz")
        model = load(folder / "out").eval()
        with torch.no_grad():
            logits = model(torch.tensor(expected["tokens"], dtype=torch.long)).logits
        found = torch.log_softmax(logits.to(torch.float32), dim=-1).numpy()
        tokenizer = AutoTokenizer.from_pretrained(folder / "out")
        text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
        difference = float(np.abs(found - expected["logprobs"]).max())
        largest = float(np.abs(expected["logprobs"]).max())
        print(f"{folder.name} {difference:.3e} of {largest:.1f} {text!r}", flush=True)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
