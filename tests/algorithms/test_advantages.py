"""Advantages by name: values worked out by hand, the papers' formulas in NumPy, and what holds for any rewards."""

from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from tests.learner.toy import make_config
from tpu_grpo.algorithms import ADVANTAGES, RunAlgorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection, RunConfig
from tpu_grpo.config.learning_sections import AdvantageName
from tpu_grpo.learner.signal import group_advantages, read_signal
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores


def opened(name: Any, objective: str = "grpo") -> RunAlgorithm:
    return open_algorithm(AlgorithmSection(name=objective, advantage=name))


def test_all_names_are_tested_here() -> None:
    assert set(get_args(AdvantageName)) == set(ADVANTAGES) == {*REFERENCES, "dr_grpo"}


def test_by_hand() -> None:
    rewards = np.array([[0.0, 2.0], [4.0, 6.0]])

    def found(name: str, values: Any, **known: Any) -> np.ndarray:
        return opened(name).advantages(np.array(values, float), known)

    signs = np.array([[-1.0, 1.0], [-1.0, 1.0]])
    # The rewards 0 2 4 6 have the squares 9 1 1 9 about their mean; the deviations from the groups' means, 1 1 1 1.
    np.testing.assert_allclose(found("lite_ppo", rewards), signs / np.sqrt(20 / 3), rtol=1e-6)
    np.testing.assert_allclose(found("scale_rl", rewards), signs / np.sqrt(4 / 3), rtol=2e-6)
    # The tokens 0 0 3 have the mean 1 and the variance (1 + 1 + 4) / 2 = 3.
    lengths = np.array([[2, 1]])
    np.testing.assert_allclose(
        found("reinforce_pp", [[0, 3]], lengths_PG=lengths), [[-1 / 3**0.5, 2 / 3**0.5]], rtol=1e-6
    )
    # Centred, the tokens are -1 1 1 1: mean 1/2, variance (9/4 + 3/4) / 3 = 1.
    lengths = np.array([[1, 3]])
    np.testing.assert_allclose(found("reinforce_pp_baseline", [[0, 2]], lengths_PG=lengths), [[-1.5, 0.5]], rtol=2e-6)
    np.testing.assert_allclose(found("max_rl", [[1, 0, 0, 0], [0, 0, 0, 0]]), [[3, -1, -1, -1], [0, 0, 0, 0]])
    # Rewards [0 2] and [4 0] with weights 1 and 2: each is -1 1 or 1 -1 over sqrt 2, together 1 -1 over sqrt 2.
    two = {"rewards_NPG": np.array([[[0.0, 2.0]], [[4.0, 0.0]]]), "weights_N": np.array([1.0, 2.0])}
    np.testing.assert_allclose(found("gdpo", [[8, 2]], **two), [[2**-0.5, -(2**-0.5)]], rtol=5e-6)


def test_gdpo_tells_apart_rewards_with_the_same_sum() -> None:
    """Right but untidy and tidy but wrong have the same sum; a rare right answer then counts more than GRPO lets it."""
    right, tidy = np.array([[1.0, 0, 0, 0]]), np.array([[0.0, 1, 1, 1]])
    known = {"rewards_NPG": np.stack([right, tidy]), "weights_N": np.array([2.0, 1.0])}
    assert not opened("grpo").advantages(right + tidy).any()
    found = opened("gdpo").advantages(2 * right + tidy, known)
    assert found[0, 0] > 0 > found[0, 1] == found[0, 2] == found[0, 3]


def test_gdpo_leaves_out_what_does_not_apply() -> None:
    rewards = np.array([[[1.0, np.nan, 3.0], [np.nan] * 3], [[0.0, 1.0, 0.0], [2.0, 4.0, 4.0]]])
    found = opened("gdpo").advantages(np.zeros((2, 3)), {"rewards_NPG": rewards, "weights_N": np.array([1.0, 0.5])})
    third = np.sqrt(1 / 3)
    first = np.array([[-1 / np.sqrt(2), 0, 1 / np.sqrt(2)], [0, 0, 0]])
    second = np.array([[-1 / 3, 2 / 3, -1 / 3], [-2 / 3, 1 / 3, 1 / 3]]) / np.array([[third], [2 * third]])
    second[1] *= 2
    total = first + 0.5 * second
    np.testing.assert_allclose(found, (total - total.mean()) / total.std(ddof=1), rtol=1e-5)


EPS = 1e-6


def per_group(rewards: Any, formula: Any) -> np.ndarray:
    return np.array([[formula(value, group, index) for index, value in enumerate(group)] for group in rewards])


def tokens_of(values: Any, lengths: Any) -> np.ndarray:
    return np.concatenate([np.full(n, v) for v, n in zip(np.ravel(values), np.ravel(lengths), strict=True)])


def whitened(values: Any, lengths: Any) -> np.ndarray:
    tokens = tokens_of(values, lengths)
    return (np.asarray(values) - tokens.mean()) / (tokens.std(ddof=1) + EPS)


def centred(rewards: Any, *_: Any) -> np.ndarray:
    return per_group(rewards, lambda value, group, _: value - np.mean(group))


def standardized(rewards: Any, *_: Any) -> np.ndarray:
    return per_group(rewards, lambda value, group, _: (value - np.mean(group)) / (np.std(group, ddof=1) + EPS))


def decoupled(_: Any, __: Any, parts: Any, weights: Any) -> np.ndarray:
    total: Any = sum(weight * standardized(part) for weight, part in zip(weights, parts, strict=True))
    return (total - np.mean(total)) / (np.std(total, ddof=1) + EPS)


REFERENCES: dict[str, Any] = {
    "grpo": standardized,
    "drgrpo": centred,
    "rloo": lambda rewards, *_: per_group(rewards, lambda value, group, i: value - np.mean(np.delete(group, i))),
    "lite_ppo": lambda rewards, *_: centred(rewards) / (np.std(rewards, ddof=1) + EPS),
    "scale_rl": lambda rewards, *_: centred(rewards) / (np.std(centred(rewards), ddof=1) + EPS),
    "reinforce_pp": lambda rewards, lengths, *_: whitened(rewards, lengths),
    "reinforce_pp_baseline": lambda rewards, lengths, *_: whitened(centred(rewards), lengths),
    "max_rl": lambda rewards, *_: per_group(rewards, lambda v, g, _: (v - np.mean(g)) / np.mean(g) if any(g) else 0.0),
    "gdpo": decoupled,
}
"""Each from its paper's formula, value by value: (total rewards, lengths, rewards, weights)."""


def some_rewards() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Six groups of four: one of equal rewards, one of rewards that are all 0."""
    rng = np.random.default_rng(7)
    parts = rng.integers(0, 3, (3, 6, 4)).astype(float)
    parts[:, 2], parts[:, 4] = 1.0, 0.0
    weights = np.array([1.0, 0.5, 2.0])
    return np.einsum("n,npg->pg", weights, parts), rng.integers(1, 9, (6, 4)), parts, weights


@pytest.mark.parametrize("name", REFERENCES)
def test_against_the_papers_formulas(name: str) -> None:
    rewards, lengths, parts, weights = some_rewards()
    known = {"lengths_PG": lengths, "rewards_NPG": parts, "weights_N": weights}
    found = group_advantages(rewards.ravel(), group_size=4, algorithm=opened(name), known=known).reshape(6, 4)
    np.testing.assert_allclose(found, REFERENCES[name](rewards, lengths, parts, weights), rtol=1e-12, atol=1e-12)
    if name != "reinforce_pp":  # which has no baseline of a group
        spread = np.ptp(found[[2, 4]], axis=1)
        np.testing.assert_allclose(spread, 0.0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    rewards=arrays(np.float64, (5, 4), elements=st.floats(0, 10).map(lambda value: round(value, 3))),
    name=st.sampled_from(list(REFERENCES)),
    seed=st.integers(0, 1000),
)
def test_permuting_prompts_and_completions_permutes_advantages(rewards: np.ndarray, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, prompts, within = rng.integers(1, 9, (5, 4)), rng.permutation(5), rng.permutation(4)

    def found(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        known = {"lengths_PG": lengths, "rewards_NPG": rewards[None], "weights_N": np.ones(1)}
        return opened(name).advantages(rewards, known)

    first = found(rewards, lengths)
    assert np.isfinite(first).all()
    second = found(rewards[prompts][:, within], lengths[prompts][:, within])
    np.testing.assert_allclose(second, first[prompts][:, within], atol=1e-6)


def test_max_rl_takes_no_negative_rewards() -> None:
    with pytest.raises(RewardError, match=r"max_rl .* needs rewards >= 0, got -0.5; change the rewards, or"):
        opened("max_rl").advantages(np.array([[1.0, -0.5]]))


def test_every_objective_takes_every_advantage() -> None:
    for objective in ("dapo", "gspo", "cispo", "dppo", "sapo", "reinforce"):
        algorithm = opened("max_rl", objective)
        assert algorithm.advantages(np.array([[1.0, 0.0]])).tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("advantage", ["gdpo", "reinforce_pp"])
def test_the_learner_gives_what_advantages_ask_for(tmp_path: Path, advantage: str) -> None:
    rewards = [
        {"name": "exact_answer", "label": "first", "weight": 2.0},
        {"name": "exact_answer", "label": "second", "weight": {1: 0.0, 3: 1.0}},
    ]
    config = make_config(tmp_path, {"algorithm": {"advantage": advantage}})
    config = RunConfig.model_validate(config.model_dump() | {"rewards": rewards})
    algorithm = open_algorithm(config.algorithm)
    counts = np.array([3, 1, 2, 2, 4, 1, 1, 5])
    completions = tuple(Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in counts)
    parts = np.random.default_rng(0).normal(size=(2, 8))
    rollout = Rollout(PromptBatch(2, (Prompt("", (5,)),) * 4), 2, completions, ("",) * 8, 0.0)
    scores = Scores(parts[0], {"second": parts[1], "first": parts[0]}, 0.0)
    groups = parts.reshape(2, 4, 2)
    expected = REFERENCES[advantage](groups[0], counts.reshape(4, 2), groups, [2.0, 0.5])
    found = read_signal(ScoredRollout(rollout, scores), config, algorithm).advantages_B
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-12)
    if advantage == "gdpo":
        with pytest.raises(RewardError, match=r"take rewards one by one, and \['second'\] are not scored"):
            read_signal(ScoredRollout(rollout, Scores(parts[0], {"first": parts[0]}, 0.0)), config, algorithm)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "gdpo", "reinforce_pp", "lite_ppo"])
def test_a_row_without_a_reward_has_no_advantage_and_a_group_without_any_is_not_there(
    tmp_path: Path, advantage: str
) -> None:
    """Of three groups the second has no reward: the others have the advantages that they have without it."""
    tree = {"data": {"prompts_per_step": 3}, "algorithm": {"advantage": advantage, "group_size": 3}}
    config = make_config(tmp_path, tree)
    config = RunConfig.model_validate(config.model_dump() | {"rewards": [{"name": "exact_answer", "label": "one"}]})
    algorithm = open_algorithm(config.algorithm)
    nan = float("nan")
    values = np.array([1.0, 3.0, nan, nan, nan, nan, 0.0, 1.0, 4.0])
    total = np.array([1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 4.0])
    counts = np.array([3, 1, 2, 2, 4, 1, 1, 5, 2])
    completions = tuple(Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in counts)
    rollout = Rollout(PromptBatch(2, (Prompt("", (5,)),) * 3), 3, completions, ("",) * 9, 0.0)
    scored = ScoredRollout(rollout, Scores(total, {"one": values}, 0.0, unscored=np.isnan(values)))
    signal = read_signal(scored, config, algorithm)
    assert signal.informative_P.tolist() == [True, False, True]
    found = signal.advantages_B
    kept = [0, 1, 2, 6, 7, 8]
    groups, of_one = total[kept].reshape(2, 3), values[kept].reshape(1, 2, 3)
    if advantage == "gdpo":  # by hand: each reward alone, 0 where it does not apply, standardized over the step
        deviations = np.array([[-1.0, 1.0, 0.0], (of_one[0, 1] - 5 / 3)])
        sums = deviations / (np.array([[np.sqrt(2.0)], [groups[1].std(ddof=1)]]) + 1e-6)
        expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-6)
    else:
        expected = REFERENCES[advantage](groups, counts[kept].reshape(2, 3), of_one, [1.0])
    expected = expected.ravel()
    expected[2] = 0.0
    np.testing.assert_allclose(found[kept], expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found[2:6], np.zeros(4))
