"""The learner of ``algorithm.name=tunix:NAME``: Tunix's ``RLCluster`` and ``GRPOLearner`` inside a run.

The run samples and scores; Tunix's learner gets the results in place of its own engine and reward function:

    scored rollout -> _Feed -> GRPOLearner._run_global_step: advantages, micro-batches, Tunix's train steps

Parameters, checkpoints, digests, the probe and the metrics are those of `Learner`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.rl import common, function_registry, trainer as rl_trainer
from tunix.rl.grpo import dapo_learner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from tpu_grpo.config import OptimizerSection, RunConfig
from tpu_grpo.learner.batches import DATA_AXIS, Batches
from tpu_grpo.learner.building import LearnerInputs, row_shape
from tpu_grpo.learner.learner import Learner
from tpu_grpo.learner.loss import LossSettings
from tpu_grpo.learner.optimizers import build_optimizer, learning_rate_schedule, state_shardings
from tpu_grpo.learner.parameters import Values, by_name, cast_to_compute, freeze_untrained, trained_type
from tpu_grpo.learner.rows import RowShape, check_sequences
from tpu_grpo.learner.signal import Signal
from tpu_grpo.learner.slices import ONE_SLICE, Slices
from tpu_grpo.learner.teachers import NO_TEACHERS, TeacherReadings, Teachers
from tpu_grpo.learner.update import MeasuredUpdate, UpdateRecord, UpdateState
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion, ScoredRollout
from tpu_grpo.tunix_loop.adapter import SampledTexts, rollout_engine
from tpu_grpo.tunix_loop.engine_grpo import NO_TOKEN, EngineGrpoLearner, MeasuringTrainer, TrainExample
from tpu_grpo.tunix_loop.tunix_options import of_scored, open_tunix


class TunixLearner(Learner):
    """A `Learner` whose updates are Tunix's. Raises ConfigError for what `open_tunix` refuses, and for a policy loss
    that raises or does not return a scalar and a dict."""

    _parts: "TunixParts"  # has the attributes of `LearnerParts` that `Learner` uses

    @staticmethod
    def build(config: RunConfig, inputs: LearnerInputs) -> Any:
        """Build Tunix's cluster and learner (abstract if the model is), and trace the policy loss. Raises the error of
        `open_tunix`."""
        section, model, mesh = config.algorithm, inputs.model, inputs.mesh
        algorithm = inputs.algorithm or open_tunix(section, config.data, config.optimizer)
        settings = LossSettings(algorithm, section, config.rollout.temperature, mesh)
        options: Any = algorithm.objective
        freeze_untrained(model, config.model)
        stepped, reference = cast_to_compute(model, config.model), None
        if options.beta:
            assert inputs.reference is not None
            reference = nnx.clone(inputs.reference)  # with variables of its own; no update writes to the arrays
            cast_to_compute(reference, config.model)
        dtypes = {name: leaf.dtype for name, leaf in by_name(nnx.state(model, trained_type(model))).items()}
        shape = row_shape(config, model, mesh)
        new, feed = shape.max_new_tokens, _Feed(shape)
        mini, micro = config.mini_batch_prompts, config.micro_batch_prompts
        training = RLTrainingConfig(
            actor_optimizer=float32_steps(config.optimizer, config.updates, stepped, dtypes),
            eval_every_n_steps=1,
            data_sharding_axis=(DATA_AXIS,),
            mini_batch_size=mini,
            train_micro_batch_size=micro if micro != mini else None,
            rollout_micro_batch_size=mini,
            compute_logps_micro_batch_size=micro,
        )
        cluster_config = ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=rollout_engine(feed, pad_id=NO_TOKEN, eos_id=NO_TOKEN),
            rollout_config=RolloutConfig(
                max_prompt_length=shape.tokens - new,
                max_tokens_to_generate=new,
                temperature=config.rollout.temperature,
            ),
            training_config=training,
        )
        loaded = mock.patch.object(RLCluster, "_load_model", lambda self, model, *_: model)  # the model is on the mesh
        with mock.patch.object(rl_trainer, "Trainer", MeasuringTrainer), loaded:
            cluster = RLCluster(actor=model, reference=reference, tokenizer=mock.Mock(), cluster_config=cluster_config)
        cluster._anchor_policy_state = None  # for agentic learners; it would keep the first parameters in memory
        rewards: list[Any] = [feed.rewards]
        if (getattr(options, "overlong_buffer", None) or {}).get("enable"):
            rewards.append(dapo_learner.reward_shaping)
        learner = EngineGrpoLearner(
            cluster, options, rewards, old_policy=section.old_policy, importance_cap=section.upper_importance
        )
        batches, trainer = Batches(model, None, settings), cluster.actor_trainer
        assert isinstance(trainer, MeasuringTrainer)
        parts = TunixParts(config, settings, shape, batches, feed, learner, trainer, reference)
        parts.try_loss()
        return parts

    def _made_updates(self, signal: Signal, scored: ScoredRollout, taught: TeacherReadings) -> Iterator[MeasuredUpdate]:
        """Let Tunix's learner make all updates of a rollout, and then yield the measurements of each update."""
        config, parts, prompts = self._config, self._parts, scored.rollout.batch.prompts
        parts.feed.start(signal, scored)
        mini, micro = config.mini_batch_prompts, config.micro_batch_prompts
        texts = np.array([prompt.text for prompt in prompts])
        batches: Any = iter([{"prompts": texts[at : at + micro]} for at in range(0, len(texts), micro)])
        found, name = function_registry.get_advantage_estimator, "get_advantage_estimator"
        with mock.patch.object(function_registry, name, lambda chosen: partial(parts.feed.estimate, found(chosen))):
            parts.learner._run_global_step(len(texts), mini, mini, mini // micro, batches, None, False)
        parts.learner.rl_cluster.global_steps += 1
        passes = jax.device_get(parts.updater.take_passes())
        for at in range(0, len(passes), mini // micro):
            of_update = passes[at : at + mini // micro]
            yield MeasuredUpdate([each["sums"] for each in of_update], of_update[-1]["record"], {})


class _Feed:
    """Stands in for the engine and reward function of Tunix's learner: returns what the run sampled and scored."""

    def __init__(self, shape: RowShape):
        self._shape = shape
        self._rows: Iterator[tuple[Sequence[int], Completion, str, float]] = iter(())
        self._totals: tuple[float, ...] = ()

    def start(self, signal: Signal, scored: ScoredRollout) -> None:
        """Set the rollout whose rows ``generate_texts`` and ``rewards`` return.

        In a completion that does not count, all tokens are marked as not sampled.

        Raises:
            DataError, NonFiniteError: for rows that cannot be learnt from.
        """
        shape, prompts, completions = self._shape, list(signal.prompts), list(signal.completions)
        check_sequences(prompts, completions, shape.max_prompt_tokens, shape.max_new_tokens)
        for row, completion in enumerate(completions):
            branches = [] if completion.episode is None else completion.episode.branches
            if len(branches) > 1:
                raise DataError(
                    f"Tunix's learner takes a conversation as one sequence, got {len(branches)} in row {row}, because "
                    "the chat template changes earlier turns; take another algorithm.name, or another template"
                )
            if branches:
                prompts[row] = branches[0].prompt
            if not signal.counted_B[row]:
                completions[row] = replace(completion, sampled=np.zeros(len(completion.token_ids), np.bool_))
        self._rows = zip(prompts, completions, scored.rollout.texts, scored.scores.total.tolist(), strict=True)

    def generate_texts(self, prompts: Sequence[str], config: RolloutConfig) -> SampledTexts:
        """Return the completions of the next rows, as many as there are prompts."""
        ids, completions, texts, self._totals = zip(*itertools.islice(self._rows, len(prompts)), strict=True)
        return SampledTexts(ids, completions, texts)

    def rewards(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        """Return the total rewards of the rows that the last call of ``generate_texts`` returned."""
        return list(self._totals)

    def estimate(self, function: Callable[..., Any], rewards: Any, num_generations: int) -> Any:
        """Call an estimator; rows are unscored whose total was NaN, which Tunix's reward manager makes 0."""
        rewards = np.where(np.isnan(self._totals), np.nan, rewards)
        return of_scored(function)(rewards=rewards, num_generations=num_generations)

    def install(self, params: nnx.State) -> None:
        """Do nothing: the run moves parameters itself."""


@dataclass(frozen=True)
class TunixParts:
    """The parts of Tunix's learner that `Learner` uses, and methods that lower its programs for a plan."""

    config: RunConfig
    settings: LossSettings
    """The algorithm, and how the probe's log-probabilities are computed."""
    shape: RowShape
    batches: Batches
    feed: _Feed
    learner: EngineGrpoLearner[Any]
    updater: MeasuringTrainer
    reference: nnx.Module | None
    saved_frozen: Mapping[str, nnx.Module] = MappingProxyType({})
    teachers: Teachers = NO_TEACHERS
    slices: Slices = ONE_SLICE

    @property
    def held(self) -> Any:
        """The optimizer's state, which stays on the devices between steps and includes sums of gradients."""
        return nnx.state(self.updater.optimizer)

    @property
    def forward_passes(self) -> int:
        """The number of forward passes before a step's updates, for the reference and the old policy: 0, 1 or 2."""
        old = self.config.algorithm.old_policy != "rollout" and self.batch.old_per_token_logps is not None
        return (self.reference is not None) + old

    def lower_logprobs(self) -> jax.stages.Lowered:
        """Lower the program that computes the policy's log-probabilities of a micro-batch."""
        model, batch = nnx.split(self.updater.model), self.batch
        ids, temperature = (batch.prompt_ids, batch.completion_ids), self.config.rollout.temperature
        with self.learner.rl_cluster.r2m[Role.ACTOR]:
            return common.compute_per_token_logps.lower(
                *model, *ids, pad_id=NO_TOKEN, eos_id=NO_TOKEN, temperature=temperature
            )

    def lower_train_step(self) -> jax.stages.Lowered:
        """Lower the program of an update: both passes over a micro-batch, and the step after the last micro-batch."""
        updater = self.updater
        step: Any = nnx.jit(updater.create_train_step_fn(), donate_argnames=("optimizer",))
        with self.learner.rl_cluster.r2m[Role.ACTOR]:
            return step.lower(updater.model, updater.optimizer, self.batch).lowered

    @property
    def batch(self) -> TrainExample:
        """The shapes, types and shardings of a micro-batch's arrays."""
        config, mesh = self.config, self.learner.rl_cluster.r2m[Role.ACTOR]
        rows = config.micro_batch_prompts * config.algorithm.group_size
        spec = PartitionSpec(DATA_AXIS) if rows % mesh.shape[DATA_AXIS] == 0 else PartitionSpec()

        def described(dtype: Any, *width: int) -> Any:
            return jax.ShapeDtypeStruct((rows, *width), dtype, sharding=NamedSharding(mesh, spec))

        rollout: Any = self.learner.rl_cluster.cluster_config.rollout_config
        prompt, new = rollout.max_prompt_length, rollout.max_tokens_to_generate
        logps, old = described(np.float32, new), config.algorithm.old_policy
        recomputed = self.learner.algo_config.num_iterations > 1
        fields: dict[str, Any] = {
            "prompt_ids": described(np.int32, prompt),
            "prompt_mask": described(np.bool_, prompt),
            "completion_ids": described(np.int32, new),
            "completion_mask": described(np.bool_, new),
            "advantages": described(np.float32),
            "ref_per_token_logps": None if self.reference is None else logps,
            "old_per_token_logps": logps if old != "tunix" or recomputed else None,
            "sampler_is_weights": logps if old == "trainer" else None,
            "rollout_per_token_logps": logps,
        }
        return TrainExample(**fields)

    def try_loss(self) -> None:
        """Trace the policy loss, so that a loss that raises is refused before anything is sampled."""
        loss: Any = self.updater.loss_fn
        with self.learner.rl_cluster.r2m[Role.ACTOR]:
            nnx.eval_shape(lambda m, batch: loss(m, batch, self.learner.algo_config)[0], self.updater.model, self.batch)


# --- the optimizer of Tunix's trainer --------------------------------------------------------------------------------


class StepState(NamedTuple):
    """The state between steps; a checkpoint holds ``updates``."""

    updates: UpdateState
    record: UpdateRecord


def float32_steps(
    section: OptimizerSection, updates: int, stepped: Values, dtypes: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Build a run's optimizer, with gradient clipping, for Tunix's trainer. Raises ConfigError if this fails.

    The optimizer steps in float32, also for bfloat16 parameters. It skips a gradient whose norm is not finite.

        optimizer = float32_steps(config.optimizer, config.updates, stepped, dtypes)  # the actor_optimizer
        record = optimizer_state.record                         # of the last step

    Tunix updates its model's own parameters, in their dtype. If that is not float32, the optimizer's state holds
    float32 parameters, and the update that Tunix adds moves the model to their rounded values. Parameters are flat
    dicts by dotted name.

    Args:
        section: the optimizer.
        updates: the number of updates of the run, for the learning rate.
        stepped: the trained parameters in the type in which they are updated, arrays or descriptions, by dotted name.
        dtypes: the types in which the model computes with these parameters.
    """
    schedule = learning_rate_schedule(section, updates)
    optimizer = build_optimizer(section, schedule, stepped)

    def first(values: Values) -> StepState:
        wide = {name: value.astype(jnp.float32) for name, value in values.items()}
        kept = {name: value for name, value in wide.items() if dtypes[name] != jnp.float32}
        updates = UpdateState(jnp.zeros((), jnp.int32), optimizer.init(wide), kept)
        one = jnp.ones(())
        return StepState(updates, UpdateRecord(one, one, one, jnp.ones((), jnp.bool_)))

    shapes = jax.eval_shape(first, stepped)
    shardings = state_shardings(shapes, stepped)
    start = [stepped]

    def init(params: Any) -> StepState:
        del params  # the model's, which may be rounded
        values = start.pop()  # removed, so that their memory can be freed
        if isinstance(next(iter(values.values())), jax.ShapeDtypeStruct):
            describe = lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of)  # noqa: E731
            return jax.tree.map(describe, shapes, shardings)
        return jax.jit(first, out_shardings=shardings)(values)

    def update(gradients: Any, state: StepState, params: Any = None) -> tuple[Any, StepState]:
        model, updates = by_dotted_name(params), state.updates
        values = {name: updates.kept.get(name, value) for name, value in model.items()}
        wide = {name: gradient.astype(jnp.float32) for name, gradient in by_dotted_name(gradients).items()}
        norm: Any = optax.global_norm(wide)
        limit = section.max_grad_norm
        scale = jnp.where(norm > limit, limit / norm, 1.0)
        meant, inner = optimizer.update({name: g * scale for name, g in wide.items()}, updates.optimizer, values)
        kept = {name: values[name] + meant[name] for name in updates.kept}  # pyrefly: ignore[bad-index]
        finite = jnp.isfinite(norm)
        after = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), UpdateState(updates.count + 1, inner, kept), updates
        )
        moved: Values = {  # exactly the step from the model's parameter to the new value, rounded
            name: kept[name].astype(value.dtype).astype(jnp.float32) - value.astype(jnp.float32)
            if name in kept
            else meant[name]  # pyrefly: ignore[bad-index]
            for name, value in model.items()
        }
        moved = {name: jnp.where(finite, value, 0.0) for name, value in moved.items()}
        rate = jnp.asarray(schedule(updates.count), jnp.float32)
        record = UpdateRecord(norm, rate, jnp.ones(()), finite)
        return jax.tree.unflatten(jax.tree.structure(params), moved.values()), StepState(after, record)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore[bad-argument-type]  # pure states


def by_dotted_name(tree: Any) -> Values:
    """Return the arrays of a flax state, in the state's order, by dotted name as in `by_name`."""
    return {
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
