"""Tunix's GRPO learner with our algorithms and loss, taking the engine's log-probabilities as the old policy.

Tunix's own learner takes the ratio against itself (one iteration) or against a second forward pass of the trainer, and
neither is what the engine sampled with. Here, per token, with old = ``algorithm.old_policy``:

    rollout   ratio = exp(trainer now - engine)
    trainer   ratio = exp(trainer now - trainer before the update), and the token's loss is multiplied by
              min(exp(trainer before the update - engine), importance_cap): truncated importance sampling
              (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training")
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner

from tpu_grpo.algorithms import Algorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.loss import LOSS_NAME
from tpu_grpo.learner.rows import RowShape, TrainRows, group_advantages, train_rows
from tpu_grpo.types import Completion

Role = rl_cluster_lib.Role


@struct.dataclass(frozen=True)
class TrainExample(grpo_learner.TrainExample):
    """Adds to Tunix's example of B rows the log-probabilities that the engine sampled with, and its routing."""

    rollout_per_token_logps: jax.Array | None = None
    """float32 [B, T]; always set."""
    experts: jax.Array | None = None
    """What is replayed of the engine's routing, if anything; see routing.py."""


@dataclasses.dataclass(kw_only=True)
class GrpoAlgorithmConfig(grpo_learner.GRPOConfig):
    """Adds our settings to Tunix's for GRPO; this is what the loss gets."""

    algorithm: Algorithm
    policy_loss_fn: str = LOSS_NAME
    epsilon_high: float = 0.2
    old_policy: str = "rollout"
    importance_cap: float = 2.0

    @classmethod
    def from_section(cls, section: AlgorithmSection) -> "GrpoAlgorithmConfig":
        """Open the algorithm, and translate our names to Tunix's.

        Raises:
            ConfigError: for an algorithm that cannot be trained with.
        """
        algorithm = open_algorithm(section)
        return cls(
            algorithm=algorithm,
            advantage_estimator=section.advantage or section.name,
            loss_agg_mode=algorithm.aggregation,
            num_generations=section.group_size,
            num_iterations=section.iterations,
            beta=section.beta,
            kl_loss_mode=section.kl_estimator,
            epsilon=section.clip_low,
            epsilon_high=section.upper_clip,
            old_policy=section.old_policy,
            importance_cap=section.importance_cap,
        )


class EngineGrpoLearner(grpo_learner.GRPOLearner[GrpoAlgorithmConfig]):
    """Is a ``GRPOLearner`` that builds its examples from rows with the engine's log-probabilities.

    It never samples on a second thread: with two threads launching programs, hosts would launch them in different
    orders.
    """

    algo_config: GrpoAlgorithmConfig

    def __init__(self, rl_cluster: rl_cluster_lib.RLCluster, algo_config: GrpoAlgorithmConfig, reward_fns: Any):
        super().__init__(rl_cluster=rl_cluster, algo_config=algo_config, reward_fns=reward_fns)
        self.can_enable_async_rollout = False
        mesh, axes = rl_cluster.r2m[Role.ACTOR], rl_cluster.cluster_config.training_config.data_sharding_axis
        self._sharding = NamedSharding(mesh, PartitionSpec(*axes))

    def abstract_example(self, rows: TrainRows) -> TrainExample:
        """Give the shapes, types and shardings of ``train_example`` without computing or placing anything."""

        def abstract(value: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._sharding)

        logps, settings = abstract(rows.rollout_logps), self.algo_config
        weights = logps if settings.old_policy == "trainer" else None
        example = self._example(rows, abstract, logps if settings.beta > 0.0 else None, logps, weights, logps)
        return dataclasses.replace(example, experts=None if rows.experts is None else abstract(rows.experts))

    def train_example(self, rows: TrainRows) -> TrainExample:
        """Put rows on the trainer's devices, with what the loss needs of the reference and of the old policy.

        Every host passes all the rows and keeps its shards, so Tunix's own sharding of inputs, which would take each
        host's rows for distinct ones, finds nothing left to do. Returns when the arrays are ready: XLA's CPU backend
        aborts when the forward passes of many micro-batches are under way at once.
        """
        prompt_ids, completion_ids = self._put(rows.prompt_ids), self._put(rows.completion_ids)
        rollout_logps = self._put(rows.rollout_logps)
        reference_logps = self._reference_logps(prompt_ids, completion_ids)
        old_logps, weights = rollout_logps, None
        experts = None if rows.experts is None else self._put(rows.experts)
        if self.algo_config.old_policy == "trainer":
            old_logps = self._policy_logps(prompt_ids, completion_ids, experts)
            cap = self.algo_config.importance_cap
            weights = self._resharded(truncated_weights(old_logps, rollout_logps, cap=cap))
        example = self._example(rows, self._put, reference_logps, old_logps, weights, rollout_logps)
        return jax.block_until_ready(dataclasses.replace(example, experts=experts))

    @staticmethod
    def _example(
        rows: TrainRows, put: Callable[[np.ndarray], Any], reference: Any, old: Any, weights: Any, rollout: Any
    ) -> TrainExample:
        fields: dict[str, Any] = {  # a type checker does not see what Tunix's class inherits
            "prompt_ids": put(rows.prompt_ids),
            "prompt_mask": put(rows.prompt_mask),
            "completion_ids": put(rows.completion_ids),
            "completion_mask": put(rows.completion_mask),
            "advantages": put(rows.advantages),
            "ref_per_token_logps": reference,
            "old_per_token_logps": old,
            "sampler_is_weights": weights,
            "rollout_per_token_logps": rollout,
        }
        return TrainExample(**fields)

    def policy_logprobs(self, rows: TrainRows) -> Float[Array, "B T"]:
        """Compute the policy's log-probability of every completion token, at the temperature."""
        experts = None if rows.experts is None else self._put(rows.experts)
        return self._policy_logps(self._put(rows.prompt_ids), self._put(rows.completion_ids), experts)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: rl_cluster_lib.Mode = rl_cluster_lib.Mode.TRAIN
    ) -> TrainExample:
        # Only Tunix's own train() comes here; the pipeline samples and scores before the learner sees a row.
        columns = {name: values for name, values in training_input.items() if name != "prompts"}
        prompts = [str(prompt) for prompt in training_input["prompts"]]
        output = self.rl_cluster.generate(prompts=prompts, mode=mode)
        assert output.logprobs is not None  # the adapter always returns them
        rewards = self._compute_rewards(prompts=prompts, completions=output.text, mode=mode, **columns)
        advantages = group_advantages(
            rewards, group_size=self.algo_config.num_generations, algorithm=self.algo_config.algorithm
        )
        pad_id, settings = self.rl_cluster.rollout.pad_id(), self.rl_cluster.get_rollout_config(mode)
        completions = [
            Completion(ids, logprobs, "stop", cached_tokens=0)
            for ids, logprobs in zip(output.tokens, output.logprobs, strict=True)
        ]
        unpadded = [row[row != pad_id].tolist() for row in np.asarray(output.left_padded_prompt_tokens)]
        shape = RowShape(settings.max_prompt_length, settings.max_tokens_to_generate, pad_id)
        return self.train_example(train_rows(unpadded, completions, advantages, shape))

    def _policy_logps(
        self, prompt_ids: jax.Array, completion_ids: jax.Array, experts: jax.Array | None
    ) -> Float[Array, "B T"]:
        if experts is None:
            return self._resharded(self.rl_cluster.get_old_per_token_logps(prompt_ids, completion_ids))
        rollout: Any = self.rl_cluster.rollout
        with self.rl_cluster.r2m[Role.ROLLOUT]:  # as Tunix does, whose own function passes no experts
            return self._resharded(rollout.get_per_token_logps(prompt_ids, completion_ids, experts))

    def _reference_logps(self, prompt_ids: jax.Array, completion_ids: jax.Array) -> Float[Array, "B T"] | None:
        if self.algo_config.beta == 0.0:
            return None
        rollout = self.rl_cluster.rollout
        logps = self.rl_cluster.get_ref_per_token_logps(prompt_ids, completion_ids, rollout.pad_id(), rollout.eos_id())
        return self._resharded(logps)

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, self._sharding, lambda index: value[index])

    def _resharded(self, value: jax.Array) -> jax.Array:
        return jax.device_put(value, self._sharding)


@functools.partial(jax.jit, static_argnames="cap")
def truncated_weights(
    trainer_logps: Float[Array, "B T"], engine_logps: Float[Array, "B T"], *, cap: float
) -> Float[Array, "B T"]:
    """Compute min(exp(trainer - engine), cap) of every token."""
    return jnp.minimum(jnp.exp(trainer_logps - engine_logps), cap)
