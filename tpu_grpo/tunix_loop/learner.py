"""Tunix's GRPO learner with our algorithms and loss, taking the engine's log-probabilities as the old policy.

Tunix's own learner takes the ratio against itself (one iteration) or against a second forward pass of the trainer, and
neither is what the engine sampled with. learner/batches.py says what ``algorithm.old_policy`` takes it against.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from tunix.rl import function_registry
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner

from tpu_grpo.algorithms import RunAlgorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.batches import truncated_weights
from tpu_grpo.learner.loss import LossSettings, TrainBatch, policy_loss
from tpu_grpo.learner.signal import group_advantages
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Completion
from tpu_grpo.tunix_loop.padded import PaddedRows, PaddedShape, after_prompts, model_rows, padded_rows

Role = rl_cluster_lib.Role
LOSS_NAME = "tpu_grpo"
"""The name of `registered_loss` in Tunix's registry."""


@struct.dataclass(frozen=True)
class TrainExample(grpo_learner.TrainExample):
    """Adds what our loss takes to Tunix's example of B rows; both are always set."""

    rollout_per_token_logps: jax.Array | None = None
    """The log-probabilities that the engine sampled with, float32 [B, T]."""
    token_weights: jax.Array | None = None
    """How much each token counts in the loss of these rows, float32 [B, T]."""


@dataclasses.dataclass(kw_only=True)
class GrpoAlgorithmConfig(grpo_learner.GRPOConfig):
    """Adds our settings to Tunix's for GRPO; this is what the loss gets."""

    algorithm: RunAlgorithm
    policy_loss_fn: str = LOSS_NAME
    epsilon_high: float = 0.2
    old_policy: str = "rollout"
    importance_cap: float = 2.0
    kl_unbiased: bool = False
    entropy_bonus: float = 0.0
    trainer_mesh: Mesh | None = None
    """Set by `EngineGrpoLearner`."""

    @classmethod
    def from_section(cls, section: AlgorithmSection) -> "GrpoAlgorithmConfig":
        """Open the algorithm, and translate our names to Tunix's.

        Raises:
            ConfigError: for an algorithm that cannot be trained with, or not in Tunix's loop.
        """
        algorithm = open_algorithm(section)
        if algorithm.asked:
            raise ConfigError(
                f"algorithm.advantage={section.advantage or section.name} needs {', '.join(algorithm.asked)}, which "
                "Tunix's own loop does not have; train with the pipeline, or take other advantages, like grpo"
            )
        _check_all_count(section)
        for name, value, plain in (
            ("kl_in", section.kl_in, "loss"),
            ("entropy_target", section.entropy_target, None),
            ("filtered_ratio", section.filtered_ratio, False),
            ("reference_reset_every", section.reference_reset_every, None),
        ):
            if value != plain:
                raise ConfigError(
                    f"algorithm.{name}={value} needs the pipeline, which does it around the update; Tunix's own loop "
                    "does not: train with the pipeline, or leave it out"
                )
        return cls(
            algorithm=algorithm,
            advantage_estimator=section.advantage or section.name,
            loss_agg_mode=algorithm.aggregation,
            num_generations=section.group_size,
            num_iterations=section.iterations,
            beta=section.beta,
            kl_loss_mode=section.kl_estimate,
            epsilon=section.lower_clip,
            epsilon_high=section.upper_clip,
            old_policy=section.old_policy,
            importance_cap=section.upper_importance,
            kl_unbiased=section.kl_unbiased,
            entropy_bonus=section.entropy_bonus,
        )


def _check_all_count(section: AlgorithmSection) -> None:
    """Refuse mini-batches of ours, and to leave out groups or completions: this loop sees one micro-batch at a time."""
    if (size := section.mini_batch_prompts) is not None:
        raise ConfigError(
            f"algorithm.mini_batch_prompts={size} is for the pipeline's learner; Tunix's own loop updates once for "
            "every mini_batch_size of its RLTrainingConfig: leave it out, and set that"
        )
    refused = (("drop_uninformative", True), ("truncated", "mask"), ("loss_aggregation", "prompt-mean-token-mean"))
    for name, value in refused:
        if getattr(section, name) == value:
            raise ConfigError(
                f"algorithm.{name}={str(value).lower()} needs a whole step at once, which Tunix's own loop does not "
                "have; train with the pipeline, or leave it out"
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
        algo_config.trainer_mesh = mesh

    def train_example(self, rows: PaddedRows) -> TrainExample:
        """Put rows on the trainer's devices, with what the loss needs of the reference and of the old policy.

        Every host passes all the rows and keeps its shards, so Tunix's own sharding of inputs, which would take each
        host's rows for distinct ones, finds nothing left to do. Returns when the arrays are ready: XLA's CPU backend
        aborts when the forward passes of many micro-batches are under way at once.
        """
        prompt_ids, completion_ids = self._put(rows.prompt_ids), self._put(rows.completion_ids)
        rollout_logps = self._put(rows.rollout_logps)
        reference_logps = self._reference_logps(prompt_ids, completion_ids)
        old_logps, weights = rollout_logps, None
        if self.algo_config.old_policy == "trainer":
            old_logps = self._resharded(self.rl_cluster.get_old_per_token_logps(prompt_ids, completion_ids))
            correction, cap = self.algo_config.algorithm.correction, self.algo_config.importance_cap
            if correction is None or correction.ratio is None:
                weights = self._resharded(truncated_weights(old_logps, rollout_logps, cap=cap))
        fields: dict[str, Any] = {  # a type checker does not see what Tunix's class inherits
            "prompt_ids": prompt_ids,
            "prompt_mask": self._put(rows.prompt_mask),
            "completion_ids": completion_ids,
            "completion_mask": self._put(rows.completion_mask),
            "advantages": self._put(rows.advantages),
            "ref_per_token_logps": reference_logps,
            "old_per_token_logps": old_logps,
            "sampler_is_weights": weights,
            "rollout_per_token_logps": rollout_logps,
            "token_weights": self._put(rows.weights),
        }
        return jax.block_until_ready(TrainExample(**fields))

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
        shape = PaddedShape(settings.max_prompt_length, settings.max_tokens_to_generate, pad_id)
        aggregation = self.algo_config.algorithm.aggregation
        return self.train_example(padded_rows(unpadded, completions, advantages, shape, aggregation))

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


@function_registry.register_policy_loss_fn(LOSS_NAME)
def registered_loss(
    model: nnx.Module, train_example: Any, algo_config: Any, pad_id: int, eos_id: int
) -> tuple[jax.Array, dict[str, Any]]:
    """Compute `policy_loss` of one `TrainExample` under a `GrpoAlgorithmConfig`, called by Tunix's trainer.

    Returns:
        The loss, a float32 scalar, and what is measured beside it: "kl" to the reference, "pg_clipfrac" and "entropy"
        as means over tokens, and "agreement", the `AgreementSums`.
    """
    prompt_tokens, mask = train_example.prompt_ids.shape[1], train_example.completion_mask

    def whole(values_BT: Any) -> Any:
        return None if values_BT is None else after_prompts(values_BT, prompt_tokens)

    batch = TrainBatch(
        rows=model_rows(train_example.prompt_ids, train_example.completion_ids, mask, pad_id),
        weights=whole(train_example.token_weights),
        advantages=whole(train_example.advantages[:, None] * mask),
        rollout_logps=whole(train_example.rollout_per_token_logps),
        old_logps=whole(train_example.old_per_token_logps),
        importance=whole(train_example.sampler_is_weights),
        reference_logps=whole(train_example.ref_per_token_logps),
    )
    settings = LossSettings(
        algo_config.algorithm,
        algo_config.beta,
        algo_config.kl_loss_mode,
        algo_config.temperature,
        algo_config.trainer_mesh,
        algo_config.kl_unbiased,
        algo_config.entropy_bonus,
    )
    loss, sums = policy_loss(model, batch, settings)
    tokens = sums.agreement.tokens
    return loss, {
        "kl": sums.kl / tokens,
        "pg_clipfrac": sums.clipped / tokens,
        "entropy": sums.entropy / tokens,
        "agreement": sums.agreement,
    }
