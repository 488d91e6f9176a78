"""One test per repair that fails when Tunix no longer needs it."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl import utils as rl_utils
from tunix.rl.grpo import grpo_learner

from tests.learner.toy import make_config
from tests.tunix_loop.parts import make_cluster
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.tunix_loop.cluster import Cluster, CollectingTrainer
from tpu_grpo.tunix_loop.learner import EngineGrpoLearner, GrpoAlgorithmConfig


def test_another_tunix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ConfigError, match=r"google-tunix must be 0\.1\.7, got 0\.2\.0"):
        make_cluster(Cluster)


def test_tunix_copies_the_parameters_to_the_host_and_we_do_not() -> None:
    plain = make_cluster(rl_cluster.RLCluster)
    assert jax.tree.leaves(plain._anchor_policy_state)[0].sharding.memory_kind == "pinned_host"
    ours = make_cluster(Cluster)
    assert ours._anchor_policy_state is None
    ours.sync_weights()
    assert ours._anchor_policy_state is None


def test_tunix_builds_its_own_trainer_and_ours_is_put_in() -> None:
    originals = (rl_trainer.Trainer, rl_utils.put_params_on_memory_kind)
    assert type(make_cluster(rl_cluster.RLCluster).actor_trainer) is rl_trainer.Trainer
    assert type(make_cluster(Cluster).actor_trainer) is CollectingTrainer
    assert (rl_trainer.Trainer, rl_utils.put_params_on_memory_kind) == originals  # nothing stays replaced


def test_tunix_samples_on_a_second_thread_and_we_do_not(tmp_path: Path) -> None:
    other = Mesh(np.array(jax.devices()[2:4]).reshape(2, 1), ("fsdp", "tp"))
    settings = GrpoAlgorithmConfig.from_section(make_config(tmp_path).algorithm)

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [0.0] * len(prompts)

    plain = grpo_learner.GRPOLearner(make_cluster(Cluster, rollout_mesh=other), settings, reward)
    assert plain.can_enable_async_rollout
    ours = EngineGrpoLearner(make_cluster(Cluster, rollout_mesh=other), settings, [reward])
    assert not ours.can_enable_async_rollout
