"""Every objective, through packed rows and the whole loss, against its paper's formula in NumPy and float64.

Gradients are derived by hand: `terms` gives the loss of each token of a completion, and its slope by each token's
log-probability.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner.test_loss import batch_of, distance, pick
from tests.learner.toy import settings_of
from tpu_grpo.algorithms import SHIPPED, Sequences, open_algorithm, token_ratio
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.config.learning_sections import TAUGHT
from tpu_grpo.learner import loss as loss_module
from tpu_grpo.learner.batches import with_top_entropy
from tpu_grpo.learner.forward import TokenLogprobs
from tpu_grpo.learner.loss import LossSettings, TrainBatch, policy_loss
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.records.stages import Completion

LONGEST = 7
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"clip_low": 0.1, "clip_high": 0.3}),
    "dual_clip": ("grpo", {"dual_clip": 1.4}),
    "dual_clip_below": ("grpo", {"dual_clip": 1.1}),
    "delta": ("grpo", {"delta": 1.4}),
    "dr_grpo": ("dr_grpo", {}),
    "rloo": ("rloo", {}),
    "dapo": ("dapo", {}),
    "gspo": ("gspo", {}),
    "gspo_wide": ("gspo", {"clip_low": 0.1, "clip_high": 0.05, "dual_clip": 1.1}),
    "gspo_token": ("gspo", {"clip_low": 0.1, "clip_high": 0.05, "options": {"per_token": True}}),
    "luspo": ("luspo", {}),
    "luspo_wide": ("luspo", {"clip_low": 0.1, "clip_high": 0.05, "dual_clip": 1.1}),
    "cispo": ("cispo", {"options": {"cap": 1.2}}),
    "cispo_below_one": ("cispo", {"options": {"cap": 0.28}}),
    "cispo_two_sided": ("cispo", {"clip_low": 0.2, "clip_high": 0.1}),
    "dppo": ("dppo", {"options": {"mask_low": 0.03, "mask_high": 0.02, "kl_weight": 0.3}}),
    "sapo": ("sapo", {}),
    "sapo_sharp": ("sapo", {"options": {"temperature_positive": 3.0, "temperature_negative": 5.0}}),
    "vespo": ("vespo", {}),
    "vespo_flat": (
        "vespo",
        {"options": {"k_positive": 1, "lambda_positive": 0.5, "k_negative": 0.7, "lambda_negative": 1.5}},
    ),
    "reinforce": ("reinforce", {}),
    "reinforce_ratio": ("reinforce", {"iterations": 2, "options": {"importance_sampling": True}}),
}
MEANS = {
    "grpo": "sequence",
    "gspo": "sequence",
    "sapo": "sequence",
    "luspo": "sum",
    "vespo": "token",
    "dapo": "token",
    "cispo": "token",
    "dppo": "token",
    "dr_grpo": "scale",
    "rloo": "scale",
    "reinforce": "scale",
}


# --- the formulas ----------------------------------------------------------------------------------------------------


def surrogate(ratio: np.ndarray, a: float, low: float, high: float, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Minus the clipped surrogate, and its slope by the logarithm of the ratio."""
    if a > 0:
        return -a * np.minimum(ratio, 1 + high), np.where(ratio < 1 + high, -a * ratio, 0.0)
    kept = (ratio > 1 - low) & (ratio < bound)
    return -a * np.minimum(np.maximum(ratio, 1 - low), bound), np.where(kept, -a * ratio, 0.0)


def terms(name: str, section: AlgorithmSection, now: Any, old: Any, a: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss and slope of the tokens that count of one completion with the advantage ``a``."""
    options, ratio = section.options, np.exp(now - old)
    defaults = {"gspo": (3e-4, 4e-4), "luspo": (2e-3, 2.5e-3), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    low, high = section.clip_low or defaults[0], section.clip_high or defaults[1]
    bound = section.dual_clip or section.delta or np.inf
    match name:
        case "grpo" | "dr_grpo" | "rloo" | "dapo":
            return surrogate(ratio, a, low, high, bound)
        case "gspo" | "luspo":  # the slope by one token's log-probability: 1 / n of each of the n equal losses
            return surrogate(np.full_like(now, np.exp(np.mean(now - old))), a, low, high, bound)
        case "cispo":
            lowest = 1 - section.clip_low if section.clip_low else 0.0
            highest = 1 + section.clip_high if section.clip_high else options["cap"]
            weight = np.minimum(np.maximum(ratio, lowest), highest)
            return -weight * a * now, -weight * a
        case "dppo":
            moved = np.exp(now) - np.exp(old)
            dropped = moved > options["mask_high"] if a > 0 else moved < -options["mask_low"]
            dropped = dropped & (a != 0)
            penalty = options["kl_weight"]
            slope = np.where(dropped, 0.0, -a * ratio) + 2 * penalty * (now - old)
            return np.where(dropped, 0.0, -a * ratio) + penalty * (now - old) ** 2, slope
        case "sapo":
            t = options.get("temperature_positive", 1.0) if a > 0 else options.get("temperature_negative", 1.05)
            gate = 1 / (1 + np.exp(-t * (ratio - 1)))
            return -4 / t * gate * a, -4 * gate * (1 - gate) * ratio * a
        case "vespo":
            chosen = [options.get(f"{key}_{'positive' if a >= 0 else 'negative'}") for key in ("k", "lambda")]
            (k, c), s = (chosen if options else (2, 3) if a >= 0 else (3, 2)), ratio.prod()
            weight = s**k * np.exp(c * (1 - s))
            return -weight * a * now, np.full_like(now, -weight * a)
        case _:
            weighted = bool(options.get("importance_sampling"))
            return (-a * ratio, -a * ratio) if weighted else (-a * now, np.full_like(now, -a))


# --- twelve completions of three prompts' groups ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Uneven completions; of one a token in the middle does not count, of another none does.

    The "model" is the table of the log-probabilities itself: the ids of sampled tokens are places in it.
    """

    now: np.ndarray
    """float32 [12, LONGEST]."""
    old: list[np.ndarray]
    advantages: np.ndarray
    counts: list[np.ndarray]


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(11)
    now = rng.uniform(-4.0, -0.1, (12, LONGEST)).astype(np.float32)
    lengths = (1, 7, 3, 5, 2, 7, 4, 1, 6, 3, 2, 5)
    old = [(line[:n] + rng.uniform(-0.5, 0.5, n)).astype(np.float32) for line, n in zip(now, lengths, strict=True)]
    advantages = np.array([0.8, -0.7, 1.3, -1.1, 0, 0, 0, 0, 0.6, -1.7, -0.8, 1.2], np.float32)  # one group is even
    counts = [np.ones(n, bool) for n in lengths]
    counts[1][3] = False
    counts[9][:] = False
    return Case(now, old, advantages, counts)


def completions_of(case: Case) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, float]]:
    """Number, tokens that count, their log-probabilities now and then in float64, and the advantage."""
    for index, (old, advantage) in enumerate(zip(case.old, case.advantages.tolist(), strict=True)):
        counts = case.counts[index]
        now = case.now[index, : len(old)]
        yield index, counts, now[counts].astype(np.float64), old[counts].astype(np.float64), advantage


def expected(case: Case, name: str, section: AlgorithmSection) -> tuple[float, np.ndarray]:
    """The step's loss, and its gradient by the table."""
    loss, gradient, lengths = 0.0, np.zeros(case.now.shape), [len(line) for line in case.old]
    for index, counts, now, old, advantage in completions_of(case):
        if counts.any():
            losses, slopes = terms(name, section, now, old, advantage)
            means = {"sequence": 12 * lengths[index], "token": sum(lengths), "sum": 12, "scale": 12 * LONGEST}
            divisor = means[MEANS[name]]
            loss += losses.sum() / divisor
            gradient[index, np.flatnonzero(counts)] = slopes / divisor
    return float(loss), gradient


def batch_in_order(case: Case, aggregation: Any, order: Any) -> TrainBatch:
    """Pack the completions behind prompts of one to four tokens."""
    prompts = [[0] * (1 + index % 4) for index in order]
    completions = [
        Completion(index * LONGEST + np.arange(len(case.old[index]), dtype=np.int32), case.old[index], "length", 0)
        for index in order
    ]
    rows, packing = train_rows(prompts, completions, case.advantages[order], RowShape(4, LONGEST, 16, 2), aggregation)
    for place, index in enumerate(order):
        start = packing.starts[place] + len(prompts[place])
        rows.weights[packing.rows[place], start : start + len(case.old[index])] *= case.counts[index]
    return batch_of(rows)


def with_idle_rows(batch: TrainBatch, **changes: Any) -> TrainBatch:
    """The batch with two more rows, in which no token counts, whatever else is said of them."""
    idle = replace(pick(batch, slice(0, 2)), weights=jnp.zeros((2, 16)), **changes)
    return jax.tree.map(lambda left, right: jnp.concatenate([left, right]), batch, idle)


def look_up(table: Any, rows: Any, **_: Any) -> TokenLogprobs:
    found = jnp.where(rows.mask, table.reshape(-1)[rows.token_ids], 0.0)
    return TokenLogprobs(found, jnp.zeros_like(found))


@partial(jax.jit, static_argnums=2)
def gradient_of(table: Any, batch: TrainBatch, settings: LossSettings) -> Any:
    with mock.patch.object(loss_module, "run_model", look_up):
        return jax.value_and_grad(lambda t: policy_loss(t, batch, settings), has_aux=True)(table)


def added_up(batch: TrainBatch, case: Case, settings: LossSettings) -> tuple[float, np.ndarray]:
    """Loss and gradient of micro-batches of two rows, as the learner adds them up."""
    parts = [pick(batch, slice(start, start + 2)) for start in range(0, len(batch.weights), 2)]
    found = [gradient_of(case.now, part, settings) for part in parts]
    return sum(float(loss) for (loss, _), _ in found), np.sum([np.asarray(gradient, float) for _, gradient in found], 0)


def test_every_objective_is_tested_here() -> None:
    assert {name for name, _ in CASES.values()} == set(SHIPPED) - {*TAUGHT} == set(MEANS)


@pytest.mark.full
@pytest.mark.parametrize("label", CASES)
def test_loss_and_gradient_are_those_of_the_paper(case: Case, label: str) -> None:
    name, chosen = CASES[label]
    section = AlgorithmSection.model_validate({"name": name, **chosen})
    settings = settings_of(section)
    aggregation = settings.algorithm.aggregation
    loss, gradient = expected(case, name, section)
    batch = batch_in_order(case, aggregation, np.arange(12))
    assert len(batch.weights) < 12 * 2 / 3  # sequences do share rows
    program: Any = gradient_of
    program.clear_cache()
    found, slopes = added_up(batch, case, settings)
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance({"": slopes}, {"": gradient}) < 1e-6

    shuffled = batch_in_order(case, aggregation, np.random.default_rng(1).permutation(12))
    both = with_idle_rows(shuffled, old_logps=jnp.full((2, 16), np.inf))
    found, slopes = added_up(both, case, settings)
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance({"": slopes}, {"": gradient}) < 1e-6
    assert program._cache_size() == 1  # one program, whatever the lengths


@pytest.mark.full
@pytest.mark.parametrize("label", sorted(CASES.keys() - {"dppo"}))  # which takes the engine's old policy only
def test_an_update_may_take_its_own_log_probabilities_as_the_old_ones(case: Case, label: str) -> None:
    """Loss, gradient and sums are those with the same numbers given as the old policy's; no gradient flows through."""
    name, chosen = CASES[label]
    section = AlgorithmSection.model_validate({"name": name, **chosen, "old_policy": "trainer"})
    settings = settings_of(section)
    own = replace(batch_in_order(case, settings.algorithm.aggregation, np.arange(12)), old_logps=None)
    given = replace(own, old_logps=look_up(jnp.asarray(case.now), own.rows).logprobs_RS)
    found, expected = (gradient_of(case.now, batch, settings) for batch in (own, given))
    assert np.abs(expected[1]).max() > 0.0
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)
    assert float(found[0][1].ratio_excess) == 0.0


@pytest.mark.parametrize("label", ["grpo", "dual_clip", "delta", "cispo", "cispo_two_sided", "dppo"])
def test_the_cases_reach_both_sides_of_every_bound(case: Case, label: str) -> None:
    """Over the advantage, the slopes of tokens that a bound cuts are all the same; those of others are not."""
    name, chosen = CASES[label]
    options = {**chosen.get("options", {}), **({"kl_weight": 0.0} if name == "dppo" else {})}
    section = AlgorithmSection.model_validate({"name": name, **chosen, "options": options})
    slopes: dict[bool, list[float]] = {True: [], False: []}
    for _, counts, now, old, advantage in completions_of(case):
        if advantage and counts.any():
            slopes[advantage > 0].extend(terms(name, section, now, old, advantage)[1] / advantage)
    for side in slopes.values():
        repeated = np.unique(np.round(side, 6), return_counts=True)[1]
        assert repeated.max() > 1
        assert (repeated == 1).sum() > 1


# --- by hand ---------------------------------------------------------------------------------------------------------


def losses_of(name: str, ratios: Any, advantage: float, **section: Any) -> Any:
    """Of tokens that each had the probability 0.2, and form one completion."""
    algorithm = open_algorithm(AlgorithmSection.model_validate({"name": name, **section}))
    old = jnp.log(jnp.full((1, len(ratios)), 0.2))
    now, shape = old + jnp.log(jnp.asarray([ratios])), old.shape
    sequences = Sequences(jnp.ones(shape, jnp.int32), jnp.ones(shape, bool))
    losses = algorithm.token_losses(now, old, jnp.full(shape, advantage), sequences)
    return [np.round(np.asarray(part, float)[0], 5).tolist() for part in losses]


@pytest.mark.parametrize(
    ("name", "section", "advantage", "losses", "clipped"),
    [
        # ratios 1/2, 1 and 4
        ("grpo", {}, 2.0, [-1, -2, -2.4], [0, 0, 1]),
        ("grpo", {}, -2.0, [1.6, 2, 8], [1, 0, 0]),
        ("grpo", {"dual_clip": 3.0}, -2.0, [1.6, 2, 6], [1, 0, 1]),
        ("grpo", {"dual_clip": 3.0}, 2.0, [-1, -2, -2.4], [0, 0, 1]),
        ("grpo", {"delta": 3.0}, -2.0, [1.6, 2, 6], [1, 0, 1]),
        ("dapo", {}, 2.0, [-1, -2, -2.56], [0, 0, 1]),
        # the geometric mean of 1/2, 1 and 4 is the third root of 2, 1.25992
        ("gspo", {}, 2.0, [-2.0008] * 3, [1, 1, 1]),
        ("gspo", {}, -2.0, [2.51984] * 3, [0, 0, 0]),
        ("gspo", {"clip_high": 0.5}, 2.0, [-2.51984] * 3, [0, 0, 0]),
        # log 0.1, log 0.2 and log 0.8 are -2.30259, -1.60944 and -0.22314
        ("cispo", {}, 2.0, [2.30259, 3.21888, 1.78515], [0, 0, 0]),
        ("cispo", {"options": {"cap": 3.0}}, 2.0, [2.30259, 3.21888, 1.33886], [0, 0, 1]),
        ("cispo", {"options": {"cap": 0.28}}, 2.0, [1.28945, 0.90129, 0.12496], [1, 1, 1]),
        ("cispo", {"clip_high": 1.0, "clip_low": 0.2}, -1.0, [-1.84207, -1.60944, -0.44629], [1, 0, 1]),
        # probabilities 0.1, 0.2 and 0.8 after 0.2; log(1/2)^2 = 0.48045, log(4)^2 = 1.92181
        ("dppo", {"options": {"kl_weight": 0.0}}, 2.0, [-1, -2, 0], [0, 0, 1]),
        ("dppo", {"options": {"kl_weight": 0.0, "mask_low": 0.05}}, -2.0, [0, 2, 8], [1, 0, 0]),
        ("dppo", {}, 2.0, [-0.99952, -2, 0.00192], [0, 0, 1]),
        # the product of the ratios is 2: 2^2 e^(3 - 6) = 0.199148, and 2^3 e^(2 - 4) = 1.082682
        ("vespo", {}, 2.0, [0.91712, 0.64103, 0.08888], [0, 0, 0]),
        ("vespo", {}, -2.0, [-4.98594, -3.48502, -0.4832], [0, 0, 0]),
        # sigmoid(0) = 1/2, sigmoid(-1/2) = 0.37754, sigmoid(3) = 0.95257; 1.05: 0.371684 and 0.958909
        ("sapo", {}, 1.0, [-1.51016, -2, -3.8103], [0, 0, 0]),
        ("sapo", {}, -1.0, [1.41594, 1.90476, 3.65299], [0, 0, 0]),
        ("reinforce", {}, 2.0, [4.60517, 3.21888, 0.44629], [0, 0, 0]),
        ("reinforce", {"options": {"importance_sampling": True}}, 2.0, [-1, -2, -8], [0, 0, 0]),
    ],
)
def test_by_hand(name: str, section: dict[str, Any], advantage: float, losses: Any, clipped: Any) -> None:
    assert losses_of(name, [0.5, 1.0, 4.0], advantage, **section) == [pytest.approx(losses, abs=1.5e-5), clipped]


# --- against TRL ------------------------------------------------------------------------------------------------------

NOW = [[-0.5, -1.2, -0.3], [-2.0, -0.7], [-0.1, -0.9, -1.6, -0.4]]
OLD = [[-0.6, -1.0, -0.35], [-1.7, -0.9], [-0.15, -0.8, -1.9, -0.4]]
REFERENCE = [[-0.55, -1.25, -0.3], [-1.8, -0.6], [-0.3, -0.9, -1.5, -0.5]]
ENTROPIES = [[0.2, 1.5, 0.7], [1.1, 0.05], [0.9, 1.3, 0.4, 0.6]]
WIDE = {"clip_low": 0.2, "clip_high": 0.3}
KL: dict[str, Any] = {"beta": 0.1, "kl_estimator": "k3"}
OF_TRL: dict[str, tuple[dict[str, Any], float, list[list[float]]]] = {
    "luspo": (
        {"name": "luspo"},
        -0.7232439,
        [[-0.2622591] * 3, [0.0] * 2, [0.0] * 4],
    ),
    "luspo_wide_kl": (
        {"name": "luspo", **WIDE, **KL},
        -0.7969462,
        [
            [-0.2606334, -0.2606334, -0.2622591],
            [0.3414041, 0.3452784],
            [-0.1713735, -0.1774158, -0.1809215, -0.1742437],
        ],
    ),
    "vespo": ({"name": "vespo"}, 0.0076876, [[-0.0931023] * 3, [0.1095264] * 2, [-0.0390681] * 4]),
    "vespo_flat": (
        {"name": "vespo", **CASES["vespo_flat"][1]},
        0.004054,
        [[-0.0866409] * 3, [0.1314445] * 2, [-0.0618908] * 4],
    ),
    "grpo_top_0.2": (
        {"top_entropy_quantile": 0.2},
        -0.1104776,
        [[0.0, -0.0727761, 0.0], [0.0, 0.0], [0.0, -0.0377016, 0.0, 0.0]],
    ),
    "grpo_top_0.7": (
        {"top_entropy_quantile": 0.7},
        -0.1427269,
        [[0.0, -0.0727761, -0.0934463], [0.0, 0.0], [-0.043803, -0.0377016, 0.0, -0.0416667]],
    ),
    "grpo_top_0": ({"top_entropy_quantile": 0.0}, -0.0727761, [[0.0, -0.0727761, 0.0], [0.0] * 2, [0.0] * 4]),
    "dapo_top_0.5_kl": (
        {"name": "dapo", "clip_high": 0.2, "top_entropy_quantile": 0.5, **KL},
        -0.1764754,
        [
            [0.0005419, -0.0722342, -0.0934463],
            [-0.00246, -0.0011686],
            [-0.0563898, -0.0502687, -0.0011686, 0.0010574],
        ],
    ),
    "gspo_top_0.5": (
        {"name": "gspo", **WIDE, "top_entropy_quantile": 0.5},
        -0.0891552,
        [[-0.0582798] * 3, [0.087196] * 2, [-0.022177] * 4],
    ),
}
"""Settings, loss and gradient of TRL 1.16.0 (torch 2.15.0, float32): its own ``GRPOTrainer._compute_loss`` was called
with these log-probabilities and entropies in place of a model's, with the advantages 0.8, -1.1 and 0.5, loss_type and
importance_sampling_level to match (gspo: grpo and sequence), epsilon and epsilon_high as the clips here, and
use_bias_correction_kl=False."""


@pytest.mark.parametrize("label", OF_TRL)
def test_loss_and_gradient_are_those_of_trl(label: str) -> None:
    settings, loss, gradient = OF_TRL[label]
    section = AlgorithmSection.model_validate(settings)
    opened, table = settings_of(section), np.zeros((3, LONGEST), np.float32)
    shape, known = replace(RowShape(4, LONGEST, 16, 2), chosen=section.top_entropy_quantile < 1.0), np.zeros((2, 3, 7))
    completions = []
    for row, (now, old) in enumerate(zip(NOW, OLD, strict=True)):
        table[row, : len(now)], ids = now, row * LONGEST + np.arange(len(now), dtype=np.int32)
        known[:, row, : len(now)] = REFERENCE[row], ENTROPIES[row]
        completions.append(Completion(ids, np.array(old, np.float32), "stop", 0))
    named = {"reference_logps": known[0].astype(np.float32)} if section.beta else {}
    if shape.chosen:
        named["importance"] = known[1].astype(np.float32)
    advantages = np.array([0.8, -1.1, 0.5])
    batch, _ = train_rows([[0]] * 3, completions, advantages, shape, opened.algorithm.aggregation, None, named)
    if shape.chosen:
        batch = with_top_entropy(batch, section.top_entropy_quantile)
    (found, _), slopes = gradient_of(table, batch_of(batch), opened)
    assert float(found) == pytest.approx(loss, rel=2e-6, abs=2e-7)
    for slope, expected in zip(np.asarray(slopes), gradient, strict=True):
        np.testing.assert_allclose(slope[: len(expected)], expected, rtol=1e-5, atol=1e-7)


def test_where_gspo_differs_from_trl_with_an_unbiased_kl_penalty() -> None:
    """TRL weighs a token's estimate by the ratio of the whole completion, here it is by the token's own: for the first
    token of the first completion by exp(-0.05 / 3) in the place of exp(0.1)."""
    section = AlgorithmSection.model_validate({"name": "gspo", **WIDE, **KL, "kl_unbiased": True})
    now, old, reference = (jnp.array([values[0]]) for values in (NOW, OLD, REFERENCE))
    x = np.array([0.05, 0.05, 0.0])
    k3 = np.exp(-x) - 1 + x
    ours = (k3 * np.exp(np.array([0.1, -0.2, 0.05]))).sum() * 0.1 / 3
    batch, _ = train_rows(
        [[0]],
        [Completion(np.arange(3, dtype=np.int32), np.asarray(old[0]), "stop", 0)],
        np.zeros(1),
        RowShape(4, LONGEST, 16, 2),
        "sequence-mean-token-mean",
        None,
        {"reference_logps": np.pad(np.asarray(reference), ((0, 0), (0, 4)))},
    )
    (found, _), _ = gradient_of(np.pad(np.asarray(now), ((0, 0), (0, 4))), batch_of(batch), settings_of(section))
    assert float(found) == pytest.approx(ours, rel=1e-4)
    assert ours != pytest.approx(k3.sum() * np.exp(-0.05 / 3) * 0.1 / 3, rel=1e-2)


def test_what_objectives_take_by_themselves() -> None:
    """1, 2, 6 have the mean 3 and the variance (4 + 1 + 9) / 2 = 7; the means of the others are 4, 3.5 and 1.5."""
    rewards, std = np.array([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]]), np.sqrt(7.0) + 1e-6
    standardized, centred = [[-2 / std, -1 / std, 3 / std], [0, 0, 0]], [[-2, -1, 3], [0, 0, 0]]
    by_hand = {
        "dr_grpo": centred,
        "dppo": centred,
        "reinforce": centred,
        "rloo": [[1 - 4, 2 - 3.5, 6 - 1.5], [0, 0, 0]],
        **dict.fromkeys(TAUGHT, np.zeros((2, 3))),
    }
    for name in SHIPPED:
        found = open_algorithm(AlgorithmSection(name=name)).advantages(rewards)
        np.testing.assert_allclose(found, by_hand.get(name, standardized), atol=1e-15, err_msg=name)
    other = open_algorithm(AlgorithmSection(name="grpo", advantage="rloo", loss_aggregation="token-mean"))
    np.testing.assert_allclose(other.advantages(rewards), by_hand["rloo"])
    assert other.aggregation == "token-mean"
    assert losses_of("grpo", [1.3], 1.0, clip_low=0.1) == [[-1.1], [1]]  # a clip that is not set above


def test_ratios_stay_finite() -> None:
    ratio = token_ratio(jnp.array([[0.0, -500.0]]), jnp.array([[-500.0, 0.0]]))
    np.testing.assert_allclose(ratio, np.exp([[20.0, -20.0]]), rtol=1e-6)


@pytest.mark.full
def test_all_objectives_have_the_policy_gradient_where_nothing_has_moved() -> None:
    """At ratio 1 the slope of each token is minus its advantage; GSPO's is spread evenly over equal tokens."""
    now = jnp.log(jnp.array([[0.3, 0.1, 0.6, 0.2]]))
    advantages = jnp.array([[1.5, 1.5, 1.5, 1.5]])
    sequences = Sequences(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), bool))
    for name in set(SHIPPED) - {"gkd"}:  # which has no ratio, see test_distill.py
        algorithm = open_algorithm(AlgorithmSection(name=name))

        def loss(values: Any, algorithm: Any = algorithm) -> Any:
            return algorithm.token_losses(values, now, advantages, sequences).loss_BT.sum()

        np.testing.assert_allclose(jax.jit(jax.grad(loss))(now), -advantages, rtol=1e-6, err_msg=name)


def test_dual_clip_and_delta_are_one_bound() -> None:
    ratios = np.linspace(0.1, 6.0, 40)
    for advantage in (-1.5, 0.0, 1.5):
        assert losses_of("grpo", ratios, advantage, dual_clip=2.5) == losses_of("grpo", ratios, advantage, delta=2.5)


@pytest.mark.full
def test_gspo_token_differs_only_where_advantages_do() -> None:
    rng = np.random.default_rng(3)
    now = jnp.asarray(rng.uniform(-2, -1, (1, 6)), jnp.float32)
    old = now + jnp.asarray(rng.uniform(-0.2, 0.2, (1, 6)), jnp.float32)
    sequences = Sequences(jnp.array([[1, 1, 1, 2, 2, 2]]), jnp.ones((1, 6), bool))

    def slopes(advantages: Any, per_token: bool) -> Any:
        section = AlgorithmSection(name="gspo", clip_low=0.5, clip_high=0.5, options={"per_token": per_token})
        algorithm = open_algorithm(section)

        def loss(values: Any) -> Any:
            return algorithm.token_losses(values, old, advantages, sequences).loss_BT.sum()

        return jax.jit(jax.grad(loss))(now)

    equal = jnp.array([[1.0, 1.0, 1.0, -2.0, -2.0, -2.0]])
    np.testing.assert_allclose(slopes(equal, True), slopes(equal, False), rtol=1e-6)
    uneven = jnp.array([[1.0, 0.0, 2.0, -2.0, -2.0, -2.0]])
    ratio = np.exp(np.mean(np.asarray(now - old, float)[0, :3]))
    np.testing.assert_allclose(slopes(uneven, True)[0, :3], [-ratio, 0, -2 * ratio], rtol=1e-6)
    np.testing.assert_allclose(slopes(uneven, False)[0, :3], [-ratio] * 3, rtol=1e-6)


# --- sequences in a row ----------------------------------------------------------------------------------------------


def test_sums_and_means_of_sequences() -> None:
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    counts = jnp.array([[False, True, True, True, True, False], [False] * 6])
    sequences = Sequences(segments, counts)
    values = jnp.array([[1.0, 3.0, 5.0, 2.0, 4.0, 9.0], [jnp.nan] * 6])
    assert sequences.sum(values).tolist() == [[8, 8, 8, 6, 6, 0], [0] * 6]
    assert sequences.mean(values).tolist() == [[4, 4, 4, 3, 3, 0], [0] * 6]


@pytest.mark.parametrize("tokens", [1, 21])
def test_sums_of_random_sequences(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    segments = np.sort(rng.integers(1, 9, (4, tokens)), axis=1)
    counts, values = rng.random((4, tokens)) < 0.7, rng.normal(size=(4, tokens)).astype(np.float32)
    sequences = Sequences(jnp.asarray(segments), jnp.asarray(counts))
    same = segments[:, :, None] == segments[:, None, :]
    by_hand = (same * (counts * np.float64(values))[:, None, :]).sum(axis=2)
    found = np.asarray(jax.jit(sequences.sum)(jnp.asarray(values)))
    np.testing.assert_allclose(found, by_hand, atol=1e-6)
    for row in range(4):  # one and the same number at all tokens
        assert len(np.unique(found[row])) <= len(np.unique(segments[row]))
    weights = rng.normal(size=(4, tokens))
    gradient = jax.jit(jax.grad(lambda v: (weights * sequences.mean(v)).sum()))(jnp.asarray(values))
    number = np.maximum((same * counts[:, None, :]).sum(axis=2), 1)
    np.testing.assert_allclose(gradient, counts * (same * (weights / number)[:, None, :]).sum(axis=2), atol=1e-6)


def test_nothing_of_the_size_of_a_row_squared_is_kept() -> None:
    tokens, algorithm = 512, open_algorithm(AlgorithmSection(name="gspo"))

    def loss(now: Any, old: Any, advantages: Any, segments: Any, counts: Any) -> Any:
        return algorithm.token_losses(now, old, advantages, Sequences(segments, counts)).loss_BT.mean()

    kinds = (jnp.float32, jnp.float32, jnp.float32, jnp.int32, jnp.bool_)
    arguments = [jax.ShapeDtypeStruct((2, tokens), kind) for kind in kinds]
    memory: Any = jax.jit(jax.grad(loss)).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * tokens
