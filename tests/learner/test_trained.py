"""Training adapters, or some layers: what changes, what it costs, and continuing."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests.learner import toy
from tests.learner.toy import flat_params, make_config, make_learner, make_mesh, make_scored
from tpu_grpo.config import LoraSection, RunConfig
from tpu_grpo.learner import Learner, frozen_leaves
from tpu_grpo.learner.parameters import by_name, copy_values, own_copy
from tpu_grpo.models.lora import apply_lora
from tpu_grpo.records.errors import CheckpointError

make_model = partial(toy.make_model, layers=2)
RANK = 2
MODULES = [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("attn.q_proj", "attn.o_proj", "mlp.up_proj")]
ADAPTER_SIZES = {"attn.q_proj": 64 + 64, "attn.o_proj": 64 + 64, "mlp.up_proj": 64 + 96}  # inputs + outputs
LORA = LoraSection(rank=RANK, alpha=8.0)
KINDS: dict[str, dict[str, Any]] = {"lora": {"lora": LORA.model_dump()}, "layers": {"train_layers": "1"}, "all": {}}


def build(
    directory: Path, kind: str, *, mesh: Mesh | None = None, seed: int = 0, remat: bool = False, **sections: Any
) -> tuple[Learner, nnx.Module, RunConfig]:
    """(a learner, the base model, the config)."""
    config = make_config(directory, {"model": KINDS[kind], **sections})
    mesh = mesh or make_mesh()
    base = make_model(mesh, seed, remat=remat)
    model = apply_lora(base, MODULES, LORA, seed=seed) if kind == "lora" else base
    reference = base if config.algorithm.beta else None
    return make_learner(config, mesh, model=model, reference=reference), base, config


def is_trained(name: str, kind: str) -> bool:
    return {"lora": "_lora_" in name, "layers": name.startswith("layers.1."), "all": True}[kind]


def update(learner: Learner, config: RunConfig, base: nnx.Module, *steps: int) -> None:
    for step in steps:
        learner.update(make_scored(base, config, step))  # pyrefly: ignore[bad-argument-type]


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "layers"])
def test_only_what_is_trained_changes(tmp_path: Path, kind: str) -> None:
    learner, _, config = build(tmp_path, kind)
    scored = make_scored(make_model(make_mesh()), config)  # a model of its own: the learner freezes parts of the other
    before, arrays = flat_params(learner), dict(nnx.to_flat_state(learner.params()))
    arrays = {path: leaf[...] for path, leaf in arrays.items()}
    for _ in range(3):
        learner.update(scored)
    after = flat_params(learner)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value == after[name]).all() == (not is_trained(name, kind)), name
    for path, leaf in nnx.to_flat_state(learner.params()):  # not even copied
        assert (leaf[...] is arrays[path]) == (not is_trained(".".join(map(str, path)), kind))
    assert frozen_leaves(learner.params()) == {name for name in before if not is_trained(name, kind)}


@pytest.mark.slow  # two learners are compiled
@pytest.mark.parametrize("kind", ["lora", pytest.param("layers", marks=pytest.mark.slow)])
def test_layers_that_are_computed_again_take_the_same_step(tmp_path: Path, kind: str) -> None:
    """Of a model whose other parameters are frozen; the planner lowers it the same way."""
    norms = []
    for remat in (False, True):
        learner, _, config = build(tmp_path / str(remat), kind, remat=remat)
        result = learner.update(make_scored(make_model(make_mesh()), config))
        norms.append(result.metrics["update/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.0


@pytest.mark.parametrize(
    ("kind", "micro"),
    [pytest.param("lora", None, marks=pytest.mark.slow), ("lora", 2), ("layers", None), ("all", None)],
)
def test_optimizer_memory_is_that_of_what_is_trained(tmp_path: Path, kind: str, micro: int | None) -> None:
    """Two moments; else scalars. Gradients are not kept between steps."""
    learner, *_ = build(tmp_path, kind, algorithm={"micro_batch_prompts": micro})
    leaves = jax.tree.leaves(learner._updater.state)
    trained = sum(value.size for name, value in flat_params(learner).items() if is_trained(name, kind))
    if kind == "lora":
        assert trained == RANK * 2 * sum(ADAPTER_SIZES.values())
    assert sum(leaf.size for leaf in leaves if leaf.ndim) == trained * 2
    assert sum(leaf.size for leaf in leaves if not leaf.ndim) < 10


@pytest.mark.full
def test_adapters_are_stepped_in_float32_beside_a_base_in_bfloat16(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"model": {**KINDS["lora"], "dtype": "bfloat16"}})
    mesh = make_mesh()
    model = apply_lora(make_model(mesh), MODULES, LORA, seed=0)
    learner = make_learner(config, mesh, model=model)
    assert {value.dtype for value in flat_params(learner).values()} == {jnp.dtype(jnp.bfloat16)}
    updater, adapters = learner._updater, learner.adapters()
    assert adapters.keys() == updater.state.kept.keys() == {name for name in flat_params(learner) if "_lora_" in name}
    assert {value.dtype for value in adapters.values()} == {np.dtype(np.float32)}
    assert {value.dtype.name for value in updater.state.kept.values()} == {"float32"}


@pytest.mark.full
def test_the_reference_of_adapters_is_the_base_in_the_same_arrays(tmp_path: Path) -> None:
    learner, base, config = build(tmp_path, "lora", algorithm={"beta": 0.1})
    result = learner.update(make_scored(base, config, 1))  # pyrefly: ignore[bad-argument-type]
    assert result.metrics["update/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is still the base
    assert learner.update(make_scored(base, config, 2)).metrics["update/kl"] > 1e-6  # pyrefly: ignore[bad-argument-type]
    held = dict(nnx.to_flat_state(learner.params()))
    reference: Any = learner._parts.reference
    reference = nnx.to_flat_state(nnx.state(reference.model, nnx.Param))
    assert len(reference) == len(held) - 2 * len(MODULES)
    assert all(held[path][...] is leaf[...] for path, leaf in reference)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", pytest.param("layers", marks=pytest.mark.slow)])
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole, _, config = build(tmp_path / "whole", kind)
    base = make_model(make_mesh())
    update(whole, config, base, 1, 2)
    first, _, config = build(tmp_path / "parts", kind)
    update(first, config, base, 1)
    first.save(1)
    first.close()
    second, *_ = build(tmp_path / "parts", kind)
    assert second.restored_step == 1
    update(second, config, base, 2)
    assert second.params_digest() == whole.params_digest()
    if kind == "lora":
        saved = sum(path.stat().st_size for path in (tmp_path / "parts/checkpoints/1/model_params").rglob("*"))
        assert saved < sum(value.nbytes for value in flat_params(second).values()) / 2
    whole.close()
    second.close()


@pytest.mark.full
def test_adapters_are_not_continued_on_another_base(tmp_path: Path) -> None:
    learner, *_ = build(tmp_path, "lora")
    learner.save(1)
    learner.close()
    with pytest.raises(CheckpointError, match="are not what was saved, the first model.embedder.input_embedding"):
        build(tmp_path, "lora", seed=1)


@pytest.mark.slow
def test_the_mesh_does_not_change_the_step(tmp_path: Path) -> None:
    held = []
    for fsdp, tp in ((2, 1), (2, 2)):
        learner, base, config = build(tmp_path / f"{tp}", "lora", mesh=make_mesh(fsdp, tp))
        learner.update(make_scored(base, config))  # pyrefly: ignore[bad-argument-type]
        assert learner.adapters().keys() == {name for name in flat_params(learner) if "_lora_" in name}
        held.append(learner.adapters())
    for name, value in held[0].items():
        np.testing.assert_allclose(value, held[1][name], atol=2e-5)


# --- a reference that is made anew ------------------------------------------------------------------------------------


def values(model: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in by_name(nnx.state(model, nnx.Param)).items()}


@pytest.mark.full
def test_only_what_is_trained_is_copied() -> None:
    policy = make_model(make_mesh(1))
    trained = {name for name in values(policy) if name.startswith("layers.1.")}
    reference = own_copy(policy, trained)
    before = values(reference)
    moved = nnx.state(policy, nnx.Param)
    nnx.update(
        policy, nnx.from_flat_state([(p, leaf.replace(leaf[...] + 1.0)) for p, leaf in nnx.to_flat_state(moved)])
    )
    copy_values(reference, policy, trained)
    for name, value in values(reference).items():
        np.testing.assert_array_equal(value, before[name] + (1.0 if name in trained else 0.0))
    held, own = by_name(nnx.state(policy, nnx.Param)), by_name(nnx.state(reference, nnx.Param))
    assert not any(held[name] is own[name] for name in own)


@pytest.mark.slow  # a learner with adapters is compiled
def test_with_adapters_the_reference_gets_adapters_of_its_own(tmp_path: Path) -> None:
    algorithm = {"beta": 0.1, "reference_reset_every": 1}
    config = make_config(tmp_path, {"model": {"lora": LORA.model_dump()}, "algorithm": algorithm})
    mesh, base = make_mesh(), make_model(make_mesh())
    policy = apply_lora(base, MODULES, LORA, seed=0)
    learner = make_learner(config, mesh, model=policy, reference=base)
    reference = learner._parts.reference
    assert reference is not None
    for step in (1, 2):
        metrics = learner.update(make_scored(base, config, step)).metrics
        assert metrics["update/kl"] == pytest.approx(0.0, abs=1e-6)  # after step 1 it was made anew
        adapters = by_name(nnx.state(reference.model, nnx.LoRAParam))
        for name, leaf in learner._updater.trained.items():
            np.testing.assert_array_equal(np.asarray(adapters[name]), np.asarray(leaf))
            assert adapters[name] is not leaf
    learner.save(2)
    learner.close()
    assert {path.name for path in (config.run_dir / "checkpoints" / "2").iterdir()} > {"reference_params"}
