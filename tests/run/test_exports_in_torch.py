"""Exports of every family, loaded by transformers 4 and 5 and PEFT with PyTorch, which this package does not need.

python -m venv torch_venv4
torch_venv4/bin/pip install torch==2.13.0 transformers==4.57.6 peft==0.18.0
python -m venv torch_venv5
torch_venv5/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
TORCH_PYTHON=torch_venv4/bin/python:torch_venv5/bin/python uv run pytest -n 0 -m torch
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.models.forward import compiled_logprobs
from tests.models.random_checkpoint import LLAMA3_SCALING, YARN_SCALING
from tests.models.test_transformers5 import SAVED
from tests.run.policies import FAMILIES, LORA, TOKENS_BT, run_config, trained, write_model
from tpu_grpo.run.exporting import export_policy

KINDS = {"full": {}, "merged": {"lora": LORA}, "adapter": {"lora": LORA}}
CASES = {
    **FAMILIES,
    "gemma2, as many key heads": {"kv_heads": 4},
    "llama, scaled": {"rope_scaling": LLAMA3_SCALING},
    "qwen2, untied": {"tied": False},
    "qwen3, yarn": {"rope_scaling": YARN_SCALING},
    **{f"{name}, saved by transformers 5": {} for name in ("qwen3_moe", "phi3", "llama")},
}


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_transformers_computes_what_the_policy_does(tmp_path: Path) -> None:
    assert "TORCH_PYTHON" in os.environ, "set TORCH_PYTHON to Pythons that have torch, transformers and peft"
    names = list[str]()
    for case, options in CASES.items():
        family, _, rest = case.partition(", ")
        files = write_model(tmp_path / "files" / case, family, **{"kv_heads": 2} | options)
        if rest == "saved by transformers 5":
            shutil.rmtree(files / "model")
            shutil.copytree(SAVED / family, files / "model")
        for kind, model in KINDS.items():
            if (family, kind) == ("phi3", "adapter"):
                continue  # refused: PEFT cannot give a fused projection several adapters
            names.append(f"{case}, {kind}")
            export = {"kind": "adapter" if kind == "adapter" else "model", "shard_mib": 1}
            config = run_config(files, model=model, export=export)
            policy = trained(config, change_base=kind != "adapter")
            folder = tmp_path / "exports" / names[-1]
            export_policy(config, policy, folder / "out")
            logprobs = compiled_logprobs(policy.model, TOKENS_BT)
            np.savez(folder / "expected.npz", tokens=TOKENS_BT, logprobs=logprobs)
    script = Path(__file__).with_name("compare_in_torch.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for python in os.environ["TORCH_PYTHON"].split(":"):
        asked = [python, "-c", "import transformers; print(transformers.__version__)"]
        version = subprocess.run(asked, capture_output=True, text=True, env=environment, check=True).stdout
        # the base of adapters is not an export: transformers 4 misreads one that transformers 5 has saved
        read = [name for name in names if not (version < "5" and name.endswith("saved by transformers 5, adapter"))]
        command = [python, str(script), *(str(tmp_path / "exports" / name) for name in read)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        print(python, done.stdout, sep="\n")
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^(.*) (\S+) of (\S+) '", done.stdout, re.MULTILINE)
        assert [name for name, *_ in found] == read
        assert [entry for entry in found if not float(entry[1]) <= 1e-6 * float(entry[2])] == []
