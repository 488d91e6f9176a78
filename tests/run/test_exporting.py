"""Exported directories: the tensors that were loaded, the policy's numbers, and nothing half-written."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from tests.environments.template_families import tokenizer
from tests.learner.linear import Run
from tests.models.forward import compiled_logprobs, trainer_mesh
from tests.models.gemma3 import as_seen_with_images
from tests.run.policies import FAMILIES, LORA, TOKENS_BT, change, run_config, trained, write_model
from tpu_grpo.cli.dry_run import check
from tpu_grpo.cli.export import export_checkpoint
from tpu_grpo.config import LoraSection, RunConfig
from tpu_grpo.learner import Learner
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.lora import load_adapters
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tokenizers import load_tokenizer, stop_token_ids
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.exporting import Policy, export_policy
from tpu_grpo.run.inputs import open_inputs
from tpu_grpo.run.policies import choose, exported_values, load_inputs, load_policy
from tpu_grpo.weights.plan import named_leaves

REPOSITORY = Path(__file__).parents[2]


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(config: RunConfig, fsdp: int = 1, tp: int = 1, step: int = 0) -> Policy:
    """A policy that is its model still."""
    checkpoint = read_checkpoint(Path(config.model.path))
    model = load_model(checkpoint, trainer_mesh(fsdp, tp), dtype=jnp.dtype(config.model.dtype), remat="none")
    return Policy(model, step, checkpoint, load_tokenizer(checkpoint.directory))


@pytest.mark.parametrize(
    ("family", "options"),
    [*FAMILIES.items(), ("gemma2", {"kv_heads": 4})],  # with four, its queries, keys and values are one leaf
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_is_loaded_leaves_as_the_tensors_it_came_from(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Names, layouts and bits; from four devices."""
    config = run_config(write_model(tmp_path, family, **{"kv_heads": 2} | options))
    export_policy(config, loaded(config, 2, 2), tmp_path / "out")
    was, found = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "out")
    assert found.keys() == was.keys()
    for name, tensor in found.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, was[name], name)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "out"))
    assert after == before | {"torch_dtype": "float32"}


@pytest.mark.full
def test_of_a_model_that_sees_images_the_text_model_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma3ForCausalLM, with the tensors that it came from, and what transformers needs to know."""
    monkeypatch.chdir(tmp_path)
    config = run_config(write_model(tmp_path, "gemma3_text", layers=7))
    was, text = tensors_of(tmp_path / "model"), json.loads((tmp_path / "model/config.json").read_text())
    as_seen_with_images(tmp_path / "model")
    policy = loaded(config, 2, 2)
    export_policy(config, policy, tmp_path / "out")
    found, settings = tensors_of(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())
    assert found.keys() == was.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, was[name], name)
    assert settings == settings | text | {"torch_dtype": "float32"}
    assert read_checkpoint(tmp_path / "out").notes == []
    with pytest.raises(ConfigError, match="export.kind must be model, got adapter: adapters of the text model do not"):
        open_inputs(run_config(tmp_path, model={"lora": LORA}, export={"kind": "adapter"}))
    (note,) = (line for line in check(open_inputs(config), jax.devices()[:1]) if "images" in line)
    assert note.startswith(
        "note       2 tensors for images are left out (multi_modal_projector.w and 1 more): the text"
    )


QUICK = ("llama full", "gemma2 full", "qwen3 merged")


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *(
            pytest.param(name, lora, id=f"{name} {kind}", marks=() if f"{name} {kind}" in QUICK else pytest.mark.slow)
            for name in FAMILIES
            for kind, lora in (("full", None), ("merged", LORA))
            if (name, kind) not in (("mistral", "merged"), ("phi3", "merged"))  # as llama's
        ),
    ],
)
def test_what_is_read_back_computes_what_the_policy_does(
    tmp_path: Path, family: str, lora: dict[str, Any] | None
) -> None:
    """Within 1e-5 of the policy, and equal to an implementation that knows the files alone."""
    model = {} if lora is None else {"lora": lora}
    config = run_config(write_model(tmp_path, family, kv_heads=2, **FAMILIES[family]), model=model)
    policy = trained(config)
    export_policy(config, policy, tmp_path / "out")
    exported = load_model(read_checkpoint(tmp_path / "out"), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    found = compiled_logprobs(exported, TOKENS_BT)
    assert np.abs(found - compiled_logprobs(policy.model, TOKENS_BT)).max() <= 1e-5
    assert np.abs(found - reference_logprobs(tmp_path / "out", TOKENS_BT)).max() <= 1e-5
    assert np.abs(found - reference_logprobs(tmp_path / "model", TOKENS_BT)).max() > 0.05


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_adapters_leave_alone_and_are_read_back(tmp_path: Path, family: str) -> None:
    config = run_config(write_model(tmp_path, family, kv_heads=2), model={"lora": LORA}, export={"kind": "adapter"})
    policy = trained(config)
    export_policy(config, policy, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= names
    assert not names & {"model.safetensors", "config.json"}
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    assert settings["base_model_name_or_path"] == str(tmp_path / "model")
    wanted = {name: np.asarray(leaf) for name, leaf in named_leaves(nnx.state(policy.model, nnx.LoRAParam)).items()}
    change(policy.model, 1.0, nnx.LoRAParam)
    load_adapters(policy.model, LoraSection(**LORA, path=tmp_path / "out"), policy.checkpoint)
    for name, leaf in named_leaves(nnx.state(policy.model, nnx.LoRAParam)).items():
        np.testing.assert_array_equal(np.asarray(leaf), wanted[name], name)


def test_bfloat16_rounds_once_and_float32_keeps_what_bfloat16_held(
    tmp_path: Path,
) -> None:
    files = write_model(tmp_path, "qwen3", layers=1)
    was = tensors_of(tmp_path / "model")
    config = run_config(files, export={"dtype": "bfloat16"})
    export_policy(config, loaded(config), tmp_path / "narrow")
    narrow = tensors_of(tmp_path / "narrow")
    assert {tensor.dtype for tensor in narrow.values()} == {jnp.dtype(jnp.bfloat16)}
    for name, tensor in narrow.items():
        np.testing.assert_array_equal(tensor, was[name].astype(jnp.bfloat16))
    assert json.loads((tmp_path / "narrow/config.json").read_text())["torch_dtype"] == "bfloat16"
    config = run_config(files, model={"dtype": "bfloat16"}, export={"dtype": "float32"})
    export_policy(config, loaded(config), tmp_path / "wide")
    for name, tensor in tensors_of(tmp_path / "wide").items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, narrow[name].astype(np.float32))


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        {},
        pytest.param({"param_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"train_layers": "0"}, marks=pytest.mark.slow),
        pytest.param({"lora": LORA}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_in_bfloat16_leaves_as_what_was_trained(tmp_path: Path, model: dict[str, Any]) -> None:
    """Steps of 1e-6 are lost where a weight is rounded to bfloat16; the checkpoint has them."""
    more: dict[str, Any] = {"model": {"dtype": "bfloat16", **model}, "optimizer": {"learning_rate": 1e-6}}
    if "param_dtype" in model:
        more["optimizer"]["state"] = "compact"
    config = run_config(write_model(tmp_path, "qwen3", layers=1), **more, export={"dtype": "float32"})
    checkpoint, mesh = read_checkpoint(Path(config.model.path)), trainer_mesh(1, 1)
    meshes: Any = SimpleNamespace(trainer=mesh, joined=None, flash_block=None)
    learner = Learner(config, load_inputs(config.model, config.run.seed, checkpoint, meshes))
    before = {name: np.asarray(value) for name, value in learner._updater.stepped().items()}
    for _ in range(5):
        Run(learner._updater).step()
    learner.save(5)
    learner.close()
    trained = {name: np.asarray(value) for name, value in learner._updater.stepped().items()}
    moved = np.concatenate([np.abs(trained[name] - before[name]).ravel() for name in trained])
    assert 1e-6 < moved.mean() < 6e-6

    chosen = choose(config.run_dir, "latest")
    policy = load_policy(config.model, config.run.seed, checkpoint, mesh, chosen)
    found = exported_values(config.export, config.model, policy, chosen)
    assert found.keys() == trained.keys()
    for name, value in trained.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, name)
    export_checkpoint(config, "latest", tmp_path / "out")
    base = by_name(nnx.state(load_model(checkpoint, mesh, dtype=jnp.dtype("bfloat16"), remat="none")))
    left = load_model(read_checkpoint(tmp_path / "out"), mesh, dtype=jnp.dtype("float32"), remat="none")
    for name, value in by_name(nnx.state(left)).items():
        wanted = np.asarray(trained.get(name, base[name]), np.float32)
        if f"{name}_lora_a" in trained:
            a, b = trained[f"{name}_lora_a"], trained[f"{name}_lora_b"]
            wanted = wanted + 2.0 * np.tensordot(a, b, 1).reshape(wanted.shape)
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=0, atol=1e-8 if "lora" in model else 0, err_msg=name)


def test_shards_are_of_a_bounded_size_and_an_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    sizes = {"layers": 3, "hidden": 256, "intermediate": 512}  # 4.9 MiB
    config = run_config(write_model(tmp_path, "qwen3", **sizes), export={"shard_mib": 1})
    export_policy(config, loaded(config), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    assert 5 <= len(files) <= 7
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        held = load_file(file)
        size = sum(tensor.nbytes for tensor in held.values())
        assert size <= 2**20
        total += size
        assert {name for name, at in index["weight_map"].items() if at == file.name} == held.keys()
    assert index["metadata"]["total_size"] == total
    was = tensors_of(tmp_path / "model")
    for name, tensor in tensors_of(tmp_path / "out").items():
        np.testing.assert_array_equal(tensor, was[name])


def test_what_describes_the_model_says_how_to_stop_and_to_sample(tmp_path: Path) -> None:
    config = run_config(
        write_model(tmp_path, "qwen3", layers=1), rollout={"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 6}
    )
    (tmp_path / "run").mkdir()
    lines = [{"step": step, "rewards/mean": step / 10} for step in range(1, 13)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out = [
        {"step": step, "evaluation/greedy/r": value, "intervals": {"greedy/r": [value - 0.1, value + 0.1, 9]}}
        for step, value in ((0, 0.25), (6, 0.5), (12, 0.75))
    ]
    (tmp_path / "run/evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    policy = loaded(config, step=7)
    export_policy(config, policy, tmp_path / "out")
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    ids = {"bos_token_id": 0, "pad_token_id": 256, "eos_token_id": [256, 257]}
    assert generation == {**ids, "do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    tokenizer = load_tokenizer(tmp_path / "out")
    assert stop_token_ids(tokenizer, tmp_path / "out") == (256, 257)
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    assert yaml.safe_load((tmp_path / "out/tpu_grpo.yaml").read_text())["rollout"]["temperature"] == 0.7
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    # of steps 1 to 7: the means of 1..5 and of 3..7, a tenth of each
    assert "| reward, mean of the first five steps and of the last five | 0.300 | 0.500 |" in card
    assert "| held out, greedy, r | 0.250 (0.150 to 0.350), step 0 | 0.500 (0.400 to 0.600), step 6 |" in card
    assert "  temperature: 0.7\n" in card
    assert f"This is a qwen3 model of {policy.checkpoint.parameter_count:,} parameters in float32" in card


def test_a_base_model_that_had_conversations_stops_where_the_template_ends_turns(tmp_path: Path) -> None:
    """Gemma's base models end texts with <eos>, and their template ends turns with <end_of_turn>."""
    files = write_model(tmp_path, "gemma2", layers=1, vocab=300)
    base: Any = tokenizer("gemma2")
    base.save_pretrained(files / "model")
    end_of_text, end_of_turn = base.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    for name, more in (("alone", {}), ("conversed", {"environment": {"name": "guessing"}})):
        config = run_config(files, **more)
        export_policy(config, loaded(config), tmp_path / name)
        ends = json.loads((tmp_path / name / "generation_config.json").read_text())["eos_token_id"]
        assert (end_of_text in ends, end_of_turn in ends) == (True, bool(more))


def test_what_is_there_stays_and_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(write_model(tmp_path, "qwen3", layers=1))
    policy = loaded(config)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=rf"must go to a new directory, got {tmp_path}/there, which is there; name"):
        export_policy(config, policy, tmp_path / "there")
    monkeypatch.setattr("tpu_grpo.run.exporting.write_settings", lambda *_: 1 / 0)  # pyrefly: ignore[division-by-zero]
    with pytest.raises(ZeroDivisionError):
        export_policy(config, policy, tmp_path / "out")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["data.jsonl", "held.jsonl", "model", "rewards.py", "there"]


def test_a_full_disk_is_told_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the library that writes tensors meets both alike."""
    path = tmp_path / "out" / "model.safetensors"
    code = f"""
import resource
from pathlib import Path
import numpy as np
from tpu_grpo.cli.starting import exit_code_of
from tpu_grpo.models.hf_directory import new_directory
from tpu_grpo.models.hf_directory import save_tensors

def write():
    with new_directory(Path({str(path.parent)!r})) as directory:
        save_tensors(directory / "model.safetensors", {{"a": np.zeros(2**20, np.float32)}})

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
raise SystemExit(exit_code_of(write))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)}, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"DiskError: the disk must take {tmp_path}/.out.")
    assert done.stderr.endswith(
        "model.safetensors, got: File too large; have the limit on the size of files raised (ulimit -f), or name a "
        "directory elsewhere; what was saved stays as it is\n"
    )
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
