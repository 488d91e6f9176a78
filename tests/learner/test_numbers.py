"""Settings that are data: one program serves all their values, and gives each its own loss and gradient."""

from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.algorithms.test_objectives import Case, batch_in_order, case, look_up  # noqa: F401
from tests.learner.test_loss import distance
from tests.learner.toy import settings_of
from tpu_grpo.algorithms import SHIPPED, open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner import loss as loss_module
from tpu_grpo.learner.loss import EntropyState, LossSettings, policy_loss

TRAINER = {"old_policy": "trainer"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"clip_low": 0.1}, {"clip_low": 0.2, "clip_high": 0.28}),
    "dual_clip": ({"dual_clip": 3.0}, {"dual_clip": 1.4}),
    "gspo": ({"name": "gspo"}, {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2}),
    "cispo": ({"name": "cispo", "options": {"cap": 5.0}}, {"name": "cispo", "clip_low": 0.2, "clip_high": 0.1}),
    "dppo": ({"name": "dppo"}, {"name": "dppo", "options": {"mask_low": 0.03, "mask_high": 0.02, "kl_weight": 0.3}}),
    "sapo": ({"name": "sapo"}, {"name": "sapo", "options": {"temperature_negative": 5.0}}),
    "vespo": ({"name": "vespo"}, {"name": "vespo", "options": {"k_negative": 1.0, "lambda_positive": 0.5}}),
    "penalties": ({"beta": 0.1, "entropy_bonus": 0.01}, {"beta": 0.4, "entropy_bonus": 0.3}),
    "bounds": (
        {**TRAINER, "correction": "token", "veto_low": 0.01, "opsm": 0.5},
        {
            **TRAINER,
            "correction": "token",
            "importance_floor": 0.8,
            "importance_cap": 1.2,
            "veto_low": 0.7,
            "opsm": 0.05,
        },
    ),
}


MESH = Mesh(jax.devices()[:1], ("fsdp",))


@pytest.mark.full
@pytest.mark.parametrize("label", PAIRS)
def test_one_program_serves_both(case: Case, label: str) -> None:  # noqa: F811
    first, second = (settings_of(mesh=MESH, **tree) for tree in PAIRS[label])
    batch, rng = batch_in_order(case, "token-mean", np.arange(12)), np.random.default_rng(3)
    noise = rng.uniform(-0.3, 0.3, batch.weights.shape).astype(np.float32)
    batch = replace(batch, old_logps=batch.rollout_logps + noise, reference_logps=batch.rollout_logps - noise)
    placed = [settings.placed_numbers(()) for settings in (first, second)]

    def program(settings: LossSettings) -> Any:
        def gradient(table: Any, numbers: Any) -> Any:
            return jax.value_and_grad(lambda t: policy_loss(t, batch, settings, numbers)[0])(table)

        return jax.jit(gradient)

    with mock.patch.object(loss_module, "run_model", look_up):
        one, other = program(first), program(second)
        texts = [each.lower(case.now, placed[0]).as_text() for each in (one, other)]
        found, expected = (
            one(case.now, placed[1]),
            jax.value_and_grad(lambda t: policy_loss(t, batch, second)[0])(case.now),
        )
        unlike = one(case.now, placed[0])
    assert texts[0] == texts[1]
    assert one._cache_size() == 1
    assert float(found[0]) == pytest.approx(float(expected[0]), abs=3e-7)  # terms of about 1, which cancel
    assert distance({"": found[1]}, {"": expected[1]}) < 1e-6
    assert label == "sapo" or float(unlike[0]) != pytest.approx(float(found[0]), rel=1e-4)


def test_every_size_that_a_shipped_objective_has_is_data() -> None:
    for name in SHIPPED:
        objective: Any = open_algorithm(AlgorithmSection(name=name)).objective
        numbers = {key for key, value in vars(objective).items() if isinstance(value, float)}
        assert numbers <= set(getattr(objective, "numbers", ())), name


def test_an_adapted_coefficient_takes_the_place_of_the_first() -> None:
    settings = settings_of(mesh=MESH, entropy_bonus=0.5)
    assert float(settings.placed_numbers(())["entropy"]) == 0.5
    state = EntropyState(jax.numpy.float32(0.25), jax.numpy.float32(0.125))
    assert float(settings.placed_numbers(state)["entropy"]) == 0.125
    assert settings.described_numbers.keys() == settings.placed_numbers(state).keys()
