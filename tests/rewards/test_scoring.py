"""Totals are worked out by hand, and errors say how a reward misbehaves."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.rewards.conftest import MakeFile, make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Figure
from tpu_grpo.rewards import OpenReward, RewardSet, open_rewards
from tpu_grpo.rewards.reward_call import Call
from tpu_grpo.rewards.reward_runner import RewardThread

ROLLOUT = make_rollout(["p0", "p1"], ["a", "b", "c", "d"], [{"answer": "a"}, {"answer": "d"}])


def reward_set(*functions: Callable[..., Any], weights: Sequence[float] | None = None) -> RewardSet:
    """Functions of the completions alone."""
    given = weights or [1.0] * len(functions)
    return RewardSet(tuple(open_function(f, weight=w) for f, w in zip(functions, given, strict=True)))


def open_function(function: Callable[..., Any], *arguments: str, per_token: bool = False, **spec: Any) -> OpenReward:
    """A function on a thread, which gets the completions unless other arguments are given."""
    name, extras = function.__name__, ("completion_ids",) if per_token else ()
    options = spec.get("options", {})
    call = Call(name, name, arguments or ("completions",), options, extras=extras, per_token=per_token)
    settings = RewardSpec(name=function.__name__, workers=0, **spec)
    return OpenReward(settings, call, RewardThread(call, function))


def constant(values: Any, name: str = "r") -> Callable[..., Any]:
    def reward(completions: Sequence[str], **_: Any) -> Any:
        return values

    reward.__name__ = name
    return reward


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_reward_sees_the_whole_batch_once():
    calls: list[dict[str, Any]] = []

    def see(**columns: Any) -> list[float]:
        calls.append(columns)
        return [0.0] * 4

    RewardSet((open_function(see, "prompts", "completions", "answer", options={"limit": 3}),)).score(ROLLOUT)
    assert calls == [
        {
            "prompts": ["p0", "p0", "p1", "p1"],
            "completions": ["a", "b", "c", "d"],
            "answer": ["a", "a", "d", "d"],
            "limit": 3,
        }
    ]


def test_total_is_the_weighted_sum_over_the_rewards_that_apply():
    first, second = constant([1.0, 1.0, None, 0.0], "first"), constant([None, 0.5, 2.0, -1.0], "second")
    scores = reward_set(first, second, weights=[2.0, -0.5]).score(ROLLOUT)
    np.testing.assert_array_equal(scores.total, [2.0, 2.0 - 0.25, -1.0, 0.5])
    np.testing.assert_array_equal(scores.by_name["first"], [1.0, 1.0, np.nan, 0.0])
    np.testing.assert_array_equal(scores.by_name["second"], [np.nan, 0.5, 2.0, -1.0])
    assert list(scores.by_name) == ["first", "second"]
    assert scores.total.dtype == np.float64
    assert all(values.dtype == np.float64 for values in scores.by_name.values())


@pytest.mark.parametrize(
    "values",
    [
        (True, False, 1, 0.5),
        np.array([1.0, 0.0, 1.0, 0.5], np.float32),
        [np.True_, np.bool_(False), np.int64(1), np.float16(0.5)],
        [np.array(1.0), np.array(False), 1, Fraction(1, 2)],
    ],
    ids=["tuple", "array", "numpy scalars", "0-d arrays"],
)
def test_whatever_is_a_number_counts(values: Any):
    np.testing.assert_array_equal(reward_set(constant(values)).score(ROLLOUT).total, [1.0, 0.0, 1.0, 0.5])


# --- weights, gates, rows that go without ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (2.5, 7, 2.5),
        ({100: 0.0, 200: 1.0}, 0, 0.0),
        ({100: 0.0, 200: 1.0}, 100, 0.0),
        ({100: 0.0, 200: 1.0}, 150, 0.5),
        ({200: 1.0, 100: 0.0}, 175, 0.75),
        ({100: 0.0, 200: 1.0}, 200, 1.0),
        ({100: 0.0, 200: 1.0}, 999, 1.0),
        ({0: 1.0, 9: 1.0, 10: 0.25}, 9, 1.0),
        ({0: 1.0, 9: 1.0, 10: 0.25}, 10, 0.25),
        ({5: 3.0}, 0, 3.0),
    ],
)
def test_a_weight_follows_its_schedule(schedule: Any, step: int, expected: float):
    assert RewardSpec(name="x", weight=schedule).weight_at(step) == expected


def test_a_scheduled_weight_counts_and_is_shown():
    rewards = RewardSet(
        (open_function(constant([1.0] * 4, "a"), weight={0: 1.0, 10: 3.0}), open_function(constant([1.0] * 4, "b")))
    )
    scores = rewards.score(make_rollout(["p0", "p1"], list("abcd"), step=5))
    np.testing.assert_array_equal(scores.total, [3.0] * 4)
    assert scores.figures["rewards/a/weight"] == Figure(2.0, "max")
    assert "rewards/b/weight" not in scores.figures


def test_a_gate_keeps_rows_from_a_reward():
    asked: list[list[str]] = []

    def correct(completions: list[str]) -> list[float]:
        asked.append(completions)
        return [5.0] * len(completions)

    gate, other = open_function(constant([1.0, 0.0, None, -1.0], "gate")), open_function(constant([0.5] * 4))
    scores = RewardSet((open_function(correct, only_if="gate"), gate, other)).score(ROLLOUT)
    assert asked == [["a"]]
    np.testing.assert_array_equal(scores.by_name["correct"], [5.0, 0.0, np.nan, 0.0])
    np.testing.assert_array_equal(scores.total, [6.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"a": "c", "b": None}, r"only_if of a must name another reward, got 'c'; there are \['a', 'b'\]"),
        ({"a": "b", "b": "c"}, r"only_if of b must name another reward, got 'c'; there are \['a', 'b'\]"),
        ({"a": "a", "b": None}, "only_if must not lead back, got a <- a"),
        ({"a": "b", "b": "a"}, "only_if must not lead back, got a <- b <- a"),
    ],
)
def test_gates_that_lead_nowhere(gates: dict[str, str | None], message: str):
    with pytest.raises(RewardError, match=message):
        open_rewards([RewardSpec(name=name, only_if=gate) for name, gate in gates.items()], [])


def test_a_row_that_goes_without_is_unscored(caplog: pytest.LogCaptureFixture):
    values = [1.0, 3.0, float("nan"), float("nan"), 5.0, float("inf")]
    rewards = RewardSet((open_function(constant(values), on_error="skip"),))
    scores = rewards.score(make_rollout(["p0", "p1"], list("abcdef")))
    np.testing.assert_array_equal(scores.total, [1.0, 3.0, np.nan, np.nan, 5.0, np.nan])
    assert scores.figures["rewards/r/errors"].value == 3


def test_the_same_reward_twice_under_labels():
    specs = [RewardSpec(name="format", label=label, options={"pattern": label}) for label in ("a", "b")]
    scores = open_rewards(specs, []).score(ROLLOUT)
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {"a": [1, 0, 0, 0], "b": [0, 1, 0, 0]}


def test_a_set_fits_other_data_in_the_same_processes():
    rewards = open_rewards([RewardSpec(name="exact_answer")], ["answer"])
    other = rewards.for_columns(["answer", "source"])
    assert other.rewards[0].workers is rewards.rewards[0].workers
    with pytest.raises(RewardError, match="requires the parameter 'answer'"):
        rewards.for_columns(["question"])


ANSWERS = st.one_of(st.integers(-20, 20).map(str), st.just("New York"))
ROWS = st.lists(
    st.tuples(
        st.text("ab#\n", max_size=5),
        ANSWERS,
        st.lists(st.one_of(ANSWERS, ANSWERS.map("#### {}".format)), min_size=2, max_size=2),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_permuting_prompts_permutes_rewards(rows: list[tuple[str, str, list[str]]], rng: random.Random):
    weights = {"exact_answer": 0.3, "gsm8k": 0.7, "format": 1.0}
    rewards = open_rewards([RewardSpec(name=name, weight=weight) for name, weight in weights.items()], ["answer"])

    def totals_PG(order: Sequence[int]) -> np.ndarray:
        chosen = [rows[i] for i in order]
        texts = [text for _, _, two in chosen for text in two]
        rollout = make_rollout([prompt for prompt, _, _ in chosen], texts, [{"answer": a} for _, a, _ in chosen])
        return rewards.score(rollout).total.reshape(-1, 2)

    order = list(range(len(rows)))
    rng.shuffle(order)
    np.testing.assert_array_equal(totals_PG(order), totals_PG(range(len(rows)))[order])


# --- rewards that misbehave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 3, r"reward r must return a list of one number \(or None\) per completion, 4 here, got 3 values"),
        ([], "4 here, got 0 values"),
        (1.0, "4 here, got a float"),
        (None, "4 here, got a NoneType"),
        ("abcd", "4 here, got a str"),
        ({0, 1, 2, 3}, "4 here, got a set"),
        (dict.fromkeys(range(4), 1.0), "4 here, got a dict"),
        ((x for x in (1.0, 1.0, 1.0, 1.0)), "4 here, got a generator"),
        (np.array(1.0), "4 here, got a ndarray"),
        ([1.0, 1.0, float("nan"), 1.0], r"got nan for row 2 \(prompt 'p1', completion 'c'\)"),
        ([1.0, float("inf"), 1.0, 1.0], r"got inf for row 1 \(prompt 'p0', completion 'b'\)"),
        ([1.0, 1.0, 1.0, np.float32("nan")], "for row 3"),
        ([1.0, 1.0, 10**400, 1.0], "got 1000.* for row 2"),
        (["1", 1.0, 1.0, 1.0], r"finite numbers \(or None where it does not apply\), got '1' for row 0"),
        ([1.0, [1.0], 1.0, 1.0], r"got \[1\.0\] for row 1"),
        (np.ones((4, 1)), r"for row 0"),
        ([1.0, 1j, 1.0, 1.0], "got 1j for row 1"),
    ],
)
def test_values_that_are_not_one_number_per_row(values: Any, message: str):
    with pytest.raises(RewardError, match=message):
        reward_set(constant(values)).score(ROLLOUT)


def test_an_exception_names_reward_place_and_sample(reward_file: MakeFile):
    path = reward_file(
        "def number(completions):\n    return [inner(c) for c in completions]\n\n\ndef inner(c):\n    return int(c)\n"
    )
    rewards = open_rewards([RewardSpec(name=f"{path}:number", workers=0)], [])
    rollout = make_rollout(["p0", "p1"], ["1", "2", "three", "four"])
    message = (
        r"reward number raised ValueError: invalid literal for int\(\) with base 10: 'three' "
        r"\(my_rewards\.py:6 in inner\); row 2 \(prompt 'p1', completion 'three'\) raises on its own\. Return None"
    )
    with pytest.raises(RewardError, match=message) as caught:
        rewards.score(rollout)
    assert "ValueError: invalid literal" in str(caught.value.__cause__)
    assert "line 2, in number" in str(caught.value.__cause__)


def test_looking_for_the_sample_stops_at_the_first_that_raises():
    calls: list[list[str]] = []

    def fails_on_b(completions: list[str]) -> list[float]:
        calls.append(completions)
        if "b" in completions:
            raise KeyError("b")
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"raised KeyError: 'b' \(.*; row 1 \(prompt 'p0', completion 'b'\)"):
        reward_set(fails_on_b).score(ROLLOUT)
    assert calls == [["a", "b", "c", "d"], ["a"], ["b"]]


def test_an_exception_of_the_batch_as_a_whole():
    def needs_two(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise MemoryError("too many")
        return [0.0]

    message = "raised MemoryError: too many .*no row raises on its own, so it takes several"
    with pytest.raises(RewardError, match=message):
        reward_set(needs_two).score(ROLLOUT)


def test_interrupting_a_reward_is_not_its_error():
    def interrupted(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reward_set(interrupted).score(ROLLOUT)


def test_long_texts_are_shortened_in_messages():
    rollout = make_rollout(["start" + "x" * 5000 + "end"], ["y" * 5000] * 2)
    with pytest.raises(RewardError) as caught:
        reward_set(constant([1.0, "2"])).score(rollout)
    assert len(str(caught.value)) < 600
    assert "'startxxx" in str(caught.value)
    assert "xxxend'" in str(caught.value)
