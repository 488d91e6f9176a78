"""k1 in the reward of every token, against float64, and that neither cutting nor order of rows changes it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algorithms.test_objectives import Case, added_up, batch_in_order, case, completions_of, surrogate  # noqa: F401
from tests.learner.test_loss import distance, pick
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.batches import with_kl_in_advantages
from tpu_grpo.learner.loss import LossSettings, TrainBatch

BETA = 0.4


def with_reference(case: Case, order: Any) -> tuple[TrainBatch, list[np.ndarray]]:  # noqa: F811
    rng = np.random.default_rng(9)
    initial = [line + rng.uniform(-0.4, 0.4, len(line)).astype(np.float32) for line in case.old]
    batch = batch_in_order(case, "sequence-mean-token-mean", order)
    reference = batch_in_order(replace(case, old=initial), "sequence-mean-token-mean", order).rollout_logps
    return replace(batch, reference_logps=reference), initial


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
    section = AlgorithmSection(beta=BETA, kl_in="reward")
    settings = LossSettings(open_algorithm(section), BETA, section.kl_estimate, 1.0, None, kl_in_loss=False)
    found, slopes = added_up(whole, case, settings)
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance({"": slopes}, {"": gradient}) < 1e-6


def test_by_hand() -> None:
    """Tokens with k of 1, 3 and one that does not count: their mean is 2, and 0.5 times -1 and 1 is added."""
    base = jnp.zeros((1, 3))
    batch = TrainBatch(
        rows=None,  # type: ignore[arg-type]  # nothing is asked of the model
        weights=jnp.array([[0.1, 0.2, 0.0]]),
        advantages=jnp.array([[1.0, 1.0, 7.0]]),
        rollout_logps=base,
        old_logps=jnp.array([[-1.0, -1.0, jnp.inf]]),
        importance=None,
        reference_logps=jnp.array([[-2.0, -4.0, -1.0]]),
    )
    [found] = with_kl_in_advantages([batch], 0.5)
    assert found.advantages.tolist() == [[1.5, 0.5, 7.0]]
