"""Tunix's GRPO learner with the engine's log-probabilities and the metrics of this package's own learner.

    learner = EngineGrpoLearner(cluster, GRPOConfig(...), reward_fns)      # in place of Tunix's GRPOLearner

Advantages, loss, gradient accumulation and steps are Tunix's. ``old_policy`` chooses a ratio's old log-probabilities:

    rollout   the engine's log-probabilities from sampling
    trainer   the trainer's, from a forward pass before the update. The loss of a token is then multiplied by
              min(exp(trainer - engine), importance_cap), which Tunix calls sampler_is_weights.
    tunix     Tunix's choice: with num_iterations=1 these are the current policy's, so that the ratio is 1; otherwise
              they are the trainer's as above, but the loss is not multiplied

The cluster's rollout engine must be a `RolloutAdapter`. Suffixes: B rows, T completion tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec
from tunix.rl import algo_core, common, rl_cluster as rl_cluster_lib, trainer as rl_trainer
from tunix.rl.grpo import grpo_learner

from tpu_grpo.learner.forward import kl_divergence
from tpu_grpo.learner.loss import LossSums, agreement_sums
from tpu_grpo.learner.parameters import Values, by_name, placed, trained_type
from tpu_grpo.learner.update import UpdateState
from tpu_grpo.records.errors import ConfigError, TpuGrpoError


@struct.dataclass(frozen=True)
class TrainExample(grpo_learner.TrainExample):
    """Adds the log-probabilities that the engine sampled with, float32 [B, T], to Tunix's example of B rows."""

    rollout_per_token_logps: Any = None


class EngineGrpoLearner[Config: grpo_learner.GRPOConfig](grpo_learner.GRPOLearner[Config]):
    """Tunix's ``GRPOLearner`` with the old log-probabilities that ``old_policy`` chooses, and metrics of every pass."""

    def __init__(
        self,
        rl_cluster: rl_cluster_lib.RLCluster,
        algo_config: Any,
        reward_fns: Any,
        *,
        old_policy: str = "rollout",
        importance_cap: float = 2.0,
        **settings: Any,
    ):
        super().__init__(rl_cluster, algo_config, reward_fns, **settings)
        self._old_policy, self._cap = old_policy, importance_cap
        if old_policy == "rollout":  # spares the forward pass that num_iterations > 1 would make
            rl_cluster.get_old_per_token_logps = lambda **_: None  # pyrefly: ignore[bad-assignment]
        trainer = rl_cluster.actor_trainer
        passes = trainer.config.gradient_accumulation_steps or 1
        trainer.with_loss_fn(measured_loss(trainer.loss_fn, algo_config.policy_loss_fn, passes), has_aux=True)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: rl_cluster_lib.Mode = rl_cluster_lib.Mode.TRAIN
    ) -> TrainExample:
        found = super()._generate_and_compute_advantage(training_input, mode)
        adapter: Any = self.rl_cluster.rollout
        completions = adapter.take_completions()
        rows, width = found.completion_ids.shape
        mask_BT, engine_BT = np.zeros((rows, width), np.bool_), np.zeros((rows, width), np.float32)
        for row, completion in enumerate(completions):
            count = len(completion.token_ids)
            mask_BT[row, :count] = True if completion.sampled is None else completion.sampled
            engine_BT[row, :count] = np.where(mask_BT[row, :count], completion.logprobs, 0.0)
        old_BT, weights_BT = found.old_per_token_logps, None
        if self._old_policy == "rollout":
            old_BT = engine_BT
        elif self._old_policy == "trainer":
            if old_BT is None:
                old_BT = self.rl_cluster.get_old_per_token_logps(
                    prompt_tokens=found.prompt_ids, completion_tokens=found.completion_ids
                )
            assert old_BT is not None
            weights_BT = np.minimum(np.exp(np.where(mask_BT, old_BT - engine_BT, 0.0)), self._cap, dtype=np.float32)
        fields: dict[str, Any] = {  # a type checker does not see what Tunix's class inherits
            "prompt_ids": np.asarray(found.prompt_ids),
            "prompt_mask": np.asarray(found.prompt_mask),
            "completion_ids": np.asarray(found.completion_ids),
            "completion_mask": mask_BT,  # from lengths: Tunix's own mask lacks a pad token that ends a completion
            "advantages": np.asarray(found.advantages, np.float32),
            "ref_per_token_logps": found.ref_per_token_logps,
            "old_per_token_logps": old_BT,
            "sampler_is_weights": weights_BT,
            "rollout_per_token_logps": engine_BT,
        }
        return TrainExample(**fields)


def measured_loss(loss_fn: Callable[..., Any], name: str, passes: int) -> Callable[..., Any]:
    """Wrap a loss function for Tunix's trainer, so that errors name the loss and each pass is measured.

    Loss and gradient are those of ``loss_fn``. For a loss that is not finite, the gradient is made not finite, too.

    Raises:
        ConfigError: when the loss is traced, if it raises, or does not return a scalar and a dict.
    """

    def loss(model: nnx.Module, train_example: TrainExample, algo_config: Any) -> tuple[jax.Array, dict[str, Any]]:
        with _recorded_passes() as seen:
            try:
                value, aux = loss_fn(model, train_example, algo_config)
            except TpuGrpoError:
                raise
            except Exception as error:  # user code may raise anything
                raise ConfigError(
                    f"Tunix's policy loss {name} raised {type(error).__name__}: {error}; correct algorithm.options, "
                    "take another loss, or repair it if it is your own"
                ) from error
            if jnp.shape(value) != () or not isinstance(aux, dict):
                raise ConfigError(
                    f"Tunix's policy loss {name} must return a scalar and a dict, got the shape {jnp.shape(value)} and "
                    f"a {type(aux).__name__}; repair it"
                )
            if not seen:  # the loss does not call Tunix's function for log-probabilities
                common.compute_per_token_logps(
                    *nnx.split(model),
                    train_example.prompt_ids,
                    train_example.completion_ids,
                    pad_id=NO_TOKEN,
                    eos_id=NO_TOKEN,
                    temperature=algo_config.temperature,
                )
        sums = _sums(seen[0], value / passes, train_example, aux, algo_config)
        value = value * jnp.where(jnp.isfinite(value), 1.0, jnp.nan)
        return value, {"kl": 0.0, "pg_clipfrac": 0.0, **aux, "sums": jax.lax.stop_gradient(sums)}

    return loss


NO_TOKEN = -1
"""Marks padding, because no token has this id; Tunix's models embed it as the vocabulary's last token and mask it."""


class _Pass(NamedTuple):
    logprobs_BT: jax.Array
    logits_BTV: jax.Array


@contextmanager
def _recorded_passes() -> Iterator[list[_Pass]]:
    """Record the results of the forward passes that are traced in the block."""
    original, seen = common.compute_per_token_logps, list[_Pass]()

    def recording(*args: Any, return_logits: bool = False, **kwargs: Any) -> Any:
        seen.append(_Pass(*original(*args, return_logits=True, **kwargs)))
        return tuple(seen[-1]) if return_logits else seen[-1].logprobs_BT

    with mock.patch.object(common, "compute_per_token_logps", recording):
        yield seen


def _sums(found: _Pass, loss: jax.Array, example: TrainExample, aux: dict[str, Any], algo_config: Any) -> LossSums:
    mask_BT, kl = example.completion_mask, jnp.zeros(())
    now_BT = found.logprobs_BT.astype(jnp.float32)
    if example.ref_per_token_logps is not None:
        kl = (kl_divergence(now_BT, example.ref_per_token_logps, algo_config.kl_loss_mode) * mask_BT).sum()
    old = example.old_per_token_logps
    agreement = agreement_sums(now_BT, example.rollout_per_token_logps, mask_BT)
    return LossSums(
        loss=loss,
        kl=kl,
        clipped=jnp.asarray(aux.get("pg_clipfrac", 0.0), jnp.float32) * agreement.tokens,
        entropy=(algo_core.compute_entropy_from_logits(found.logits_BTV) * mask_BT).sum(),
        agreement=agreement,
        ratio_excess=None if old is None else agreement_sums(now_BT, old, mask_BT).excess_sum,
    )


class MeasuringTrainer(rl_trainer.Trainer):
    """Tunix's trainer with an optimizer of `float32_steps` and the interface of an `Updater`.

    The measurements of every pass are kept until `take_passes` is called.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._measured: list[dict[str, Any]] = []
        parameter = jax.tree.leaves(nnx.state(self.model))[0]
        whole = NamedSharding(parameter.sharding.mesh, PartitionSpec())

        def on_mesh(leaf: jax.Array) -> Any:  # counts start on one device, but after a step they would be on the mesh
            if isinstance(leaf.sharding, NamedSharding):
                return leaf
            if isinstance(parameter, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
            return placed(np.asarray(leaf), whole)

        nnx.update(self.optimizer, jax.tree.map(on_mesh, nnx.state(self.optimizer)))
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, self._changing(self.model, self.optimizer))

    def take_passes(self) -> list[dict[str, Any]]:
        """Return the measurements since the last call, in order, and forget them."""
        taken, self._measured = self._measured, []
        return taken

    @property
    def trained(self) -> Values:
        """The trained parameters as the model computes with them, by name."""
        return by_name(nnx.state(self.model, trained_type(self.model)))

    def stepped(self) -> Values:
        """Return the trained parameters in float32, the precision in which the optimizer updates them, by name."""
        return self.trained | self.state.kept

    @property
    def state(self) -> UpdateState:
        """The state that the next update needs beside the model's parameters; checkpoints hold it."""
        return step_state(self.optimizer).updates

    @state.setter
    def state(self, state: UpdateState) -> None:
        held: Any = nnx.pure(self.optimizer.opt_state)
        step = step_state(self.optimizer)._replace(updates=state)
        held = held._replace(inner=step) if hasattr(held, "inner") else step
        nnx.update(self.optimizer.opt_state, nnx.state(held))

    def share(self, names: object) -> None:
        """Do nothing, because Tunix's train step donates no parameters (jax's donation of buffers)."""

    @staticmethod
    def _changing(model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[nnx.State, nnx.State]:
        return nnx.state(model, trained_type(model)), nnx.state(optimizer)

    def _train_step(self, model: nnx.Module, optimizer: nnx.Optimizer, inputs: Any) -> Any:
        loss, aux, norm = super()._train_step(model, optimizer, inputs)
        # sharded as before the step; with other shardings, the next step would be compiled again
        after = jax.lax.with_sharding_constraint(self._changing(model, optimizer), self._layout)
        nnx.update(model, after[0])
        nnx.update(optimizer, after[1])
        return loss, {**aux, "record": step_state(optimizer).record}, norm  # pyrefly: ignore[invalid-argument]

    def _shard_optimizer(self, mesh: jax.sharding.Mesh) -> None:
        """Keep the sharding of the optimizer's state; Tunix would replicate the arrays that are not nnx variables."""

    def _post_process_train_step(self, aux: Any) -> None:
        self._measured.append(aux)
        super()._post_process_train_step(aux)


def step_state(optimizer: nnx.Optimizer) -> Any:
    """Return the `StepState` of Tunix's optimizer, with arrays in place of variables."""
    state: Any = nnx.pure(optimizer.opt_state)
    return getattr(state, "inner", state)
