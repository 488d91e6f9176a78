"""Advantages by name: values worked out by hand, the papers' formulas in NumPy, and what holds for any rewards."""

from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from tests.learner.test_signal import signal_of
from tests.learner.toy import make_config
from tpu_grpo.algorithms import RunAlgorithm, open_algorithm
from tpu_grpo.algorithms.advantages import ADVANTAGES
from tpu_grpo.config import AlgorithmSection, RunConfig, parse_config
from tpu_grpo.config.learning_sections import AdvantageName
from tpu_grpo.learner.signal import group_advantages
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
    for objective in ("dapo", "gspo", "luspo", "cispo", "dppo", "sapo", "vespo", "reinforce"):
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
    counts = np.array([3, 1, 2, 2, 4, 1, 1, 5])
    completions = tuple(Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in counts)
    parts = np.random.default_rng(0).normal(size=(2, 8))
    rollout = Rollout(PromptBatch(2, (Prompt("", (5,)),) * 4), 2, completions, ("",) * 8, 0.0)
    scores = Scores(parts[0], {"second": parts[1], "first": parts[0]}, 0.0)
    groups = parts.reshape(2, 4, 2)
    expected = REFERENCES[advantage](groups[0], counts.reshape(4, 2), groups, [2.0, 0.5])
    found = signal_of(ScoredRollout(rollout, scores), config).advantages_B
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-12)
    if advantage == "gdpo":
        with pytest.raises(RewardError, match=r"take rewards one by one, and \['second'\] are not scored"):
            signal_of(ScoredRollout(rollout, Scores(parts[0], {"first": parts[0]}, 0.0)), config)


NAN = float("nan")
PARTS = np.array([[1, 0, NAN, 1, NAN, NAN, 2, NAN], [NAN, 2, NAN, 1, 3, 1, NAN, NAN]])
"""Two rewards of two groups of four, with the weights 1 and 0.5: the totals are 1 1 - 1.5 and 1.5 0.5 2 -."""
LENGTHS = np.array([3, 1, 2, 2, 4, 1, 1, 5])
SCORED = [0, 1, 3, 4, 5, 6]
CENTRED = np.array([-1 / 6, -1 / 6, 1 / 3, 1 / 6, -5 / 6, 2 / 3])
OF_SCORED = {
    # Three of TRL 1.16.0's own: the lines of GRPOTrainer._generate_and_score_completions from unscorable_mask on, with
    # these rewards, weights and num_generations=4, for scale_rewards group and batch, and normalize_then_sum.
    "grpo": [-0.57715, -0.57715, 1.154301, 0.218189, -1.090947, 0.872757],
    "lite_ppo": [-0.31776, -0.31776, 0.635521, 0.31776, -1.588801, 1.271041],
    "gdpo": [1.142971, -1.585995, 0.443025, 0.699995, -0.699995, 0.0],
    "drgrpo": CENTRED,
    "rloo": [-0.25, -0.25, 0.5, 0.25, -1.25, 1.0],  # 1 - (1 + 1.5) / 2
    "scale_rl": CENTRED / np.sqrt(4 / 15),  # 48/36 of squares, over 5
    "max_rl": [-1 / 7, -1 / 7, 2 / 7, 1 / 8, -5 / 8, 1 / 2],
    "reinforce_pp": whitened([1, 1, 1.5, 1.5, 0.5, 2], LENGTHS[SCORED]),
    "reinforce_pp_baseline": whitened(CENTRED, LENGTHS[SCORED]),
}


def advantages_of(advantage: str, parts: Any, group: int, weights: Any = (1.0, 0.5)) -> tuple[Any, Any]:
    """The advantages and which groups are informative, of rows of 1 2 3 ... or `LENGTHS` tokens."""
    total = np.where(np.isnan(parts).all(axis=0), NAN, np.nansum(parts.T * weights, axis=1))
    lengths = LENGTHS if len(total) == len(LENGTHS) else np.arange(1, len(total) + 1)
    specs = [{"name": "exact_answer", "label": str(n), "weight": weight} for n, weight in enumerate(weights)]
    config = parse_config({"algorithm": {"advantage": advantage, "group_size": group}, "rewards": specs})
    completions = tuple(Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in lengths)
    prompts = (Prompt("", (5,)),) * (len(total) // group)
    rollout = Rollout(PromptBatch(2, prompts), group, completions, ("",) * len(total), 0.0)
    scores = Scores(total, {str(n): values for n, values in enumerate(parts)}, 0.0)
    signal = signal_of(ScoredRollout(rollout, scores), config)
    return signal.advantages_B, signal.informative_P.tolist()


@pytest.mark.parametrize("advantage", OF_SCORED)
def test_statistics_are_of_the_scored_rows(advantage: str) -> None:
    """A group without any is not there, and the only one of a group has no other to be compared with."""
    assert OF_SCORED.keys() == REFERENCES.keys()
    found, informative = advantages_of(advantage, PARTS, 4)
    np.testing.assert_allclose(found[SCORED], OF_SCORED[advantage], rtol=1e-3, atol=1e-9)
    assert (found[[2, 7]].tolist(), informative) == ([0.0, 0.0], [True, True])
    pair, none, alone = [[1.0, 0.0, *[NAN] * 6], [NAN] * 8, [NAN, 4.0, *[NAN] * 6]]
    one = np.array([pair + none])
    found, informative = advantages_of(advantage, one, 8, (1.0,))
    # TRL's are 0.707007: it adds 1e-4 to the standard deviation. The tokens of reinforce_pp are 1 0 0
    expected: Any = np.array([1, -1]) * {"drgrpo": 0.5, "rloo": 1.0, "max_rl": 1.0}.get(advantage, 0.70710678)
    if advantage.startswith("reinforce_pp"):
        returns = [1, 0] if advantage == "reinforce_pp" else [0.5, -0.5]
        expected = whitened(returns, [1, 2])
    np.testing.assert_allclose(found, [*expected, *[0.0] * 14], rtol=2e-6)
    assert informative == [True, False]
    found, informative = advantages_of(advantage, np.array([alone]), 8, (1.0,))
    assert (np.abs(found).max(), informative) == (0.0, [False])


@pytest.mark.parametrize("advantage", OF_SCORED)
def test_rewards_that_are_equal_in_float32_have_advantages_of_exactly_0(advantage: str) -> None:
    """Seven times 100.1, whose rounded mean is another number (TRL 1.16 gives each +0.07); 0.1 + 0.2, which is not 0.3;
    and three times 0.1 beside a row without a reward."""
    cases = ([[100.1] * 7], (1.0,)), ([[0.1, 0.3], [0.2, 0.0]], (1.0, 1.0)), ([[0.1] * 3 + [NAN]], (1.0,))
    for parts, weights in cases:
        if advantage == "gdpo" and len(weights) > 1:
            continue  # it compares the rewards one by one
        found, informative = advantages_of(advantage, np.array(parts), len(parts[0]), weights)
        assert (np.abs(found).max(), informative) == (0.0, [False])
    raw, one = np.full((1, 7), 100.1), np.ones((1, 7), np.int64)
    known = {"lengths_PG": one, "rewards_NPG": raw[None], "weights_N": np.ones(1)}
    assert not opened(advantage).advantages(raw, known).any()


def test_a_class_of_ones_own_gets_masked_rewards(tmp_path: Path) -> None:
    """Their methods leave out what is masked; what is behind the mask is the group's mean, for those that look."""
    body = (
        "import numpy as np\n"
        "from tpu_grpo.algorithms.grpo import Grpo\n"
        "class Mine(Grpo):\n    def advantages(self, rewards_PG):\n        return {}\n"
    )
    for text, expected in (
        ("rewards_PG - rewards_PG.mean(axis=1, keepdims=True)", [-1, 1, 0]),
        ("np.array(rewards_PG) / np.mean(rewards_PG)", [0.5, 1.5, 0]),
    ):
        (path := tmp_path / f"{len(text)}.py").write_text(body.format(text))
        algorithm = open_algorithm(AlgorithmSection(name=f"{path}:Mine"))
        found = group_advantages(np.array([1.0, 3.0, NAN]), group_size=3, algorithm=algorithm)
        assert found.tolist() == expected
