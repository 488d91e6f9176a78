"""Exports of every family, loaded by transformers and PEFT with PyTorch, which this package does not need.

python -m venv torch_venv
torch_venv/bin/pip install torch==2.13.0 transformers==4.57.6 peft==0.18.0
TORCH_PYTHON=torch_venv/bin/python uv run pytest -n 0 -m torch
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.models.forward import compiled_logprobs
from tests.models.random_checkpoint import LLAMA3_SCALING
from tests.run.policies import FAMILIES, LORA, TOKENS_BT, run_config, trained, write_model
from tpu_grpo.run.exporting import export_policy

KINDS = {"full": {}, "merged": {"lora": LORA}, "adapter": {"lora": LORA}}
CASES = {
    **FAMILIES,
    "gemma2, as many key heads": {"kv_heads": 4},
    "llama, scaled": {"rope_scaling": LLAMA3_SCALING},
    "qwen2, untied": {"tied": False},
}


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_transformers_computes_what_the_policy_does(tmp_path: Path) -> None:
    assert "TORCH_PYTHON" in os.environ, "set TORCH_PYTHON to a Python that has torch, transformers and peft"
    for case, options in CASES.items():
        files = write_model(tmp_path / "files" / case, case.split(",")[0], **{"kv_heads": 2} | options)
        for kind, model in KINDS.items():
            export = {"kind": "adapter" if kind == "adapter" else "model", "shard_mib": 1}
            config = run_config(files, model=model, export=export)
            policy = trained(config, change_base=kind != "adapter")
            folder = tmp_path / "exports" / f"{case}, {kind}"
            export_policy(config, policy, folder / "out")
            logprobs = compiled_logprobs(policy.model, TOKENS_BT)
            np.savez(folder / "expected.npz", tokens=TOKENS_BT, logprobs=logprobs)
    script = Path(__file__).with_name("compare_in_torch.py")
    command = [os.environ["TORCH_PYTHON"], str(script), str(tmp_path / "exports")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 2)[:2] for line in done.stdout.splitlines())
    assert len(found) == len(CASES) * len(KINDS)
    assert {name: difference for name, difference in found.items() if not float(difference) <= 1e-5} == {}
