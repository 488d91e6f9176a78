"""The agreement of engine and trainer against hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.learner.loss import AgreementSums, LossSums, agreement_by_age, agreement_metrics, agreement_sums


def sums(trainer: list[list[float]], engine: list[list[float]], mask: list[list[bool]]) -> AgreementSums:
    return agreement_sums(jnp.array(trainer), jnp.array(engine), jnp.array(mask))


def test_agreement_by_hand() -> None:
    # The engine is 0.1 too high on one token of three; what is masked out is far off, and must not count.
    found = agreement_metrics(
        [sums([[-1.0, -2.0], [-3.0, -50.0]], [[-1.0, -1.9], [-3.0, 0]], [[True] * 2, [True, False]])]
    )
    weight = np.exp(-0.1)
    by_hand = {
        "agreement/logprob_abs_diff_max": 0.1,
        "agreement/logprob_abs_diff_mean": 0.1 / 3,
        "agreement/ratio_mean": (2 + weight) / 3,
        "agreement/kl": (weight - 1 + 0.1) / 3,
        "agreement/effective_sample_size": (2 + weight) ** 2 / (3 * (2 + weight**2)),
    }
    assert found == pytest.approx(by_hand, rel=1e-5)


def test_agreement_of_micro_batches_is_that_of_the_batch() -> None:
    rng = np.random.default_rng(0)
    trainer, engine = rng.normal(size=(2, 6, 5)).tolist()
    mask = (np.arange(5) < rng.integers(1, 6, (6, 1))).tolist()
    whole = agreement_metrics([sums(trainer, engine, mask)])
    parts = agreement_metrics([sums(trainer[i : i + 2], engine[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4)])
    assert parts == pytest.approx(whole, rel=1e-6)
    ratio = np.exp(np.array(trainer) - np.array(engine))[np.array(mask)]
    assert whole["agreement/effective_sample_size"] == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum())


def test_agreement_at_its_ends() -> None:
    same = agreement_metrics([sums([[-1.0, -2.0]], [[-1.0, -2.0]], [[True, True]])])
    assert list(same.values()) == [0.0, 0.0, 1.0, 0.0, 1.0]
    far = agreement_metrics([sums([[-1.0, -200.0]], [[-150.0, -2.0]], [[True, True]])])
    assert far["agreement/logprob_abs_diff_max"] == pytest.approx(198.0)
    assert all(np.isfinite(value) for value in far.values())
    assert far["agreement/effective_sample_size"] == pytest.approx(0.5)  # one token of two carries all the weight


def test_older_tokens_are_measured_apart() -> None:
    """A token of the present weights that is 0.1 off, and an older one that is 0.5 off; then an older one alone."""
    present, older = sums([[-1.1, -2.0]], [[-1.0, -1.5]], [[True, False]]), sums([[-2.0]], [[-1.5]], [[True]])
    none = sums([[-1.0]], [[-1.0]], [[False]])

    def of(*by_age: AgreementSums) -> LossSums:
        return LossSums(0.0, 0.0, 0.0, 0.0, present, by_age=(by_age[0], by_age[1]))

    found = agreement_by_age([of(present, older), of(none, none)])
    assert found["agreement/logprob_abs_diff_max"] == pytest.approx(0.1)
    assert found["agreement/older_logprob_abs_diff_mean"] == pytest.approx(0.5)
    assert {name.partition("_")[0] for name in agreement_by_age([of(none, older)])} == {"agreement/older"}
    assert agreement_by_age([of(present, none)]).keys() == agreement_metrics([present]).keys()


def test_no_gradient_flows_through_the_measurement() -> None:
    def measured(logps: jax.Array) -> jax.Array:
        return sum(agreement_sums(logps, jnp.zeros((1, 2)), jnp.ones((1, 2), bool)), jnp.zeros(()))

    assert np.asarray(jax.grad(measured)(jnp.full((1, 2), -1.0))).tolist() == [[0.0, 0.0]]
