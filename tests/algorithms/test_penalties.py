"""The KL penalty, in the loss and in the reward, and the entropy bonus, against formulas in NumPy and float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.algorithms.test_objectives import (
    Case,
    added_up,
    batch_in_order,
    case,  # noqa: F401  # a fixture
    completions_of,
    surrogate,
    with_idle_rows,
)
from tests.learner.test_loss import Bigram, batch_of, distance, pick
from tests.learner.toy import VOCAB, settings_of
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.batches import with_kl_in_advantages
from tpu_grpo.learner.loss import TrainBatch, policy_loss
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.records.stages import Completion

BETA = 0.4


def estimate(estimator: str, x: Any) -> tuple[Any, Any]:
    """An estimate of the KL divergence from x = log(policy / reference), and its slope by x."""
    return {
        "kl": (x, np.ones_like(x)),
        "mse_kl": (x**2 / 2, x),
        "low_var_kl": (np.exp(-x) - 1 + x, 1 - np.exp(-x)),
    }[estimator]


def with_reference(case: Case, order: Any) -> tuple[TrainBatch, list[np.ndarray]]:  # noqa: F811
    rng = np.random.default_rng(9)
    initial = [line + rng.uniform(-0.4, 0.4, len(line)).astype(np.float32) for line in case.old]
    batch = batch_in_order(case, "sequence-mean-token-mean", order)
    reference = batch_in_order(replace(case, old=initial), "sequence-mean-token-mean", order).rollout_logps
    return replace(batch, reference_logps=reference), initial


@pytest.mark.parametrize(
    ("estimator", "unbiased"),
    [("kl", False), ("mse_kl", False), ("low_var_kl", False), ("kl", True), ("low_var_kl", True)],
)
def test_the_penalty(case: Case, estimator: Any, unbiased: bool) -> None:  # noqa: F811
    _, initial = with_reference(case, np.arange(12))
    loss, gradient = 0.0, np.zeros(case.now.shape)
    for index, counts, now, old, advantage in completions_of(case):
        if counts.any():
            losses, slopes = surrogate(np.exp(now - old), advantage, 0.2, 0.2, np.inf)
            kl, slope = estimate(estimator, now - initial[index][counts].astype(float))
            if unbiased:
                ratio = np.exp(now - old)
                kl, slope = ratio * kl, ratio * (kl + slope)
            loss += (losses + BETA * kl).sum() / (12 * len(counts))
            gradient[index, np.flatnonzero(counts)] = (slopes + BETA * slope) / (12 * len(counts))
    settings = settings_of(AlgorithmSection(beta=BETA, kl_estimator=estimator, kl_unbiased=unbiased))
    for order in (np.arange(12), np.random.default_rng(1).permutation(12)):
        batch, _ = with_reference(case, order)
        for each in (batch, with_idle_rows(batch, reference_logps=jnp.full((2, 16), np.inf))):
            found, slopes = added_up(each, case, settings)
            assert found == pytest.approx(loss, rel=1e-6)
            assert distance({"": slopes}, {"": gradient}) < 1e-6


@pytest.mark.parametrize(("estimator", "unbiased", "right"), [("low_var_kl", True, True), ("low_var_kl", False, False)])
def test_times_the_ratio_the_expected_gradient_is_that_of_the_divergence(
    estimator: Any, unbiased: bool, right: bool
) -> None:
    """Over all tokens of a vocabulary, weighted by the probabilities that they are sampled with."""
    rng = np.random.default_rng(1)
    now, old, initial = np.log(rng.dirichlet(np.ones(7), 3))
    kl, slope = estimate(estimator, now - initial)
    ratio = np.exp(now - old)
    slopes = np.exp(old) * (ratio * (kl + slope) if unbiased else slope)  # by each log-probability
    by_logits = slopes - np.exp(now) * slopes.sum()
    exact = np.exp(now) * (now - initial - (np.exp(now) * (now - initial)).sum())
    assert np.allclose(by_logits, exact, atol=1e-12) == right


def test_the_bonus() -> None:
    """Where advantages are 0, the loss is minus the mean entropy, whose slope by a logit is -p (log p + H) / T."""
    rng = np.random.default_rng(4)
    table, bonus, temperature = rng.normal(size=(VOCAB, VOCAB)).astype(np.float32), 0.3, 0.7
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (1, 3, 2)]
    ids = [rng.integers(3, VOCAB, n).astype(np.int32) for n in (4, 1, 5)]
    logs = table.astype(float) / temperature
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    entropies = -(np.exp(logs) * logs).sum(axis=1)
    loss, gradient = 0.0, np.zeros_like(logs)
    for prompt, line in zip(prompts, ids, strict=True):
        for before in [prompt[-1], *line[:-1].tolist()]:
            loss -= bonus * entropies[before] / 10
            gradient[before] += bonus * np.exp(logs[before]) * (logs[before] + entropies[before]) / temperature / 10
    completions = [Completion(line, np.full(len(line), -3.0, np.float32), "length", 0) for line in ids]
    rows, _ = train_rows(prompts, completions, np.zeros(3), RowShape(4, 5, 9, 1), "token-mean")
    settings = settings_of(AlgorithmSection(entropy_bonus=bonus), temperature)
    definition, state = nnx.split(Bigram(table))

    @jax.jit
    def of(state: Any) -> Any:
        return jax.value_and_grad(lambda s: policy_loss(nnx.merge(definition, s), batch_of(rows), settings)[0])(state)

    found, slopes = of(state)
    assert float(found) == pytest.approx(loss, rel=1e-6)
    assert distance({"": by_name(slopes)["lm_head.w"]}, {"": gradient}) < 1e-6
    assert jnp.isfinite(found)


def test_estimates_have_the_names_of_the_literature_and_of_tunix() -> None:
    names = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl", "kl": "kl", "mse_kl": "mse_kl", "low_var_kl": "low_var_kl"}
    assert {name: AlgorithmSection.model_validate({"kl_estimator": name}).kl_estimate for name in names} == names
    assert AlgorithmSection().kl_estimate == "low_var_kl"
    assert AlgorithmSection(kl_in="reward").kl_estimate == "kl"


# --- k1 in the reward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "shuffled"), [(2, False), (100, False), (2, True)], ids=str)
def test_loss_and_gradient(case: Case, size: int, shuffled: bool) -> None:  # noqa: F811
    order = np.random.default_rng(1).permutation(12) if shuffled else np.arange(12)
    batch, initial = with_reference(case, order)
    k = [
        old - reference[counts].astype(float)
        for (_, counts, _, old, _), reference in zip(completions_of(case), initial, strict=True)
    ]
    mean = np.concatenate(k).mean()
    loss, gradient = 0.0, np.zeros(case.now.shape)
    for index, counts, now, old, advantage in completions_of(case):
        for place, token_now, token_old, token_k in zip(np.flatnonzero(counts), now, old, k[index], strict=True):
            own = advantage + BETA * (mean - token_k)
            losses, slopes = surrogate(np.exp(token_now - token_old), own, 0.2, 0.2, np.inf)
            loss += losses / (12 * len(counts))
            gradient[index, place] = slopes / (12 * len(counts))
    parts = [pick(batch, slice(start, start + size)) for start in range(0, len(batch.weights), size)]
    made = with_kl_in_advantages(parts, BETA)
    whole = jax.tree.map(lambda *columns: jnp.concatenate(columns), *made)
    found, slopes = added_up(whole, case, settings_of(AlgorithmSection(beta=BETA, kl_in="reward")))
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance({"": slopes}, {"": gradient}) < 1e-6


def test_by_hand() -> None:
    """Tokens with k of 1, 3 and one that does not count: their mean is 2, and 0.5 times -1 and 1 is added."""
    base = jnp.zeros((1, 3))
    batch = TrainBatch(
        rows=None,  # pyrefly: ignore[bad-argument-type]  # nothing is asked of the model
        weights=jnp.array([[0.1, 0.2, 0.0]]),
        advantages=jnp.array([[1.0, 1.0, 7.0]]),
        rollout_logps=base,
        old_logps=jnp.array([[-1.0, -1.0, jnp.inf]]),
        importance=None,
        reference_logps=jnp.array([[-2.0, -4.0, -1.0]]),
    )
    [found] = with_kl_in_advantages([batch], 0.5)
    assert found.advantages.tolist() == [[1.5, 0.5, 7.0]]
