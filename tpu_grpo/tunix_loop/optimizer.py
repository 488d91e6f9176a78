"""The run's optimizer for Tunix's trainer: it steps in float32, also for bfloat16 parameters, and skips NaN steps.

    optimizer = float32_steps(config, stepped, dtypes)      # RLTrainingConfig's actor_optimizer
    record = optimizer_state.record                         # of the last step

Tunix updates its model's own parameters, in their dtype. If that is not float32, the optimizer's state holds float32
parameters, and the update that Tunix adds moves the model to their rounded values. Parameters are flat dicts by
dotted name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.optimizers import build_optimizer, learning_rate_schedule, state_shardings
from tpu_grpo.learner.parameters import Values
from tpu_grpo.learner.update import UpdateRecord, UpdateState


class StepState(NamedTuple):
    """The state between steps; a checkpoint holds ``updates``."""

    updates: UpdateState
    record: UpdateRecord


def float32_steps(config: RunConfig, stepped: Values, dtypes: Mapping[str, Any]) -> optax.GradientTransformation:
    """Build the optimizer of the config's section, with its clipping. Raises ConfigError for one that cannot be built.

    Args:
        config: the run.
        stepped: the trained parameters in the type in which they are updated, arrays or descriptions, by dotted name.
        dtypes: the types in which the model computes with them.
    """
    optimizer, schedule = build_optimizer(config, stepped), learning_rate_schedule(config)

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
        values = start.pop()  # removed, or they would be held for good
        if isinstance(next(iter(values.values())), jax.ShapeDtypeStruct):
            describe = lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of)  # noqa: E731
            return jax.tree.map(describe, shapes, shardings)
        return jax.jit(first, out_shardings=shardings)(values)

    def update(gradients: Any, state: StepState, params: Any = None) -> tuple[Any, StepState]:
        model, updates = by_dotted_name(params), state.updates
        values = {name: updates.kept.get(name, value) for name, value in model.items()}
        wide = {name: gradient.astype(jnp.float32) for name, gradient in by_dotted_name(gradients).items()}
        norm: Any = optax.global_norm(wide)
        limit = config.optimizer.max_grad_norm
        scale = jnp.where(norm > limit, limit / norm, 1.0)
        meant, inner = optimizer.update({name: g * scale for name, g in wide.items()}, updates.optimizer, values)
        kept = {name: values[name] + meant[name] for name in updates.kept}  # type: ignore[index,call-overload]
        finite = jnp.isfinite(norm)
        after = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), UpdateState(updates.count + 1, inner, kept), updates
        )
        moved: Values = {  # exactly the step from the model's parameter to the new value, rounded
            name: kept[name].astype(value.dtype).astype(jnp.float32) - value.astype(jnp.float32)
            if name in kept
            else meant[name]  # type: ignore[index,call-overload]
            for name, value in model.items()
        }
        moved = {name: jnp.where(finite, value, 0.0) for name, value in moved.items()}
        rate = jnp.asarray(schedule(updates.count), jnp.float32)
        record = UpdateRecord(norm, rate, jnp.ones(()), finite)
        return jax.tree.unflatten(jax.tree.structure(params), moved.values()), StepState(after, record)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # pure states


def by_dotted_name(tree: Any) -> Values:
    """Return the arrays of a flax state, in the state's order, by dotted name as in `by_name`."""
    return {
        ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
