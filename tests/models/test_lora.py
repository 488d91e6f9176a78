"""Adapters on loaded models: which modules have them, where they lie, what they start with, and their files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.models.forward import compiled_logprobs, trainer_mesh
from tests.models.random_checkpoint import GEMMA4_EXPERTS, edit_tensors, write_random
from tpu_grpo.config import LoraSection
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.lora import (
    SETTINGS_FILE,
    TENSORS_FILE,
    adaptable_modules,
    adapted_modules,
    apply_lora,
    existing_layers,
    load_adapters,
    read_adapters,
    write_adapters,
)
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import CheckpointError, ConfigError

DENSE = [f"attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
GEMMA = ["attn.q_einsum", "attn.kv_einsum", "attn.attn_vec_einsum", *DENSE[4:]]
TOKENS_BT = np.random.default_rng(0).integers(2, 300, (2, 12))


def with_lora(
    directory: Path, section: LoraSection, *, fsdp: int = 1, tp: int = 1, seed: int = 0
) -> tuple[nnx.Module, nnx.Module]:
    """(base, the same with adapters)."""
    checkpoint = read_checkpoint(directory)
    base = load_model(checkpoint, trainer_mesh(fsdp, tp), dtype=jnp.float32, remat="none")
    return base, apply_lora(base, adapted_modules(checkpoint, section), section, seed=seed)


def adapters(model: nnx.Module) -> dict[str, np.ndarray]:
    return {".".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}


def randomize(model: nnx.Module, scale: float = 0.2) -> None:
    """Adapters as training might leave them: neither part is zero."""
    state = nnx.state(model, nnx.LoRAParam)
    for number, (_, leaf) in enumerate(nnx.to_flat_state(state)):
        value = scale * np.random.default_rng(number).standard_normal(leaf[...].shape).astype(np.float32)
        leaf[...] = jax.device_put(value, leaf[...].sharding)
    nnx.update(model, state)


# --- which modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        *(("qwen2", DENSE), ("qwen3", DENSE), ("llama", DENSE), ("qwen3_moe", DENSE[:4])),
        *(("gemma2", GEMMA), ("gemma3_text", GEMMA)),
    ],
)
def test_all_projections_of_every_family_by_default(tmp_path: Path, family: str, kinds: list[str]) -> None:
    checkpoint = read_checkpoint(write_random(family, tmp_path / "model"))
    expected = {f"layers.{layer}.{kind}" for layer in (0, 1) for kind in kinds}
    assert set(adaptable_modules(checkpoint)) == set(adapted_modules(checkpoint, LoraSection(rank=2))) == expected


def test_layers_that_differ_have_modules_of_their_own(tmp_path: Path) -> None:
    """Gemma 4's second layer here has no projection of values; experts and their router have no adapters."""
    checkpoint = read_checkpoint(write_random("gemma4_text", tmp_path / "model", **GEMMA4_EXPERTS))
    modules = adapted_modules(checkpoint, LoraSection(rank=2))
    assert {name for name in modules if "layers.0" in name} == {f"layers.0.{kind}" for kind in GEMMA}
    of_global = {f"layers.1.{kind}".replace("kv_einsum", "k_einsum") for kind in GEMMA}
    assert {name for name in modules if "layers.1" in name} == of_global


def test_targets_and_layers_choose(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_random("qwen3", tmp_path / "model", layers=4))
    section = LoraSection(rank=2, targets=r"attn\.(q|v)_proj", layers="0,2-3")
    expected = [f"layers.{layer}.attn.{x}_proj" for layer in (0, 2, 3) for x in "qv"]
    assert list(adapted_modules(checkpoint, section)) == expected
    by_layer = LoraSection(rank=2, targets=r"layers\.1\.mlp\.up")
    assert adapted_modules(checkpoint, by_layer) == ("layers.1.mlp.up_proj",)


def test_what_the_model_lacks_is_refused_with_what_it_has(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_random("qwen3", tmp_path / "model", layers=3))
    with pytest.raises(ConfigError, match=r"model.train_layers must name layers .* which has 3 \(0-2\), got 3"):
        existing_layers(checkpoint, "model.train_layers", "3")
    embedding_or_head = r"modules of the layers, got '.*', which is found in .*; leave it out"
    for settings, told in (
        ({"layers": "1-3"}, r"model.lora.layers must name layers .* which has 3 \(0-2\), got 1-3"),
        ({"targets": "qkv"}, r"got 'qkv'; every layer N has layers.N. and attn.q_proj, .*mlp.down_proj"),
        *(({"targets": targets}, embedding_or_head) for targets in ("lm_head", "q_proj|lm_head", "embed|q_proj")),
        (
            {"targets": r"layers\.1\.", "layers": "0"},
            "found in a module of model.lora.layers=0, found only in layers.1",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            adapted_modules(checkpoint, LoraSection.model_validate({"rank": 2, **settings}))
    assert len(adapted_modules(checkpoint, LoraSection(rank=2, targets=".*"))) == 3 * 7


def test_projections_that_are_one_module_are_named_together(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_random("gemma2", tmp_path / "model", layers=1))
    for targets, module in (("attn.q_proj", "q_einsum"), ("(k|v)_proj", "kv_einsum"), ("kv_einsum", "kv_einsum")):
        assert adapted_modules(checkpoint, LoraSection(rank=2, targets=targets)) == (f"layers.0.attn.{module}",)
    for targets, told in (
        ("(q|v)_proj", r"found in all of layers.0.attn.k_proj, layers.0.attn.v_proj or in none.*got '.q.v"),
        ("query", r"layers.N. and attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate"),
    ):
        with pytest.raises(ConfigError, match=told):
            adapted_modules(checkpoint, LoraSection(rank=2, targets=targets))


# --- what they are ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma3_text", "qwen2", "qwen3", "qwen3_moe", "llama")
        ),
    ],
)
def test_the_model_is_the_base_at_first_and_shares_its_arrays(tmp_path: Path, family: str) -> None:
    base, model = with_lora(write_random(family, tmp_path / "model", scale=0.3), LoraSection(rank=3))
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in nnx.to_flat_state(nnx.state(base)):
        assert leaves[path][...] is leaf[...]
    difference = np.abs(compiled_logprobs(base, TOKENS_BT) - compiled_logprobs(model, TOKENS_BT)).max()
    assert difference <= 1e-5  # the same sums, perhaps fused otherwise


@pytest.mark.full
def test_a_model_with_flash_attention_keeps_it(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_random("qwen3", tmp_path))
    base = load_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none", flash_block=128)
    section = LoraSection(rank=2)
    model: Any = apply_lora(base, adapted_modules(checkpoint, section), section, seed=0)
    assert (model.config.use_flash_attention, model.config.flash_attention_block_size) == (True, 128)


@pytest.mark.slow  # three models
def test_adapters_depend_on_the_seed_and_not_on_the_mesh(tmp_path: Path) -> None:
    directory, section = write_random("qwen3", tmp_path / "model"), LoraSection(rank=4)
    _, model = with_lora(directory, section, fsdp=2, tp=2)
    layers: Any = model
    q_proj = layers.layers[0].attn.q_proj
    assert q_proj.w_lora_a[...].sharding.spec == jax.sharding.PartitionSpec("fsdp", None)
    assert q_proj.w_lora_b[...].sharding.spec == jax.sharding.PartitionSpec(None, "tp", None)
    one, other = adapters(model), adapters(with_lora(directory, section)[1])
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])
        assert (value == 0).all() == name.endswith("_b")
    # He et al.: uniform with variance 2 / inputs; every matrix has other numbers
    assert one["layers.0.mlp.down_proj.kernel_lora_a"].std() == pytest.approx((2 / 128) ** 0.5, rel=0.1)
    assert not (one["layers.0.attn.q_proj.w_lora_a"] == one["layers.1.attn.q_proj.w_lora_a"]).any()
    reseeded = adapters(with_lora(directory, section, seed=1)[1])
    assert (reseeded["layers.0.attn.q_proj.w_lora_a"] != one["layers.0.attn.q_proj.w_lora_a"]).all()


# --- their files -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [
        pytest.param("qwen2", 2, marks=pytest.mark.slow),
        ("qwen3", 2),
        ("gemma2", 2),
        ("gemma2", 4),
        ("gemma3_text", 1),
        pytest.param("gemma4_text", 2, marks=pytest.mark.slow),
    ],
)  # with four, Tunix's queries, keys and values are one module
def test_files_say_what_the_model_computes(tmp_path: Path, family: str, kv_heads: int) -> None:
    """W + B A alpha / rank with the published names, put into the base's own checkpoint, is the adapted model."""
    directory = write_random(family, tmp_path / "model", scale=0.3, kv_heads=kv_heads)
    section = LoraSection(rank=3, alpha=6.0, layers="1")
    _, model = with_lora(directory, section)
    randomize(model)
    write_adapters(tmp_path / "adapters", adapters(model), section, "base")
    settings = json.loads((tmp_path / "adapters" / SETTINGS_FILE).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 6.0, "LORA")
    tensors, weights = load_file(tmp_path / "adapters" / TENSORS_FILE), load_file(directory / "model.safetensors")
    assert len(tensors) == 2 * len(settings["target_modules"]) == (12 if family == "gemma4_text" else 14)
    before = reference_logprobs(directory, TOKENS_BT)
    merged = {}
    for module in settings["target_modules"]:
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + 6.0 / 3 * b @ a
    edit_tensors(directory, **merged)
    expected = reference_logprobs(directory, TOKENS_BT)
    assert np.abs(compiled_logprobs(model, TOKENS_BT) - expected).max() <= 3e-4
    assert np.abs(before - expected).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_written_adapters_are_read_back_exactly_on_another_mesh(tmp_path: Path, family: str) -> None:
    directory, section = write_random(family, tmp_path / "model"), LoraSection(rank=2)
    _, model = with_lora(directory, section, fsdp=2, tp=2)
    randomize(model)
    write_adapters(tmp_path / "8", adapters(model), section, "base")
    write_adapters(tmp_path / "8", adapters(model), section, "base")  # a step that is done again
    start = LoraSection(rank=2, path=tmp_path / "8")
    _, other = with_lora(directory, start)
    load_adapters(other, start, read_checkpoint(directory))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("8")] == ["8"]
    for name, value in adapters(model).items():
        np.testing.assert_array_equal(adapters(other)[name], value)


def test_projections_of_one_module_need_the_sum_of_their_ranks_if_their_a_differ(tmp_path: Path) -> None:
    directory, section = write_random("gemma2", tmp_path / "model", layers=1), LoraSection(rank=2)
    _, model = with_lora(directory, section)
    write_adapters(tmp_path / "0", adapters(model), section, "base")
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    tensors = load_file(tmp_path / "0" / TENSORS_FILE)
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "0" / TENSORS_FILE)
    with pytest.raises(CheckpointError, match=r"model.lora.rank must be 4, a module's largest of the adapters in .*"):
        load_adapters(model, LoraSection(rank=2, path=tmp_path / "0"), read_checkpoint(directory))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[nnx.Module, Path]:
    """A model with adapters of rank 2, and their files, beside the model's."""
    directory = tmp_path_factory.mktemp("written")
    _, model = with_lora(write_random("qwen3", directory / "model"), LoraSection(rank=2))
    write_adapters(directory / "adapters", adapters(model), LoraSection(rank=2), "base")
    return model, directory / "adapters"


@pytest.mark.full
def test_own_adapters_are_read_after_peft_has_saved_them_again(
    written: tuple[nnx.Module, Path], tmp_path: Path
) -> None:
    """From 20 modules on, PEFT replaces the paths of modules by their last names."""
    (model, directory), checkpoint = written, read_checkpoint(written[1].parent / "model")
    again = Path(shutil.copytree(directory, tmp_path / "again"))
    settings = json.loads((again / SETTINGS_FILE).read_text())
    settings |= {"target_modules": sorted({name.rpartition(".")[2] for name in settings["target_modules"]})}
    (again / SETTINGS_FILE).write_text(
        json.dumps(settings | {"peft_version": "0.21.2", "megatron_core": "megatron.core"})
    )
    found = read_adapters(model, LoraSection(rank=2, path=again), checkpoint)
    for name, value in adapters(model).items():
        np.testing.assert_array_equal(found[name], value)


def cut(directory: Path) -> None:
    (directory / TENSORS_FILE).write_bytes((directory / TENSORS_FILE).read_bytes()[:100])


def without_one(directory: Path) -> None:
    tensors = load_file(directory / TENSORS_FILE)
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    save_file(tensors, directory / TENSORS_FILE)


def without_module(directory: Path) -> None:
    tensors = load_file(directory / TENSORS_FILE)
    kept = {name: value for name, value in tensors.items() if "layers.0.mlp.down_proj" not in name}
    save_file(kept, directory / TENSORS_FILE)


@pytest.mark.parametrize(
    ("damage", "settings", "expected"),
    [
        (cut, {}, "is not a whole safetensors file"),
        (without_one, {}, r"must hold \S+layers.1.mlp.up_proj.lora_A.weight \[2, 64\], got none"),
        (lambda directory: (directory / SETTINGS_FILE).unlink(), {}, "adapter_config.json is missing"),
        (lambda directory: None, {"rank": 4, "alpha": 32.0}, "model.lora.alpha must be 16.0, .*, got 32.0; set it"),
        (
            lambda directory: None,
            {"rank": 4},
            "model.lora.rank must be 2, a module's largest of the adapters in .*, got 4; set it",
        ),
        (
            without_module,
            {},
            "which has none besides and lacks layers.0.mlp.down_proj; set model.lora.targets=.*layers.*1.*down_proj'",
        ),
        (lambda directory: None, {"path": Path("nowhere")}, "must be a directory with .*, got nowhere, which is none"),
    ],
    ids=["cut", "tensor gone", "settings gone", "alpha", "rank", "modules", "no directory"],
)
def test_other_or_broken_adapters_are_refused(
    written: tuple[nnx.Module, Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
    settings: dict[str, Any],
    expected: str,
) -> None:
    (model, directory), checkpoint = written, read_checkpoint(written[1].parent / "model")
    damaged = Path(shutil.copytree(directory, tmp_path / "adapters"))
    damage(damaged)
    with pytest.raises(CheckpointError, match=expected):
        load_adapters(model, LoraSection(**(dict[str, Any](rank=2, path=damaged) | settings)), checkpoint)
