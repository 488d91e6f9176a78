"""The loss against NumPy and float64 and against Tunix's own, and what order and cutting of rows leave alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl import algo_core, function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

from tests.learner.toy import EOS, PAD, VOCAB, make_config, make_mesh, make_model, model_logps, settings_of
from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.loss import LossSettings, LossSums, TrainBatch, policy_loss
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.rows import Packing, RowShape, train_rows
from tpu_grpo.learner.signal import group_advantages
from tpu_grpo.records.stages import Completion

LENGTHS = (1, 5, 3, 2)
ADVANTAGES = np.array([1.5, -0.5, 2.0, -1.0])
TEMPERATURE = 0.7
OTHERS = ("prompt-mean-token-mean", "sequence-mean-token-sum")
AGGREGATIONS = [name for name in get_args(LossAggregation) if name not in OTHERS]
"""Tunix has these, too; the others are nothing but other weights, see test_rows.py."""


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(make_mesh(1), scale=0.1)  # two programs round its small logits alike


@pytest.fixture(scope="module")
def case(model: Any) -> dict[str, Any]:
    """Uneven rows; the old policy is off by up to 0.6 in both directions, so every branch of the clip is taken."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (6, 1, 3, 4)]
    completions = [rng.integers(3, VOCAB, n).tolist() for n in LENGTHS]
    now = model_logps(model, prompts, completions, TEMPERATURE)
    old = [line + rng.uniform(-0.6, 0.6, len(line)) for line in now]
    reference = [line + rng.uniform(-0.3, 0.3, len(line)) for line in now]
    made = [
        Completion(np.array(c, np.int32), o.astype(np.float32), "length", 0)
        for c, o in zip(completions, old, strict=True)
    ]
    return {"prompts": prompts, "completions": made, "now": now, "old": old, "reference": reference}


SHAPE = RowShape(6, 5, 16, 2)
"""The four sequences of `case`, of 7, 6, 6 and 6 tokens, share two rows."""


def rows_of(
    case: dict[str, Any], aggregation: LossAggregation, advantages: np.ndarray = ADVANTAGES
) -> tuple[TrainBatch, Packing]:
    return train_rows(case["prompts"], case["completions"], advantages, SHAPE, aggregation)


def packed(lines: list[np.ndarray], case: dict[str, Any]) -> jax.Array:
    """Put one line of numbers a completion where its tokens are."""
    _, packing = rows_of(case, "token-mean")
    table = np.zeros((packing.count, SHAPE.tokens), np.float32)
    for line, prompt, row, start in zip(lines, case["prompts"], packing.rows, packing.starts, strict=True):
        table[row, start + len(prompt) : start + len(prompt) + len(line)] = line
    return jnp.asarray(table)


def batch_of(rows: TrainBatch, **fields: Any) -> TrainBatch:
    batch = jax.tree.map(jnp.asarray, rows)
    return replace(batch, **{"old_logps": batch.rollout_logps, **fields})


def make_settings(directory: Path, **algorithm: Any) -> LossSettings:
    return settings_of(make_config(directory, {"algorithm": algorithm}).algorithm, TEMPERATURE)


@partial(jax.jit, static_argnums=3)
def _gradient(definition: Any, state: Any, batch: TrainBatch, settings: LossSettings) -> Any:
    def loss(state: Any) -> Any:
        return policy_loss(nnx.merge(definition, state), batch, settings)

    return jax.value_and_grad(loss, has_aux=True)(state)


def gradient_of(
    model: nnx.Module, batch: TrainBatch, settings: LossSettings
) -> tuple[float, LossSums, dict[str, np.ndarray]]:
    """(loss, what is measured, the gradient by parameter)."""
    (loss, sums), gradient = _gradient(*nnx.split(model), batch, settings)
    return float(loss), sums, by_name(gradient)


def distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """The norm of the difference over the norm, in float64."""
    assert left.keys() == right.keys()
    a, b = (np.concatenate([np.float64(side[name]).ravel() for name in sorted(side)]) for side in (left, right))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# --- against NumPy ---------------------------------------------------------------------------------------------------


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


@pytest.mark.full
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("low", "high", "beta", "kl_kind"),
    [(0.2, None, 0.0, "kl"), (0.1, 0.4, 0.0, "kl"), (0.2, 0.28, 0.5, "low_var_kl"), (0.2, None, 0.5, "mse_kl")],
)
def test_loss_is_the_clipped_objective(
    model: Any, case: dict[str, Any], tmp_path: Path, aggregation: Any, low: float, high: Any, beta: float, kl_kind: str
) -> None:
    settings = make_settings(tmp_path, clip_low=low, clip_high=high, beta=beta, kl_estimator=kl_kind)
    fields = {"reference_logps": packed(case["reference"], case)} if beta else {}
    loss, sums = policy_loss(model, batch_of(rows_of(case, aggregation)[0], **fields), settings)
    upper = low if high is None else high
    assert (
        float(loss)
        == float(sums.loss)
        == pytest.approx(objective(case, aggregation, low, upper, beta, kl_kind), abs=2e-6)
    )
    clipped = [
        (a > 0) & (np.exp(n - o) > 1 + upper) | (a < 0) & (np.exp(n - o) < 1 - low)
        for n, o, a in zip(case["now"], case["old"], ADVANTAGES, strict=True)
    ]
    assert 0 < float(sums.clipped) == np.concatenate(clipped).sum()


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["low_var_kl", "kl", "mse_kl"])
def test_kl_is_added_up_over_the_tokens(model: Any, case: dict[str, Any], tmp_path: Path, estimator: str) -> None:
    batch = batch_of(rows_of(case, "token-mean")[0], reference_logps=packed(case["reference"], case))
    _, sums = policy_loss(model, batch, make_settings(tmp_path, beta=0.1, kl_estimator=estimator))
    gap = np.concatenate(case["reference"]) - np.concatenate(case["now"])
    kl = {"low_var_kl": np.exp(gap) - gap - 1, "kl": -gap, "mse_kl": gap**2 / 2}[estimator]
    assert float(sums.kl) == pytest.approx(kl.sum(), abs=1e-5)


@pytest.mark.full
def test_kl_is_of_all_sampled_tokens(model: Any, case: dict[str, Any], tmp_path: Path) -> None:
    """As the entropy is, and the number of tokens by which both are divided; the loss is of those that count."""
    counted = np.array([True, False, True, False])
    rows, _ = train_rows(case["prompts"], case["completions"], ADVANTAGES, SHAPE, "token-mean", counted)
    batch = batch_of(rows, reference_logps=packed(case["reference"], case))
    _, sums = policy_loss(model, batch, make_settings(tmp_path, beta=0.1, kl_estimator="kl"))
    gap = np.concatenate(case["now"]) - np.concatenate(case["reference"])
    assert float(sums.kl) / float(sums.agreement.tokens) == pytest.approx(gap.mean(), abs=1e-6)


def test_agreement_is_measured_on_the_way(model: Any, case: dict[str, Any], tmp_path: Path) -> None:
    _, sums = policy_loss(model, batch_of(rows_of(case, "token-mean")[0]), make_settings(tmp_path))
    gap = np.concatenate(case["now"]) - np.concatenate(case["old"])
    assert float(sums.agreement.tokens) == sum(LENGTHS)
    assert float(sums.agreement.abs_sum) == pytest.approx(np.abs(gap).sum(), abs=2e-5)


@pytest.mark.full
def test_bins_of_the_whole_vocabulary_have_no_rest(model: Any, case: dict[str, Any]) -> None:
    """Two teachers whose bins are all tokens: what stands behind these has no part in the divergence."""
    rows, _ = rows_of(case, "token-mean")
    of_each = (*rows.weights.shape, 2)
    taught = {
        "teacher_ids": jnp.broadcast_to(jnp.arange(VOCAB, dtype=jnp.int32), (*of_each, VOCAB)),
        "teacher_weights": jnp.ones(of_each),
    }
    uniform, losses = jnp.full((*of_each, VOCAB), -np.log(VOCAB)), []
    settings = settings_of(name="gkd", options={"mix": 0.0, "top_k": VOCAB})
    for rest in (0.0, -20.0):
        top = jnp.concatenate([uniform, jnp.full((*of_each, 1), rest)], axis=-1)
        losses.append(float(policy_loss(model, batch_of(rows, teacher_top=top, **taught), settings)[0]))
    assert losses[0] == losses[1] > 0.0


def test_importance_weights_multiply_the_token_losses(model: Any, case: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    engine = [line + rng.uniform(-1.0, 1.0, len(line)) for line in case["old"]]
    by_hand = [np.minimum(np.exp(o - e), 1.5) for o, e in zip(case["old"], engine, strict=True)]
    assert any((line == 1.5).any() for line in by_hand)  # the cap is reached
    given = [rng.uniform(0.0, 1.0, len(line)) for line in by_hand]
    batch = batch_of(
        rows_of(case, "sequence-mean-token-mean")[0],
        rollout_logps=packed(engine, case),
        importance=packed(given, case),
        old_logps=packed(case["old"], case),
        reference_logps=packed(case["reference"], case),
    )
    section = {"old_policy": "trainer", "importance_cap": 1.5, "beta": 0.3, "kl_estimator": "mse_kl"}
    loss, _ = policy_loss(model, batch, make_settings(tmp_path, **section))
    means, weights = [], [of_engine * more for of_engine, more in zip(by_hand, given, strict=True)]
    for now, old, reference, weight, advantage in zip(
        case["now"], case["old"], case["reference"], weights, ADVANTAGES, strict=True
    ):
        ratio = np.exp(now - old)
        surrogate = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        means.append((surrogate * weight + 0.3 * (reference - now) ** 2 / 2).mean())  # the penalty is not weighed
    assert float(loss) == pytest.approx(np.mean(means), abs=2e-6)


# --- cutting, order, and rows that do not count ----------------------------------------------------------------------


class Table(nnx.Module):
    """The output head of a `Bigram`."""

    def __init__(self, table: np.ndarray):
        self.w = nnx.Param(jnp.asarray(table, jnp.float32))

    def __call__(self, chosen: jax.Array) -> jax.Array:
        return chosen @ self.w[...]


class OneHot(nnx.Module):
    """An embedding that is not trained."""

    def __init__(self) -> None:
        self.input_embedding = nnx.Variable(jnp.eye(VOCAB))


class Bigram(nnx.Module):
    """Scores of the next token from the token before it alone, so that NumPy follows loss and gradient with ease."""

    def __init__(self, table: np.ndarray):
        self.embedder, self.lm_head = OneHot(), Table(table)

    def __call__(self, tokens: jax.Array, positions: Any, cache: Any, attention_mask: Any) -> tuple[jax.Array, None]:
        return self.lm_head(self.embedder.input_embedding[(tokens,)]), None


TABLE = np.random.default_rng(4).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def bigram() -> tuple[Bigram, TrainBatch, tuple[float, np.ndarray]]:
    """A model, twelve rows of it, and their loss and its gradient by the table in float64."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in rng.integers(1, 7, 12)]
    ids = [rng.integers(3, VOCAB, n) for n in rng.integers(1, 6, 12)]
    advantages = rng.normal(size=12).astype(np.float32)
    logs = np.float64(TABLE) / TEMPERATURE
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    loss, gradient, completions, tokens = 0.0, np.zeros_like(logs), [], sum(map(len, ids))
    for prompt, line, advantage in zip(prompts, ids, advantages.astype(np.float64).tolist(), strict=True):
        before = np.array([prompt[-1], *line[:-1]])
        now = logs[before, line]
        old = (now + rng.uniform(-0.5, 0.5, len(line))).astype(np.float32)
        ratio = np.exp(now - np.float64(old))
        plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2)
        loss += np.maximum(plain, clipped).sum() / tokens
        for row, token, slope in zip(before, line, np.where(clipped > plain, 0.0, plain) / tokens, strict=True):
            gradient[row] -= slope * np.exp(logs[row]) / TEMPERATURE
            gradient[row, token] += slope / TEMPERATURE
        completions.append(Completion(line.astype(np.int32), old, "length", 0))
    rows, _ = train_rows(prompts, completions, advantages, RowShape(6, 5, 11, 12), "token-mean")
    return Bigram(TABLE), batch_of(rows), (loss, gradient)


def pick(batch: TrainBatch, chosen: Any) -> TrainBatch:
    return jax.tree.map(lambda column: column[chosen], batch)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (1,) * 12, (1, 5, 4, 2)], ids=str)
def test_any_cut_into_micro_batches_adds_up_to_the_whole(bigram: Any, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    model, batch, (loss, gradient) = bigram
    settings, ends = make_settings(tmp_path), np.cumsum(sizes)
    parts = [
        gradient_of(model, pick(batch, slice(end - size, end)), settings) for end, size in zip(ends, sizes, strict=True)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-6)
    found = np.sum([part[2]["lm_head.w"] for part in parts], axis=0)  # float32, as the learner adds up
    assert distance({"": found}, {"": gradient}) < 1e-6
    assert sum(float(part[1].agreement.tokens) for part in parts) == np.asarray(batch.rows.mask).sum()


@pytest.mark.full
def test_the_order_of_rows_does_not_matter(bigram: Any, tmp_path: Path) -> None:
    model, batch, (loss, gradient) = bigram
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(12)
        found, _, slopes = gradient_of(model, pick(batch, order), make_settings(tmp_path))
        assert found == pytest.approx(loss, rel=1e-6)
        assert distance({"": slopes["lm_head.w"]}, {"": gradient}) < 1e-6


@pytest.mark.full
def test_rows_that_do_not_count_change_nothing_whatever_their_loss_is(bigram: Any, tmp_path: Path) -> None:
    """A gradient of 0 times infinity would be none: nothing of such a row may come into the sums."""
    model, batch, _ = bigram
    settings = make_settings(tmp_path, beta=0.2)
    batch = replace(batch, reference_logps=batch.old_logps - 0.1, importance=jnp.ones_like(batch.old_logps))
    idle = pick(batch, slice(0, 3))
    nothing = jnp.zeros_like(idle.rows.mask)
    idle = replace(idle, weights=jnp.zeros_like(idle.weights), rows=idle.rows._replace(mask=nothing))
    loss, sums, gradient = gradient_of(model, batch, settings)
    for field in ("old_logps", "rollout_logps", "reference_logps", "advantages", "importance"):
        for value in (np.inf, -np.inf, 1e30, np.nan):
            wild = replace(idle, **dict[str, Any]({field: jnp.full_like(getattr(idle, field), value)}))
            both = jax.tree.map(lambda left, right: jnp.concatenate([left, right]), batch, wild)
            found, with_wild, slopes = gradient_of(model, both, settings)
            assert found == pytest.approx(loss, rel=1e-6), (field, value)
            assert distance(slopes, gradient) < 1e-6, (field, value)
            for left, right in zip(jax.tree.leaves(with_wild), jax.tree.leaves(sums), strict=True):
                assert float(left) == pytest.approx(float(right), rel=1e-5)


# --- against Tunix's own ---------------------------------------------------------------------------------------------


def padded(lines: list[np.ndarray]) -> jax.Array:
    return jnp.asarray([np.pad(line, (0, 5 - len(line))) for line in lines], jnp.float32)


def tunix_gradient(model: nnx.Module, case: dict[str, Any], fields: dict[str, Any], config: Any) -> Any:
    """(loss, what is measured, the gradient by parameter) of Tunix's ``grpo_loss_fn``."""
    prompts = jnp.asarray([[PAD] * (6 - len(prompt)) + prompt for prompt in case["prompts"]])
    completions = padded([completion.token_ids for completion in case["completions"]]).astype(jnp.int32)
    ids = {"prompt_ids": prompts, "completion_ids": completions}
    masks = {"prompt_mask": prompts != PAD, "completion_mask": jnp.arange(5) < jnp.asarray(LENGTHS)[:, None]}
    example = TrainExample(**ids, **masks, **fields)
    definition, state = nnx.split(model)

    @jax.jit
    def gradient(state: Any) -> Any:
        def loss(state: Any) -> Any:
            model = nnx.merge(definition, state)
            return algo_core.grpo_loss_fn(model, example, algo_config=config, pad_id=PAD, eos_id=EOS)

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, aux), slopes = gradient(state)
    return float(loss), aux, by_name(slopes)


@pytest.mark.full
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "tunix_name"), [("grpo", "grpo"), ("dr_grpo", "drgrpo"), ("rloo", "rloo")])
@pytest.mark.parametrize(
    ("beta", "weighted"),
    [(0.5, True), *(pytest.param(*some, marks=pytest.mark.slow) for some in ((0.0, False), (0.5, False), (0.0, True)))],
)
def test_loss_and_gradient_are_those_of_tunix(
    case: dict[str, Any], tmp_path: Path, name: str, tunix_name: str, aggregation: Any, beta: float, weighted: bool
) -> None:
    """Tunix divides sums by counts where ours adds up weights, so that the last bits may differ."""
    compare_with_tunix(Bigram(TABLE), case, tmp_path, name, tunix_name, aggregation, beta, weighted)


def compare_with_tunix(
    model: nnx.Module,
    case: Any,
    directory: Path,
    name: str,
    tunix_name: str,
    aggregation: Any,
    beta: float,
    weighted: bool,
) -> None:
    options = {"name": name, "loss_aggregation": aggregation, "beta": beta, "clip_low": 0.1, "clip_high": 0.4}
    settings, rewards = make_settings(directory, **options), np.array([0.3, 1.0, 2.0, -1.5])
    algorithm: Any = settings.algorithm
    advantages = group_advantages(rewards, group_size=2, algorithm=algorithm)
    theirs = np.asarray(function_registry.get_advantage_estimator(tunix_name)(rewards=rewards, num_generations=2))
    assert advantages.tobytes() == theirs.tobytes()
    weights = [np.linspace(0.2, 2.0, 5, dtype=np.float32)[:count] for count in LENGTHS]
    fields = {
        "importance": packed(weights, case) if weighted else None,
        "reference_logps": packed(case["reference"], case) if beta else None,
    }
    found, sums, gradient = gradient_of(model, batch_of(rows_of(case, aggregation, advantages)[0], **fields), settings)
    config: Any = GRPOConfig(beta=beta, epsilon=0.1, kl_loss_mode="low_var_kl", loss_agg_mode=aggregation)
    config.epsilon_high, config.temperature = 0.4, TEMPERATURE
    fields = {
        "advantages": jnp.asarray(advantages, jnp.float32),
        "ref_per_token_logps": padded(case["reference"]) if beta else None,
        "old_per_token_logps": padded([completion.logprobs for completion in case["completions"]]),
        "sampler_is_weights": padded(weights) if weighted else None,
    }
    loss, aux, slopes = tunix_gradient(model, case, fields, config)
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance(gradient, slopes) < 1e-6
    tokens = sum(LENGTHS)
    measured = {"kl": sums.kl / tokens, "pg_clipfrac": sums.clipped / tokens}
    if aggregation == "token-mean":  # Tunix aggregates the entropy as the loss
        measured["entropy"] = sums.entropy / tokens
    assert {part: float(value) for part, value in measured.items()} == pytest.approx(
        {part: float(aux[part]) for part in measured}, rel=1e-6, abs=1e-7
    )
