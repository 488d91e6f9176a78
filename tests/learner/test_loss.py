"""The objective against an implementation in NumPy and float64, and the agreement against hand-worked numbers."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl import algo_core

from tests.learner.toy import EOS, PAD, VOCAB, make_config, make_mesh, make_model, model_logps
from tpu_grpo.learner.grpo import GrpoAlgorithmConfig, TrainExample, truncated_weights
from tpu_grpo.learner.loss import AgreementSums, agreement_metrics, agreement_sums, loss_with_agreement
from tpu_grpo.learner.rows import RowShape, TrainRows, train_rows
from tpu_grpo.types import Completion

LENGTHS = (1, 5, 3, 2)
ADVANTAGES = np.array([1.5, -0.5, 2.0, -1.0])
TEMPERATURE = 0.7
MODEL = make_model(make_mesh(1))


@pytest.fixture(scope="module")
def case() -> dict[str, Any]:
    """Uneven rows; the old policy is off by up to 0.6 in both directions, so every branch of the clip is taken."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (6, 1, 3, 4)]
    completions = [rng.integers(3, VOCAB, n).tolist() for n in LENGTHS]
    now = [*model_logps(MODEL, prompts, completions, TEMPERATURE)]
    old = [line + rng.uniform(-0.6, 0.6, len(line)) for line in now]
    reference = [line + rng.uniform(-0.3, 0.3, len(line)) for line in now]
    made = [
        Completion(np.array(c, np.int32), o.astype(np.float32), "length", 0)
        for c, o in zip(completions, old, strict=True)
    ]
    rows = train_rows(prompts, made, ADVANTAGES, RowShape(6, 5, PAD))
    return {"rows": rows, "now": now, "old": old, "reference": reference}


def padded(lines: list[np.ndarray]) -> jax.Array:
    return jnp.asarray([np.pad(line, (0, 5 - len(line))) for line in lines], jnp.float32)


def example(rows: TrainRows, **fields: Any) -> TrainExample:
    base: dict[str, Any] = {
        "prompt_ids": jnp.asarray(rows.prompt_ids),
        "prompt_mask": jnp.asarray(rows.prompt_mask),
        "completion_ids": jnp.asarray(rows.completion_ids),
        "completion_mask": jnp.asarray(rows.completion_mask),
        "advantages": jnp.asarray(rows.advantages),
        "ref_per_token_logps": None,
        "old_per_token_logps": jnp.asarray(rows.rollout_logps),
        "rollout_per_token_logps": jnp.asarray(rows.rollout_logps),
    }
    return TrainExample(**{**base, **fields})


def settings(directory: Path, **algorithm: Any) -> GrpoAlgorithmConfig:
    config = GrpoAlgorithmConfig.from_section(make_config(directory, {"algorithm": algorithm}).algorithm)
    config.temperature = TEMPERATURE  # type: ignore[attr-defined]  # Tunix's learner sets it from the rollout's
    return config


def objective(case: dict[str, Any], aggregation: str, low: float, high: float, beta: float, kl_kind: str) -> float:
    """- E[min(r A, clip(r) A) - beta KL]: DeepSeekMath (arXiv 2402.03300), equation 3, row by row."""
    losses = []
    for now, old, reference, advantage in zip(case["now"], case["old"], case["reference"], ADVANTAGES, strict=True):
        ratio = np.exp(now - old)
        gain = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
        gap = reference - now
        kl = {"low_var_kl": np.exp(gap) - gap - 1, "kl": -gap, "mse_kl": gap**2 / 2}[kl_kind]
        losses.append(-gain + beta * kl)
    if aggregation == "token-mean":
        return float(np.concatenate(losses).mean())
    if aggregation == "sequence-mean-token-mean":
        return float(np.mean([line.mean() for line in losses]))
    return float(np.mean([line.sum() / 5 for line in losses]))  # token-scale: by rollout.max_new_tokens


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale"])
@pytest.mark.parametrize(
    ("low", "high", "beta", "kl_kind"),
    [(0.2, None, 0.0, "kl"), (0.1, 0.4, 0.0, "kl"), (0.2, 0.28, 0.5, "low_var_kl"), (0.2, None, 0.5, "mse_kl")],
)
def test_loss_is_the_clipped_objective(
    case: dict[str, Any], tmp_path: Path, aggregation: str, low: float, high: float | None, beta: float, kl_kind: str
) -> None:
    config = settings(
        tmp_path, clip_low=low, clip_high=high, beta=beta, kl_estimator=kl_kind, loss_aggregation=aggregation
    )
    fields = {"ref_per_token_logps": padded(case["reference"])} if beta else {}
    loss, aux = loss_with_agreement(MODEL, example(case["rows"], **fields), config, PAD, EOS)
    expected = objective(case, aggregation, low, low if high is None else high, beta, kl_kind)
    assert float(loss) == pytest.approx(expected, abs=2e-6)
    clipped = [
        (a > 0) & (np.exp(n - o) > 1 + (low if high is None else high)) | (a < 0) & (np.exp(n - o) < 1 - low)
        for n, o, a in zip(case["now"], case["old"], ADVANTAGES, strict=True)
    ]
    assert 0 < float(aux["pg_clipfrac"]) == pytest.approx(np.concatenate(clipped).mean())


def test_kl_is_k3_over_the_tokens(case: dict[str, Any], tmp_path: Path) -> None:
    config = settings(tmp_path, beta=0.1)
    fields = {"ref_per_token_logps": padded(case["reference"])}
    _, aux = loss_with_agreement(MODEL, example(case["rows"], **fields), config, PAD, EOS)
    gap = np.concatenate(case["reference"]) - np.concatenate(case["now"])
    assert float(aux["kl"]) == pytest.approx(np.mean(np.exp(gap) - gap - 1), abs=1e-6)


def test_measuring_changes_nothing_and_is_given_back(case: dict[str, Any], tmp_path: Path) -> None:
    config, batch = settings(tmp_path), example(case["rows"])
    before = algo_core.common.compute_per_token_logps
    loss, aux = loss_with_agreement(MODEL, batch, config, PAD, EOS)
    assert algo_core.common.compute_per_token_logps is before
    plain_loss, plain_aux = algo_core.grpo_loss_fn(MODEL, batch, algo_config=config, pad_id=PAD, eos_id=EOS)
    assert float(loss) == float(plain_loss)
    assert {name: float(aux[name]) for name in plain_aux} == {n: float(v) for n, v in plain_aux.items()}
    gap = np.concatenate(case["now"]) - np.concatenate(case["old"])
    assert float(aux["agreement"].tokens) == sum(LENGTHS)
    assert float(aux["agreement"].abs_sum) == pytest.approx(np.abs(gap).sum(), abs=2e-5)


def test_importance_weights_multiply_the_token_losses(case: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    engine = [line + rng.uniform(-1.0, 1.0, len(line)) for line in case["old"]]
    weights = truncated_weights(padded(case["old"]), padded(engine), cap=1.5)
    by_hand = [np.minimum(np.exp(o - e), 1.5) for o, e in zip(case["old"], engine, strict=True)]
    assert any((line == 1.5).any() for line in by_hand)  # the cap is reached
    np.testing.assert_allclose(np.asarray(weights)[1], by_hand[1], rtol=1e-5)
    loss, _ = loss_with_agreement(
        MODEL, example(case["rows"], sampler_is_weights=weights), settings(tmp_path), PAD, EOS
    )
    means = []
    for now, old, weight, advantage in zip(case["now"], case["old"], by_hand, ADVANTAGES, strict=True):
        ratio = np.exp(now - old)
        means.append((-np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage) * weight).mean())
    assert float(loss) == pytest.approx(np.mean(means), abs=2e-6)


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


def test_no_gradient_flows_through_the_measurement() -> None:
    def measured(logps: jax.Array) -> jax.Array:
        return sum(agreement_sums(logps, jnp.zeros((1, 2)), jnp.ones((1, 2), bool)), jnp.zeros(()))

    assert np.asarray(jax.grad(measured)(jnp.full((1, 2), -1.0))).tolist() == [[0.0, 0.0]]
