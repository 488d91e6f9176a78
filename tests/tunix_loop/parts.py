"""Tunix's cluster around a toy model and an engine that remembers what it was asked."""

import functools
from typing import Any

import optax
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.learner.toy import EOS, NEW_TOKENS, PAD, PROMPT_TOKENS, RecordingEngine, Tokenizer, make_mesh, make_model
from tpu_grpo.tunix_loop.adapter import RolloutAdapter

Role = rl_cluster.Role


def make_cluster(
    cluster_type: type[rl_cluster.RLCluster], engine: RecordingEngine | None = None, rollout_mesh: Mesh | None = None
) -> Any:
    mesh = make_mesh()
    rollout: Any = functools.partial(RolloutAdapter, engine=engine or RecordingEngine(), pad_id=PAD, eos_id=EOS)
    settings = rl_cluster.ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout_mesh or mesh},
        rollout_engine=rollout,
        rollout_config=RolloutConfig(
            max_prompt_length=PROMPT_TOKENS, max_tokens_to_generate=NEW_TOKENS, temperature=1.0
        ),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-3), max_steps=2, eval_every_n_steps=2, data_sharding_axis=("fsdp",)
        ),
    )
    return cluster_type(actor=make_model(mesh), tokenizer=Tokenizer(), cluster_config=settings)
