"""Tunix's learner of a run around a toy model, and Tunix's cluster around an engine that remembers its calls."""

from typing import Any

import optax
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.learner.toy import EOS, NEW_TOKENS, PAD, PROMPT_TOKENS, RecordingEngine, Tokenizer, make_mesh, make_model
from tpu_grpo.config import RunConfig
from tpu_grpo.learner import LearnerInputs
from tpu_grpo.tunix_loop.adapter import rollout_engine
from tpu_grpo.tunix_loop.tunix_learner import TunixLearner

Role = rl_cluster.Role


def make_tunix(config: RunConfig, mesh: Mesh | None = None, **replaced: Any) -> TunixLearner:
    mesh = mesh or make_mesh()
    arguments: dict[str, Any] = {"model": make_model(mesh), "reference": make_model(mesh, 100), "mesh": mesh}
    return TunixLearner(config, LearnerInputs(**{**arguments, **replaced}))


def make_cluster(engine: RecordingEngine | None = None, rollout_mesh: Mesh | None = None, **training: Any) -> Any:
    mesh = make_mesh()
    settings = rl_cluster.ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout_mesh or mesh},
        rollout_engine=rollout_engine(engine or RecordingEngine(), pad_id=PAD, eos_id=EOS),
        rollout_config=RolloutConfig(
            max_prompt_length=PROMPT_TOKENS, max_tokens_to_generate=NEW_TOKENS, temperature=1.0
        ),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-3), max_steps=2, eval_every_n_steps=2, **training
        ),
    )
    return rl_cluster.RLCluster(actor=make_model(mesh), tokenizer=Tokenizer(), cluster_config=settings)
