"""The weight sync of an abstract run is that of the run, without its arrays."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models.random_checkpoint import edit_config, write_random
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import freeze_untrained, parameters
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.run.abstract import AbstractRun, open_abstract_checkpoint
from tpu_grpo.run.engines import build_weight_sync
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.policies import with_adapters


def run_of(directory: Path, **settings: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"path": str(directory), **settings.pop("model", {})},
            "data": {"prompts_per_step": 4, "max_prompt_tokens": 8},
            "rollout": {"max_new_tokens": 8, "max_running_requests": 8, **settings.pop("rollout", {})},
            **settings,
        }
    )


def abstract_run_of(config: RunConfig) -> AbstractRun:
    with open_abstract_checkpoint(config.model) as checkpoint:
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
        return AbstractRun(config, checkpoint, meshes, [2])


def policy_of(config: RunConfig, abstract: AbstractRun) -> nnx.Module:
    """The model as a run has it, with values."""
    checkpoint = read_checkpoint(Path(config.model.path))
    base = load_model(checkpoint, abstract.meshes.trainer, dtype=jnp.float32, remat="none")
    model = with_adapters(base, checkpoint, config.model, config.run.seed)
    freeze_untrained(model, config.model)
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"meshes": {"trainer": {"tp": 2}, "sampler": {"tensor": 2}}},
        {"meshes": {"layout": "split"}, "model": {"lora": {"rank": 2, "layers": "1"}}},
        pytest.param({"model": {"train_layers": "1"}}, marks=pytest.mark.slow),
    ],
    ids=["shared", "split with adapters", "layers"],
)
def test_the_sync_of_an_abstract_run_is_the_runs(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = run_of(write_random("qwen3", tmp_path / "model"), **settings)
    abstract = abstract_run_of(config)
    devices, tensor = abstract.meshes.sampler_devices, abstract.meshes.tensor
    replicas = Replicas.build(Path(config.model.path), devices, tensor, abstract.options, Hosts())
    params, rules = parameters(policy_of(config, abstract)), abstract.checkpoint.weight_rules
    real = build_weight_sync(config.meshes, config.model.lora.alpha, rules, params, replicas.weight_specs)
    assert abstract.sync.describe() == real.describe()
    assert abstract.moves == abstract.sync.moves == real.moves
    assert abstract.shared_leaves == real.shared_leaves
    assert abstract.sync.temporary_bytes == real.temporary_bytes > 0


def test_an_abstract_run_holds_no_arrays(tmp_path: Path) -> None:
    """The model has 3 GiB of parameters and 8 GiB of cache."""
    write_random("llama", tmp_path / "model", layers=1, tied=False)
    edit_config(tmp_path / "model", hidden_size=4096, intermediate_size=4096, vocab_size=65536, num_hidden_layers=6)
    before = {id(array) for array in jax.live_arrays()}
    abstract = abstract_run_of(run_of(tmp_path / "model", rollout={"kv_tokens": 2**23}))
    moved = sum(spec.shape[0] * spec.shape[-1] * 4 for spec in abstract.weight_specs.values() if len(spec.shape) == 2)
    assert moved > 3 * 2**30
    assert abstract.engine.options.cache_tokens == 2**23
    assert parameters(abstract.policy)
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) < 2**20
