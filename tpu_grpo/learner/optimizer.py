"""AdamW with clipping, a schedule, and a record of the last update, as one optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import ConfigError


class UpdateRecord(NamedTuple):
    """Says what the last update was; it is the state of the first transformation of the chain."""

    count: Int[Array, ""]
    """This many updates were made so far."""
    grad_norm: Float[Array, ""]
    """This is the gradient's global norm before clipping. With accumulation that gradient is the mean over the
    micro-batches, so this is the norm of the whole batch's gradient, not a mean of norms."""
    learning_rate: Float[Array, ""]


def build_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Build the optimizer of a run.

    Raises:
        ConfigError: if the warm-up leaves no update for the schedule.
    """
    section = config.optimizer
    schedule = learning_rate_schedule(config)
    return optax.chain(
        _recorded(schedule),
        optax.clip_by_global_norm(section.max_grad_norm),
        optax.adamw(schedule, b1=section.b1, b2=section.b2, weight_decay=section.weight_decay),
    )


def learning_rate_schedule(config: RunConfig) -> optax.Schedule:
    """Give the rate of update u = 0, 1, ... of the N = run.max_steps * algorithm.iterations updates of a run.

    With W warm-up updates and peak p: p * u / W for u < W, then p (constant), or down from p at u = W towards 0 at
    u = N, the first update that is not made. For N = 4, W = 2, linear: 0, p/2, p, p/2.

    Raises:
        ConfigError: if W >= N with a schedule that falls.
    """
    section = config.optimizer
    peak, warmup = section.learning_rate, section.warmup_steps
    total = config.run.max_steps * config.algorithm.iterations
    if section.schedule != "constant" and warmup >= total:
        raise ConfigError(
            f"optimizer.warmup_steps must be < run.max_steps * algorithm.iterations = {total} with optimizer.schedule="
            f"{section.schedule}, got {warmup}; lower it, or use schedule=constant"
        )
    schedules: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, max(total - warmup, 1)),
        "cosine": optax.cosine_decay_schedule(peak, max(total - warmup, 1)),
    }
    if warmup == 0:
        return schedules[section.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), schedules[section.schedule]], [warmup])


def last_update(opt_state: Any) -> UpdateRecord:
    """Find the record in the state of a `build_optimizer` chain, accumulating over micro-batches or not."""
    chain = opt_state.inner_opt_state if isinstance(opt_state, optax.MultiStepsState) else opt_state
    return UpdateRecord(*(jax.device_get(leaf) for leaf in jax.tree.leaves(chain[0])))


def _recorded(schedule: optax.Schedule) -> optax.GradientTransformation:
    def init(params: optax.Params) -> UpdateRecord:
        del params
        return UpdateRecord(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, UpdateRecord]:
        del params
        assert isinstance(state, UpdateRecord)
        rate = jnp.asarray(schedule(state.count), jnp.float32)
        norm = jnp.asarray(optax.global_norm(updates), jnp.float32)
        return updates, UpdateRecord(jnp.asarray(optax.safe_increment(state.count)), norm, rate)

    return optax.GradientTransformation(init, update)
