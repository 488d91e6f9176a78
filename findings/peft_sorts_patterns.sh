#!/usr/bin/env bash
# PEFT 0.21.2: an adapter whose alpha_pattern has two keys for one module is another model after it was saved and loaded.
#
# Of alpha_pattern and rank_pattern, the first key that matches the end of a module's path counts. But save_pretrained
# writes adapter_config.json with sorted keys, so another key may come first when the adapter is loaded. With
# alpha_pattern nothing is said: here the adapter's share of the output becomes ten times as large. (With rank_pattern the
# sizes of the tensors no longer fit, which is an error.) It matters to everybody who evaluates, merges or goes on
# training with a saved adapter; whoever reads adapter_config.json must take the file's order, not the trainer's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.v_proj = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(self.attn.v_proj.weight)

    def forward(self, x):
        return self.attn.v_proj(x)


pattern = {"v_proj": 2, r"attn\.v_proj": 20}
config = LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], alpha_pattern=pattern)
trained = get_peft_model(Model(), config)
for name, parameter in trained.named_parameters():
    if "lora" in name:
        torch.nn.init.ones_(parameter)
x = torch.ones(1, 4)
before = trained(x)[0, 0].item()
trained.save_pretrained("saved")
with open("saved/adapter_config.json") as file:
    written = list(json.load(file)["alpha_pattern"])
after = PeftModel.from_pretrained(Model(), "saved")(x)[0, 0].item()
print(f"keys given {list(pattern)}, keys saved {written}; output before {before}, after saving and loading {after}")
if (before, after) != (8.0, 80.0):
    sys.exit("PEFT now gives the same output after saving and loading, or chooses among patterns in another way")
PYTHON
