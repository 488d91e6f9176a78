"""Rows that no reward scores: what they get, how they are counted, and when there are too many of them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.processes import run
from tests.rewards.conftest import make_rollout
from tests.rewards.test_scoring import constant, open_function
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.sample_rows import pick_rows, sample_fields, sample_rows
from tpu_grpo.observe.step_metrics import rollout_metrics
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import ScoredRollout
from tpu_grpo.rewards import DistributedRewards, RewardSet
from tpu_grpo.rewards.reward_call import check_token_values

ROLLOUT = make_rollout(["p0", "p1"], list("abcdef"), step=3)
"""Two groups of three."""


def rewards_of(*given: tuple[list[Any], dict[str, Any]]) -> RewardSet:
    """Rewards r0, r1 ... that give these values, with these settings."""
    return RewardSet(tuple(open_function(constant(values, f"r{n}"), **spec) for n, (values, spec) in enumerate(given)))


def test_a_row_that_no_reward_applies_to_is_unscored(caplog: pytest.LogCaptureFixture):
    first = ([1.0, None, None, None, 0.0, 0.0], {"weight": 2.0})
    second = ([None, 4.0, None, 1.0, None, 0.0], {"weight": 0.5})
    with caplog.at_level(logging.WARNING, "tpu_grpo.rewards"):
        scores = rewards_of(first, second).score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, [2.0, 2.0, np.nan, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(scores.scored, [True, True, False, True, True, True])
    assert scores.figures["rewards/unscored"].value == 1
    assert (
        "step 3: no reward of r0, r1 applies to row 2 (prompt 'p0', completion 'c'); such a row counts in no "
        "mean, and has the advantage 0" in caplog.text
    )


def test_hosts_compare_the_values_of_rewards_without_a_problem():
    first, second = [1.0, None, 3.0, 4.0, 5.0, 6.0], [1.0, "x", 1.0, 1.0, 1.0, 1.0]
    found = rewards_of((first, {}), (second, {"on_error": "skip"})).repeatable_values(ROLLOUT, ["r0", "r1"])
    assert (list(found), found["r1"]) == (["r0", "r1"], None)
    np.testing.assert_array_equal(np.array(found["r0"]), [1.0, np.nan, 3.0, 4.0, 5.0, 6.0])
    assert list(rewards_of((first, {}), (second, {})).repeatable_values(ROLLOUT, ["r0"])) == ["r0"]
    assert rewards_of((second, {})).repeatable_values(ROLLOUT, []) == {}


def test_a_reward_of_weight_0_scores_no_row_unless_all_have_it():
    """The watched reward applies to row 1; nothing rewards that row, so it must not count as worth 0."""
    scored, watched = [3.0, None, 5.0, 1.0, 1.0, 1.0], [1.0] * 6
    scores = rewards_of((scored, {}), (watched, {"weight": 0.0})).score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, [3.0, np.nan, 5.0, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(scores.by_name["r1"], watched)
    assert scores.figures["rewards/unscored"].value == 1
    scores = rewards_of((scored, {"weight": 0.0}), (watched, {"weight": 0.0})).score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, np.zeros(6))
    assert scores.figures["rewards/unscored"].value == 0


def test_a_group_without_any_reward_has_no_part_in_the_means(caplog: pytest.LogCaptureFixture):
    scores = rewards_of(([None, None, None, 1.0, 3.0, None], {})).score(ROLLOUT)
    assert "applies to row 0 (prompt 'p0', completion 'a'), and 3 more rows; such" in caplog.text
    np.testing.assert_array_equal(scores.total, [np.nan, np.nan, np.nan, 1.0, 3.0, np.nan])
    scored = ScoredRollout(ROLLOUT, scores)
    metrics = rollout_metrics(scored)
    assert (metrics["rewards/mean"], metrics["rewards/std"], metrics["rewards/unscored"]) == (2.0, 1.0, 4)
    assert metrics["groups/zero_variance_fraction"] == 0.5
    assert json.dumps(scored.mean_rewards()) == "[NaN, 2.0]"
    assert scored.select([1]).scores.scored.tolist() == [True, True, False]
    rows = sample_rows(scored, np.zeros(6))
    row = json.loads(json.dumps(sample_fields(rows[0])))
    assert (row["rewards"], row["reward"]) == ({"r0": None}, None)
    assert [picked.reward for picked in pick_rows(1, rows, 6)] == [3.0, 1.0, None, None, None, None]


def test_a_gate_that_does_not_apply_leaves_a_row_without_both():
    """Row 0 passes the gate, row 1 does not and gets 0, and row 2 is unscored."""
    gate, gated = [1.0, 0.0, None, 1.0, 1.0, 1.0], constant([2.0, 2.0, 2.0, 2.0], "gated")
    rewards = RewardSet((open_function(constant(gate, "gate")), open_function(gated, only_if="gate")))
    scores = rewards.score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, [3.0, 0.0, np.nan, 3.0, 3.0, 3.0])
    np.testing.assert_array_equal(scores.by_name["gated"], [2.0, 0.0, np.nan, 2.0, 2.0, 2.0])
    assert scores.figures["rewards/unscored"].value == 1


def test_what_tokens_get_stays_with_a_row_that_has_no_other_reward():
    """Such a row has no total of its own, and is not without any reward; row 5 is."""
    rewards = RewardSet(
        (
            open_function(constant([1.0, 3.0, None, 1.0, 1.0, None], "whole")),
            open_function(constant([[0.5], None, [-1.0], [0.0], [0.0], None], "tokens"), per_token=True, weight=2.0),
        )
    )
    scores = rewards.score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, [1.0, 3.0, np.nan, 1.0, 1.0, np.nan])
    assert scores.scored.tolist() == [True, True, False, True, True, False]
    assert [values.tolist() for values in scores.per_token] == [[1.0], [0.0], [-2.0], [0.0], [0.0], [0.0]]
    assert scores.figures["rewards/unscored"].value == 1
    tokens = open_function(constant([[1.0]] * 5 + [None], "tokens"), per_token=True)
    alone = RewardSet((tokens,)).score(ROLLOUT)  # no totals are wanted
    assert (alone.total.tolist(), alone.scored.all(), alone.figures["rewards/unscored"].value) == ([0.0] * 6, True, 1)


def test_no_reward_for_any_row_is_an_error():
    rewards = rewards_of(([None] * 6, {}), ([None] * 6, {"weight": 0.0}))
    message = (
        r"got None from all of r0, r1 for all 6 rows of step 3, the first for the prompt 'p0' with the completion 'a'; "
        "drop such records from the data, or add a reward"
    )
    alone = DistributedRewards(rewards, Hosts())
    with pytest.raises(RewardError, match=message):
        alone.score(ROLLOUT)
    with alone.begin(ROLLOUT.batch) as scoring, pytest.raises(RewardError, match=message):
        scoring.finish([ROLLOUT])


def test_rows_that_all_go_without_because_of_a_problem_are_not():
    rewards = rewards_of(([1.0] * 5, {"on_error": "skip"}))  # five values for six rows
    scores = DistributedRewards(rewards, Hosts()).score(ROLLOUT)
    assert np.isnan(scores.total).all()
    assert (scores.figures["rewards/r0/errors"].value, scores.figures["rewards/unscored"].value) == (6, 6)


@pytest.mark.parametrize(
    ("spec", "values", "message"),
    [
        (
            {},
            [0.0] * 5 + [1e308],
            r"at most 1e\+15 with the weight 1 \(or None .*\), got 1e\+308 for row 5 \(prompt 'p1'",
        ),
        ({"weight": -1e300}, [0.0] * 5 + [2.0], r"at most 1e-285 with the weight -1e\+300 .* got 2 for row 5"),
        ({"weight": 0.0}, [1e20] * 5 + [-1e101], r"at most 1e\+100 with the weight 0 .* got 1e\+101 for row 5"),
        ({"per_token": True}, [[0.0]] * 5 + [[1e308]], r"at most 1e\+15 with the weight 1 .* got 1e\+308 for row 5"),
    ],
)
def test_a_finite_number_from_which_nothing_can_be_learnt_is_a_problem_of_its_row(
    spec: dict[str, Any], values: list[Any], message: str
):
    """Squares of 1e308 are infinite, and its difference to -1e308; squares of float32 gradients far earlier."""

    def scored(**more: Any) -> Any:
        return RewardSet((open_function(constant(values, "huge"), **spec, **more),)).score(ROLLOUT)

    with pytest.raises(RewardError, match=f"reward huge must return numbers of {message}"):
        scored()
    skipped, replaced = scored(on_error="skip"), scored(on_error="value", error_value=-1.0)
    assert skipped.figures["rewards/huge/errors"].value == 1
    assert [np.isnan(skipped.by_name["huge"][5]), replaced.by_name["huge"][5]] == [True, -1.0]
    assert all(np.abs(tokens).max() <= 1.0 for tokens in (*skipped.per_token, *replaced.per_token))


def test_numbers_of_tokens_whose_sum_is_infinite_are_a_problem_of_their_row():
    twice = check_token_values([[1e308, 1e308]], [2])  # math.fsum raises for these
    assert (twice[0], twice[2]) == ([2e100], [])


BODY = """
from tests.rewards.conftest import make_rollout
from tests.rewards.test_scoring import open_function
from tpu_grpo.rewards import DistributedRewards, RewardSet

def known(completions):
    return [float(len(text)) if len(text) > 2 else None for text in completions]

rewards = DistributedRewards(RewardSet((open_function(known),)), hosts, compared=["known"])
scores = rewards.score(make_rollout(["p0", "p1", "p2"], ["a", "b", "ccc", "d", "eeeee", "ff"]))
print(scores.total.tolist(), scores.figures["rewards/unscored"].value, flush=True)
rewards.score(make_rollout(["p0", "p1", "p2"], ["a", "b", "c", "d", "e", "f"], step=1))
"""


@pytest.mark.full
def test_hosts_agree_on_rows_without_a_reward(tmp_path: Path) -> None:
    """Host 0 has the groups 0 and 2, host 1 the other one; then no row of any host has a reward."""
    for end in run(BODY, 2).values():
        assert end.code == 2, end
        assert end.out == "[nan, nan, 3.0, nan, 5.0, nan] 4\n"
        assert "got None from all of known for all 6 rows of step 1" in end.errors
