"""The objective against an implementation in NumPy and float64."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tpu_grpo.learner.tunix_learner import GrpoAlgorithmConfig, TrainExample, truncated_weights
from tunix.rl import algo_core, function_registry

from tests.learner.toy import EOS, PAD, VOCAB, make_config, make_mesh, make_model, model_logps
from tpu_grpo.learner.loss import policy_loss
from tpu_grpo.learner.rows import RowShape, TrainRows, group_advantages, train_rows
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
    loss, aux = policy_loss(MODEL, example(case["rows"], **fields), config, PAD, EOS)
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
    _, aux = policy_loss(MODEL, example(case["rows"], **fields), config, PAD, EOS)
    gap = np.concatenate(case["reference"]) - np.concatenate(case["now"])
    assert float(aux["kl"]) == pytest.approx(np.mean(np.exp(gap) - gap - 1), abs=1e-6)


def gradient_of(loss: Any, batch: TrainExample, config: GrpoAlgorithmConfig) -> tuple[Any, dict[str, Any], Any]:
    """Loss, what is measured, and the gradient by every parameter, operation by operation."""

    def of_model(model: Any) -> Any:
        return loss(model, batch, algo_config=config, pad_id=PAD, eos_id=EOS)

    (value, aux), gradient = nnx.value_and_grad(of_model, has_aux=True)(MODEL)
    return value, aux, {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradient)}


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale"])
@pytest.mark.parametrize(("name", "tunix_name"), [("grpo", "grpo"), ("dr_grpo", "drgrpo"), ("rloo", "rloo")])
@pytest.mark.parametrize(("beta", "weighted"), [(0.0, False), (0.5, False), (0.0, True), (0.5, True)])
def test_loss_and_gradient_are_those_of_tunix_to_the_bit(
    case: dict[str, Any], tmp_path: Path, name: str, tunix_name: str, aggregation: str, beta: float, weighted: bool
) -> None:
    config = settings(tmp_path, name=name, loss_aggregation=aggregation, beta=beta, clip_low=0.1, clip_high=0.4)
    rewards = np.array([0.3, 1.0, 2.0, -1.5])
    ours = group_advantages(rewards, group_size=2, algorithm=config.algorithm)
    theirs = np.asarray(function_registry.get_advantage_estimator(tunix_name)(rewards=rewards, num_generations=2))
    assert ours.tobytes() == theirs.tobytes()
    weights = jnp.asarray(np.linspace(0.2, 2.0, 20, dtype=np.float32).reshape(4, 5))
    batch = example(
        case["rows"],
        advantages=jnp.asarray(ours, jnp.float32),
        ref_per_token_logps=padded(case["reference"]) if beta else None,
        sampler_is_weights=weights if weighted else None,
    )
    loss, aux, gradient = gradient_of(policy_loss, batch, config)
    their_loss, their_aux, their_gradient = gradient_of(algo_core.grpo_loss_fn, batch, config)
    assert float(loss) == float(their_loss)
    assert {path: line.tobytes() for path, line in gradient.items()} == {
        path: line.tobytes() for path, line in their_gradient.items()
    }
    measured = set(aux) & set(their_aux)
    assert measured == {"kl", "entropy", "pg_clipfrac"}
    assert {part: float(aux[part]) for part in measured} == {part: float(their_aux[part]) for part in measured}
    assert any(line.any() for line in gradient.values())


def test_agreement_is_measured_on_the_way(case: dict[str, Any], tmp_path: Path) -> None:
    _, aux = policy_loss(MODEL, example(case["rows"]), settings(tmp_path), PAD, EOS)
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
    loss, _ = policy_loss(MODEL, example(case["rows"], sampler_is_weights=weights), settings(tmp_path), PAD, EOS)
    means = []
    for now, old, weight, advantage in zip(case["now"], case["old"], by_hand, ADVANTAGES, strict=True):
        ratio = np.exp(now - old)
        means.append((-np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage) * weight).mean())
    assert float(loss) == pytest.approx(np.mean(means), abs=2e-6)
