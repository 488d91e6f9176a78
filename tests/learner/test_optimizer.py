from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tpu_grpo.learner.optimizer import build_optimizer, last_update, learning_rate_schedule

from tests.learner.toy import make_config
from tpu_grpo.errors import ConfigError


def rates(directory: Path, max_steps: int, iterations: int, **optimizer: Any) -> list[float]:
    tree = {"run": {"max_steps": max_steps}, "algorithm": {"iterations": iterations}, "optimizer": optimizer}
    schedule = learning_rate_schedule(make_config(directory, tree))
    return [float(np.asarray(schedule(update))) for update in range(max_steps * iterations + 1)]


def test_schedules_by_hand(tmp_path: Path) -> None:
    peak = {"learning_rate": 8.0}
    assert rates(tmp_path, 3, 1, **peak) == [8, 8, 8, 8]
    assert rates(tmp_path, 4, 1, **peak, warmup_steps=4) == [0, 2, 4, 6, 8]
    assert rates(tmp_path, 4, 1, **peak, schedule="linear") == [8, 6, 4, 2, 0]
    assert rates(tmp_path, 4, 1, **peak, schedule="linear", warmup_steps=2) == [0, 4, 8, 4, 0]
    assert rates(tmp_path, 2, 2, **peak, schedule="linear", warmup_steps=2) == [0, 4, 8, 4, 0]  # counts updates
    cosine = [8, 4 * (1 + np.sqrt(0.5)), 4, 4 * (1 - np.sqrt(0.5)), 0]
    np.testing.assert_allclose(rates(tmp_path, 4, 1, **peak, schedule="cosine"), cosine, atol=1e-6)


def test_a_warm_up_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps must be < .* = 4 with optimizer.schedule=linear, got 4"):
        rates(tmp_path, 4, 1, schedule="linear", warmup_steps=4)


def test_first_update_by_hand_and_its_record(tmp_path: Path) -> None:
    """The first step of Adam is the sign of the gradient, whatever clipping does; decay adds rate * decay * weight."""
    tree = {"optimizer": {"learning_rate": 0.1, "weight_decay": 0.5, "max_grad_norm": 1.0}}
    optimizer = build_optimizer(make_config(tmp_path, tree))
    params = {"w": jnp.array([2.0, -4.0])}
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.array([3.0, 4.0])}, state, params)
    np.testing.assert_allclose(jax.tree.leaves(updates)[0], [-0.1 - 0.1, -0.1 + 0.2], rtol=1e-5)
    record = last_update(state)
    assert (int(record.count), float(record.grad_norm)) == (1, 5.0)
    assert float(record.learning_rate) == pytest.approx(0.1)


def test_the_recorded_norm_is_that_of_the_mean_gradient(tmp_path: Path) -> None:
    optimizer = optax.MultiSteps(build_optimizer(make_config(tmp_path)), every_k_schedule=2)
    params = {"w": jnp.zeros(2)}
    state = optimizer.init(params)
    for gradient in ([6.0, 0.0], [0.0, 8.0]):
        assert int(last_update(state).count) == 0  # nothing is recorded half-way
        _, state = optimizer.update({"w": jnp.array(gradient)}, state, params)
    assert float(last_update(state).grad_norm) == 5.0  # of (3, 4); the mean of the norms would be 7


def test_gradients_of_bfloat16_micro_batches_are_added_in_float32(tmp_path: Path) -> None:
    """The mean of 256 and 1 is 128.5, which bfloat16 would round to 128."""
    optimizer = optax.MultiSteps(build_optimizer(make_config(tmp_path)), every_k_schedule=3)
    params = {"w": jnp.zeros(1, jnp.bfloat16)}
    state = optimizer.init(params)
    for gradient in (256.0, 1.0):
        _, state = optimizer.update({"w": jnp.array([gradient], jnp.bfloat16)}, state, params)
    assert float(state.acc_grads["w"][0]) == 128.5
