"""Adapters that PEFT has trained: applied by PEFT's rules, or refused by name; see make_peft.py.

`test_the_policy_is_pefts` needs PyTorch, and two environments as CONTRIBUTING.md makes them.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.forward import compiled_logprobs, trainer_mesh
from tests.models.random_checkpoint import write_random
from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import LoraSection
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.lora import adapted_modules, apply_lora, load_adapters, read_adapters, write_adapter_files
from tpu_grpo.models.reference import read_weights, reference_logprobs
from tpu_grpo.models.tunix_model import abstract_model, load_model
from tpu_grpo.records.errors import CheckpointError

MADE = Path(__file__).parent / "peft_adapters"
MERGE = "(PEFT's merge_and_unload), save that, and set model.path to it"
QV = {"targets": "attn.(q|v)_proj"}
APPLIED: dict[str, dict[str, Any]] = {
    "suffixes": {"rank": 3, **QV},
    "expression": {"targets": "attn.(q|o)_proj|down_proj"},
    "all_linear": {"alpha": 3},
    "some_layers": {"targets": "(k|up)_proj", "layers": "1"},
    "layers_pattern": {"layers": "0", **QV},
    "excluded": {"targets": "attn", "layers": "1"},
    "rslora": {"rank": 3, "targets": "(q|gate)_proj"},
    "patterns": {"rank": 4},
    "gemma2": {"rank": 4, "targets": "attn"},
    "gemma2_values": {"targets": "(k|v)_proj"},
    "phi3": {},
    "experts": QV,
    "harmless": {"targets": "down_proj"},
}
"""Settings of model.lora besides rank=2 and alpha=5. In Gemma 2 keys and values have one adapter, with both their A."""
REFUSED = {
    "use_dora": "got use_dora=True; merge",
    "modules_to_save": r"got modules_to_save=\['lm_head'\]; merge",
    "bias": r"got 4 of them, else \S+q_proj.base_layer.bias, .* \(bias='lora_only' in adapter_config.json\)",
    "lora_bias": "got lora_bias=True",
    "trainable_token_indices": r"got trainable_token_indices=\[3, 5\]",
    "embed_tokens": "got 2 of them, else .*embed_tokens.lora_embedding_A",
    "lm_head": "got 2 of them, else .*lm_head.lora_A.weight",
    "target_parameters": r"got target_parameters=\['mlp.experts.down_proj'\]",
    "init_lora_weights": "got init_lora_weights=pissa",
    "layer_replication": r"got layer_replication=\[\[0, 2\], \[1, 2\]\]",
    "alora_invocation_tokens": r"got alora_invocation_tokens=\[3\]",
}


def base_of(folder: Path) -> Path:
    return SAVED / json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def section_of(folder: Path) -> LoraSection:
    return LoraSection(**(dict[str, Any](rank=2, alpha=5, path=folder) | APPLIED.get(folder.name, QV)))


def read(folder: Path, section: LoraSection) -> dict[str, np.ndarray]:
    checkpoint = read_checkpoint(base_of(folder))
    base = abstract_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    model = apply_lora(base, adapted_modules(checkpoint, section), section, seed=0)
    return read_adapters(model, section, checkpoint)


def policy_of(folder: Path) -> nnx.Module:
    checkpoint, section = read_checkpoint(base_of(folder)), section_of(folder)
    base = load_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    model = apply_lora(base, adapted_modules(checkpoint, section), section, seed=0)
    load_adapters(model, section, checkpoint)
    return model


def difference(folder: Path, found: np.ndarray) -> float:
    return float(np.abs(found[:, 3::4] - np.load(folder / "expected.npz")["logprobs"]).max())


def tokens_of(folder: Path) -> np.ndarray:
    return np.load(folder / "expected.npz")["tokens"].astype(np.int32)


@pytest.mark.parametrize("kind", APPLIED)
def test_what_is_read_is_what_peft_computes(kind: str, tmp_path: Path) -> None:
    """W + B A alpha / rank with what was read, in the float64 reference, is PEFT's model in PyTorch."""
    folder = MADE / kind
    section, checkpoint = section_of(folder), read_checkpoint(base_of(folder))
    write_adapter_files(tmp_path, read(folder, section), section, "")
    read_back = read_weights(tmp_path)
    deltas = {}
    for name in read_back:
        if name.endswith(".lora_A.weight"):
            b = read_back[name.replace("lora_A", "lora_B")]
            part = name.removeprefix("base_model.model.").replace(".lora_A", "")
            deltas[part] = section.alpha / b.shape[1] * b @ read_back[name]
    weights = read_weights(checkpoint.directory)
    for whole, parts in checkpoint.family.fused_tensors(checkpoint.config).items():
        if whole in weights:
            deltas[whole] = np.concatenate([deltas.pop(part) for part in parts])
    weights |= {name: weights[name] + delta for name, delta in deltas.items()}
    (tmp_path / "config.json").write_text(json.dumps(dict(checkpoint.hf_config)))
    found = reference_logprobs(tmp_path, tokens_of(folder), changed=weights)
    assert difference(folder, found) <= 1e-5


@pytest.mark.slow  # compiles 13 models
@pytest.mark.parametrize("kind", APPLIED)
def test_a_policy_computes_what_peft_does(kind: str) -> None:
    folder = MADE / kind
    assert difference(folder, compiled_logprobs(policy_of(folder), tokens_of(folder))) <= 1e-5


@pytest.mark.parametrize("kind", REFUSED)
def test_what_changes_a_model_in_another_way_is_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[kind]) as caught:
        read(MADE / kind, section_of(MADE / kind))
    assert MERGE in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "targets"),
    [
        ("suffixes", {"targets": "attn"}, "attn.q_proj|attn.v_proj"),
        ("some_layers", {"layers": None}, "layers.(1).attn.k_proj|layers.(1).mlp.up_proj"),
        ("gemma2_values", {"targets": "down_proj"}, "attn.kv_einsum"),
    ],
)
def test_the_remedy_for_other_modules_can_be_followed(kind: str, change: dict[str, Any], targets: str) -> None:
    section = section_of(MADE / kind)
    with pytest.raises(CheckpointError, match="give the modules of the adapters") as caught:
        read(MADE / kind, section.model_copy(update=change))
    assert f"; set model.lora.targets='{targets}' and leave out model.lora.layers" in str(caught.value)
    followed = read(MADE / kind, section.model_copy(update={"targets": targets, "layers": None}))
    assert followed.keys() == read(MADE / kind, section).keys()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_alpha": "5"}, "must give r, lora_alpha and their patterns as PEFT does, got for model.layers.0"),
        ({"rank_pattern": ["q_proj"]}, "must give r, lora_alpha"),
        ({"alpha_pattern": {"(": 1}}, "must give r, lora_alpha"),
        ({"r": 0}, "must give r, lora_alpha"),
        ({"r": 2}, r"must hold \S+q_proj.lora_A.weight \[2, 16\], got \[3, 16\]"),
        ({"peft_type": "LOHA"}, "got peft_type=LOHA"),
        ({"kasa_config": {"beta": 1}}, "got kasa_config={'beta': 1}"),
        ({"of_the_future": True}, "got of_the_future=True"),
    ],
)
def test_settings_that_peft_does_not_write_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    folder = Path(shutil.copytree(MADE / "suffixes", tmp_path / "suffixes"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=told):
        read(folder, section_of(folder))


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_the_policy_is_pefts(tmp_path: Path) -> None:
    """Adapters that PEFT makes now; and this package's own, of 21 modules, after PEFT has loaded and saved them."""
    base = write_random("qwen3", tmp_path / "base", layers=3, dtype=np.float32)
    section = LoraSection(rank=2, alpha=5, path=tmp_path / "again")
    checkpoint = read_checkpoint(base)
    plain = abstract_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    model = apply_lora(plain, adapted_modules(checkpoint, section), section, seed=0)
    rng = np.random.default_rng(0)
    own = {
        ".".join(map(str, path)): rng.standard_normal(leaf.shape, np.float32)
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    }
    (tmp_path / "own").mkdir()
    write_adapter_files(tmp_path / "own", own, section, str(base))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    save_again = (
        "import sys; from peft import AutoPeftModelForCausalLM as A; A.from_pretrained(sys.argv[1]).save_pretrained"
        "(sys.argv[2])"
    )
    for python in os.environ["TORCH_PYTHON"].split(":"):
        command = [python, "-c", save_again, str(tmp_path / "own"), str(tmp_path / "again")]
        subprocess.run(command, env=environment, check=True, timeout=600)
        saved = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
        assert sorted(saved["target_modules"]) == sorted(f"{p}_proj" for p in (*"qkvo", "gate", "up", "down"))
        found = read_adapters(model, section, checkpoint)
        assert all((found[name] == value).all() for name, value in own.items())
    newest = os.environ["TORCH_PYTHON"].split(":")[-1]
    script = Path(__file__).with_name("make_peft.py")
    subprocess.run([newest, str(script), str(tmp_path / "made")], env=environment, check=True, timeout=600)
    differences = {}
    for kind in APPLIED:
        folder = tmp_path / "made" / kind
        differences[kind] = difference(folder, compiled_logprobs(policy_of(folder), tokens_of(folder)))
        print(f"{kind} {differences[kind]:.1e}")
    assert {kind: found for kind, found in differences.items() if not found <= 1e-5} == {}
    for kind, told in REFUSED.items():
        with pytest.raises(CheckpointError, match=told):
            read(tmp_path / "made" / kind, section_of(tmp_path / "made" / kind))
