"""Corrections between engine and trainer, through packed rows and the whole loss, completion by completion in NumPy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algorithms.test_objectives import (
    LONGEST,
    Case,
    added_up,
    batch_in_order,
    case,  # noqa: F401  # a fixture
    gradient_of,
    surrogate,
    with_idle_rows,
)
from tests.learner.test_loss import distance, pick
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored, settings_of, with_noise
from tpu_grpo.algorithms import Sequences, correction_metrics, open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.loss import LossSettings, TrainBatch

TRAINER = {"old_policy": "trainer"}
CASES: dict[str, dict[str, Any]] = {
    "token_truncate": {**TRAINER, "correction": "token", "correction_mode": "truncate", "importance_cap": 1.2},
    "token_both_ends": {
        **TRAINER,
        "correction": "token",
        "correction_mode": "truncate",
        "importance_cap": 1.2,
        "importance_floor": 0.8,
    },
    "token_mask": {**TRAINER, "correction": "token", "importance_cap": 1.2, "importance_floor": 0.8},
    "token_mask_now": {"correction": "token", "importance_cap": 1.2, "importance_floor": 0.8},
    "sequence_truncate": {**TRAINER, "correction": "sequence", "correction_mode": "truncate", "importance_cap": 1.1},
    "sequence_mask": {**TRAINER, "correction": "sequence", "importance_floor": 0.7, "importance_cap": 1.5},
    "sequence_mask_now": {"correction": "sequence", "importance_floor": 0.7, "importance_cap": 1.5},
    "geometric": {**TRAINER, "correction": "geometric", "importance_floor": 0.9, "importance_cap": 1.1},
    "geometric_now": {"correction": "geometric", "importance_floor": 0.9, "importance_cap": 1.1},
    "veto": {"veto_low": 0.62, "veto_high": 1.63},
    "veto_trainer": {**TRAINER, "correction": "token", "correction_mode": "truncate", "veto_low": 0.76},
    "opsm": {"opsm": 0.05},
    "opsm_trainer": {
        **TRAINER,
        "correction": "geometric",
        "importance_floor": 0.9,
        "importance_cap": 1.1,
        "opsm": 0.05,
    },
}


def weights_of(section: AlgorithmSection, now: Any, old: Any, engine: Any, advantage: float) -> tuple[Any, set[str]]:
    """The weights of one completion's tokens, and which filters took it out."""
    trainer = section.old_policy == "trainer"
    rho, taken = np.exp((old if trainer else now) - engine), set()
    low = section.importance_floor or (0.99 if section.correction == "geometric" else 0.0)
    high = section.importance_cap or (1.01 if section.correction == "geometric" else 2.0)
    weights = np.ones_like(rho)
    if section.correction is not None:
        whole: dict[str, Any] = {"sequence": np.prod(rho), "geometric": np.prod(rho) ** (1 / len(rho))}
        ratio = np.broadcast_to(whole.get(section.correction, rho), rho.shape)
        if section.correction_mode == "truncate":
            weights = np.minimum(np.maximum(ratio, low), high)
        else:
            weighs = trainer and section.correction != "geometric"
            weights = np.where((ratio >= low) & (ratio <= high), ratio if weighs else 1.0, 0.0)
        if ((ratio < low) | (ratio > high)).any():
            taken.add("bounded")
    if (rho < (section.veto_low or 0)).any() or (rho > (section.veto_high or np.inf)).any():
        weights, taken = 0 * weights, taken | {"vetoed"}
    if section.opsm is not None and advantage < 0 and np.mean(engine - now) > section.opsm:
        weights, taken = 0 * weights, taken | {"opsm"}
    return weights, taken


def before_update(case: Case) -> Case:  # noqa: F811
    """The same completions, with the trainer's log-probabilities before the update in place of the engine's."""
    rng = np.random.default_rng(5)
    return replace(case, old=[line + rng.uniform(-0.3, 0.3, len(line)).astype(np.float32) for line in case.old])


@pytest.mark.full
@pytest.mark.parametrize("label", CASES)
def test_loss_and_gradient(case: Case, label: str) -> None:  # noqa: F811
    section = AlgorithmSection.model_validate(CASES[label])
    trainer, loss, gradient = before_update(case), 0.0, np.zeros(case.now.shape)
    outcomes, everything = set(), []
    for index, counts in enumerate(case.counts):
        advantage, engine = float(case.advantages[index]), case.old[index][counts].astype(float)
        if not len(engine):
            continue
        now = case.now[index, : len(counts)][counts].astype(float)
        old = trainer.old[index][counts].astype(float) if section.old_policy == "trainer" else engine
        weights, taken = weights_of(section, now, old, engine, advantage)
        losses, slopes = surrogate(np.exp(now - old), advantage, 0.2, 0.2, np.inf)
        loss += (weights * losses).sum() / (12 * len(counts))
        gradient[index, np.flatnonzero(counts)] = weights * slopes / (12 * len(counts))
        outcomes.add(frozenset(taken))
        everything.append(weights)
    assert len(outcomes) > 1  # what is filtered, and what is not

    settings = settings_of(section)
    for order in (np.random.default_rng(1).permutation(12), np.arange(12)):
        batch = batch_in_order(case, "sequence-mean-token-mean", order)
        old_logps = batch_in_order(trainer, "sequence-mean-token-mean", order).rollout_logps
        batch = replace(batch, old_logps=old_logps if section.old_policy == "trainer" else batch.rollout_logps)
        found, found_gradient = added_up(batch, case, settings)
        assert found == pytest.approx(loss, rel=1e-6)
        assert distance({"": found_gradient}, {"": gradient}) < 1e-6

    parts = [pick(batch, slice(start, start + 2)) for start in range(0, len(batch.weights), 2)]
    sums: list[Any] = [gradient_of(case.now, part, settings)[0][1].correction for part in parts]
    flat = np.concatenate(everything)
    assert float(sum(each.tokens for each in sums)) == len(flat)
    metrics = correction_metrics(sums)
    expected_size = flat.sum() ** 2 / (len(flat) * (flat**2).sum())
    assert metrics["correction/effective_sample_size"] == pytest.approx(expected_size, rel=1e-5)
    check_that_weight_0_changes_nothing(batch, case, settings)


def check_that_weight_0_changes_nothing(batch: TrainBatch, case: Case, settings: LossSettings) -> None:  # noqa: F811
    """Neither a token of weight 0 in a row nor a row of them, whatever engine, trainer and advantage say there."""
    both = with_idle_rows(batch)

    def outcome(of: TrainBatch) -> tuple[float, np.ndarray, np.ndarray]:
        starts = range(0, len(of.weights), 2)
        sums = [gradient_of(case.now, pick(of, slice(start, start + 2)), settings)[0][1].correction for start in starts]
        return *added_up(of, case, settings), np.sum([jax.device_get(each) for each in sums], axis=0)

    loss, gradient, sums = outcome(batch)
    for field in ("old_logps", "rollout_logps", "advantages"):
        for value in (np.inf, -np.inf, 1e30, np.nan):
            wild = jnp.where(both.weights == 0.0, value, getattr(both, field))
            found, found_gradient, found_sums = outcome(replace(both, **dict[str, Any]({field: wild})))
            assert found == loss, (field, value)
            np.testing.assert_array_equal(found_gradient, gradient, err_msg=f"{field} {value}")
            np.testing.assert_array_equal(found_sums, sums, err_msg=f"{field} {value}")


@pytest.mark.full
def test_by_hand() -> None:
    """Two completions in a row, of ratios 1/2 2 2 and 1 3, with the products 2 and 3 and the means 1.26 and 1.73."""
    engine = jnp.log(jnp.full((1, 5), 0.2))
    old = engine + jnp.log(jnp.array([[0.5, 2.0, 2.0, 1.0, 3.0]]))
    sequences = Sequences(jnp.array([[1, 1, 1, 2, 2]]), jnp.ones((1, 5), bool))

    def found(**settings: Any) -> Any:
        opened = open_algorithm(AlgorithmSection.model_validate({"old_policy": "trainer", **settings})).correction
        assert opened is not None
        weights, sums = opened.weights(old, old, engine, jnp.array([[-1.0] * 5]), sequences)
        metrics = correction_metrics([sums])
        shares = [metrics[f"correction/{name}_fraction"] for name in ("bounded", "vetoed", "opsm")]
        return np.round(np.asarray(weights, float)[0], 5).tolist(), np.round(shares, 5).tolist()

    cut = {"correction_mode": "truncate"}
    assert found(correction="token", **cut) == ([0.5, 2, 2, 1, 2], [0.2, 0, 0])
    assert found(correction="token", importance_floor=0.6) == ([0, 2, 2, 1, 0], [0.4, 0, 0])
    assert found(correction="sequence", importance_cap=2.5, **cut) == ([2, 2, 2, 2.5, 2.5], [0.4, 0, 0])
    assert found(correction="sequence", importance_cap=2.5) == ([2, 2, 2, 0, 0], [0.4, 0, 0])
    assert found(correction="geometric", importance_cap=1.5) == ([1, 1, 1, 0, 0], [0.4, 0, 0])
    assert found(correction="geometric") == ([0] * 5, [1, 0, 0])
    assert found(veto_low=0.6) == ([0, 0, 0, 1, 1], [0, 0.6, 0])
    assert found(veto_high=2.5) == ([1, 1, 1, 0, 0], [0, 0.4, 0])
    assert found(opsm=0.1) == ([1] * 5, [0, 0, 0])  # the policy has moved towards these


def test_opsm_by_hand() -> None:
    """From completions of ratios 1/2 1/2 and 1 1 the policy has moved away by log 2 and by nothing."""
    engine = jnp.log(jnp.full((2, 4), 0.2))
    now = engine + jnp.log(jnp.array([[0.5, 0.5, 1.0, 1.0]] * 2))
    sequences = Sequences(jnp.array([[1, 1, 2, 2]] * 2), jnp.ones((2, 4), bool))
    opened: Any = open_algorithm(AlgorithmSection(opsm=0.5)).correction
    advantages = jnp.array([[-1.0] * 4, [1.0] * 4])
    weights, sums = opened.weights(now, engine, engine, advantages, sequences)
    assert weights.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert correction_metrics([sums])["correction/effective_sample_size"] == pytest.approx(6 / 8)


def test_no_gradient_flows_through_weights() -> None:
    engine = jnp.log(jnp.full((1, 4), 0.2))
    sequences = Sequences(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), bool))
    section = AlgorithmSection(correction="geometric", importance_floor=0.5, importance_cap=2.0, opsm=0.5)
    opened: Any = open_algorithm(section).correction
    slopes = jax.grad(lambda now: opened.weights(now, engine, engine, -jnp.ones((1, 4)), sequences)[0].sum())(engine)
    assert not slopes.any()


def test_without_settings_there_is_none() -> None:
    for old_policy in ("rollout", "trainer"):
        assert open_algorithm(AlgorithmSection(old_policy=old_policy, importance_cap=1.5)).correction is None


@pytest.mark.slow  # two learners are compiled
def test_a_step_of_the_learner_with_and_without(tmp_path: Any) -> None:
    """Truncated tokens by name are the default of old_policy=trainer; and what a step says of them."""
    mesh = make_mesh(1)
    config = make_config(tmp_path, {"algorithm": {"old_policy": "trainer", "importance_cap": 1.2}})
    named = make_config(
        tmp_path / "named", {"algorithm": {**CASES["token_truncate"], "veto_high": 1e6, "importance_cap": 1.2}}
    )
    scored = with_noise(make_scored(make_model(mesh), config), 0.5)
    results = []
    for each in (config, named):
        learner = make_learner(each, mesh)
        results.append(learner.update(scored).metrics)
    assert not [name for name in results[0] if name.startswith("correction/")]
    for name in results[0]:
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5, abs=1e-7), name
    engine = np.concatenate([c.logprobs for c in scored.rollout.completions])
    assert 0.1 < results[1]["correction/bounded_fraction"] < 0.9
    assert results[1]["correction/vetoed_fraction"] == 0.0
    assert 0.5 < results[1]["correction/effective_sample_size"] < 1.0
    assert len(engine) <= 8 * LONGEST
