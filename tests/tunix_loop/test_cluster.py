"""One test per repair that fails when Tunix no longer needs it."""

import functools
import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl import rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl import utils as rl_utils
from tunix.rl.grpo import grpo_learner
from tunix.sft.checkpoint_manager import CheckpointManager

from tests.learner.toy import (
    EOS,
    PAD,
    RecordingEngine,
    Tokenizer,
    counted_compilations,
    make_config,
    make_mesh,
    make_model,
)
from tpu_grpo.errors import ConfigError
from tpu_grpo.learner import repairs
from tpu_grpo.learner.adapter import RolloutAdapter
from tpu_grpo.learner.building import _cluster_config, row_shape
from tpu_grpo.learner.trainer import CollectingTrainer
from tpu_grpo.learner.tunix_learner import EngineGrpoLearner, GrpoAlgorithmConfig


def build(cluster_type: type[rl_cluster.RLCluster], directory: Path, rollout_mesh: Mesh | None = None) -> Any:
    mesh, config = make_mesh(), make_config(directory)
    model = make_model(mesh)
    engine = functools.partial(RolloutAdapter, engine=RecordingEngine(), pad_id=PAD, eos_id=EOS)
    settings = _cluster_config(config, mesh, engine, row_shape(config, model, PAD))
    settings.role_to_mesh[rl_cluster.Role.ROLLOUT] = rollout_mesh or mesh
    return cluster_type(actor=model, tokenizer=Tokenizer(), cluster_config=settings)


def test_another_tunix_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ConfigError, match=r"google-tunix must be 0\.1\.7, got 0\.2\.0"):
        build(repairs.Cluster, tmp_path)


def test_tunix_copies_the_parameters_to_the_host_and_we_do_not(tmp_path: Path) -> None:
    plain = build(rl_cluster.RLCluster, tmp_path)
    assert jax.tree.leaves(plain._anchor_policy_state)[0].sharding.memory_kind == "pinned_host"
    ours = build(repairs.Cluster, tmp_path)
    assert ours._anchor_policy_state is None
    ours.sync_weights()
    assert ours._anchor_policy_state is None


def test_tunix_builds_its_own_trainer_and_ours_is_put_in(tmp_path: Path) -> None:
    assert type(build(rl_cluster.RLCluster, tmp_path).actor_trainer) is rl_trainer.Trainer
    assert type(build(repairs.Cluster, tmp_path).actor_trainer) is CollectingTrainer


def test_tunix_samples_on_a_second_thread_and_we_do_not(tmp_path: Path) -> None:
    other = Mesh(np.array(jax.devices()[2:4]).reshape(2, 1), ("fsdp", "tp"))
    settings = GrpoAlgorithmConfig.from_section(make_config(tmp_path).algorithm)

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [0.0] * len(prompts)

    plain = grpo_learner.GRPOLearner(build(repairs.Cluster, tmp_path, other), settings, reward)
    assert plain.can_enable_async_rollout
    assert not EngineGrpoLearner(build(repairs.Cluster, tmp_path, other), settings, [reward]).can_enable_async_rollout


def test_tunix_compiles_programs_to_save_and_we_do_not(tmp_path: Path) -> None:
    mesh = make_mesh(4)
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    options = ocp.CheckpointManagerOptions()
    counts = []
    for manager in (
        repairs.WholeArrayCheckpointManager(str(tmp_path / "ours"), options),
        CheckpointManager(str(tmp_path / "plain"), options),
    ):
        with counted_compilations() as compiled:
            manager.save(1, model, optimizer, force=True)
            manager.close()
        counts.append(len(compiled))
    assert counts[0] == 0 < counts[1]


def test_nothing_stays_replaced(tmp_path: Path) -> None:
    originals = (rl_trainer.Trainer, rl_utils.put_params_on_memory_kind)
    build(repairs.Cluster, tmp_path)
    assert (rl_trainer.Trainer, rl_utils.put_params_on_memory_kind) == originals
