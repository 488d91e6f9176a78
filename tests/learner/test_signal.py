"""What a rollout teaches: which groups and completions count, advantages of completions, tokens and turns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from tests.talks import talk
from tpu_grpo.algorithms import RunAlgorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection, LossAggregation, RunConfig, parse_config
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.learner.signal import Signal, group_advantages, read_signal
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import NonFiniteError, RewardError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

NAN = float("nan")


def scored_of(totals: Sequence[Sequence[float]], ends: str) -> ScoredRollout:
    """Groups with these rewards; a letter of ``ends`` says how each completion ended: s(top), l(ength)."""
    reasons = {"s": "stop", "l": "length"}
    completions: list[Any] = [
        Completion(np.array([5]), np.array([-1.0], np.float32), reasons[end], 0)  # pyrefly: ignore[bad-argument-type]
        for end in ends.replace(" ", "")
    ]
    scored = scored_group(*completions, group=len(totals[0]))
    return replace(scored, scores=Scores(np.array(totals, np.float64).ravel(), {}, 0.0))


def scored_group(*completions: Completion, group: int = 3) -> ScoredRollout:
    prompts = tuple(Prompt("", (number,)) for number in range(len(completions) // group))
    rollout = Rollout(
        PromptBatch(1, prompts, tuple(range(len(prompts)))), group, completions, ("",) * len(completions), 0.0
    )
    return ScoredRollout(rollout, Scores(np.zeros(len(completions)), {}, 0.0))


def config(**algorithm: Any) -> RunConfig:
    return parse_config({"algorithm": algorithm})


def opened(advantage: Any) -> RunAlgorithm:
    return open_algorithm(AlgorithmSection(advantage=advantage))


def signal_of(scored: ScoredRollout, settings: RunConfig) -> Signal:
    return read_signal(
        *(scored, open_algorithm(settings.algorithm), settings.rewards, settings.environment),
        masks_truncated=settings.algorithm.truncated == "mask",
        drops_uninformative=settings.drops_uninformative,
    )


def informative(scored: ScoredRollout, settings: RunConfig) -> list[bool]:
    return signal_of(scored, settings).informative_P.tolist()


def lists(values: Any) -> list[list[float]]:
    return [line.tolist() for line in values]


# --- what counts -----------------------------------------------------------------------------------------------------

GROUPS = scored_of([[1, 1], [0, 1], [0, 0], [1, 0], [2, 1]], "ss ss ll ll sl")


def test_informative_groups_and_counted_completions_by_hand() -> None:
    for algorithm, groups, counted in (
        ({}, [0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"drop_uninformative": True}, [0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]),
        ({"truncated": "mask"}, [0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0, 1, 0]),
        ({"truncated": "mask", "drop_uninformative": True}, [0, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0, 1, 0]),
    ):
        signal = signal_of(GROUPS, config(**algorithm))
        assert informative(GROUPS, config(**algorithm)) == [bool(value) for value in groups]
        assert signal.counted_B.tolist() == [bool(value) for value in counted]
        assert signal.metrics()["groups/informative_fraction"] == sum(groups) / 5
        assert signal.metrics().get("completions/masked_fraction") == (0.5 if "truncated" in algorithm else None)


def test_a_group_with_a_token_that_is_rewarded_by_itself_is_informative() -> None:
    """The first group's rewards are equal and its tokens got nothing; of the third one token did."""
    per_token = tuple(np.array([value]) for value in (0, 0, 0, 0, 0, -0.5, 1, 0, 0, 0))
    scored = replace(GROUPS, scores=replace(GROUPS.scores, per_token=per_token))
    assert informative(scored, config()) == [False, True, True, True, True]
    masked = informative(scored, config(truncated="mask"))  # the third and the fourth were cut
    assert masked == [False, True, False, False, True]


def test_rewards_one_by_one_decide_where_the_advantages_take_them_so() -> None:
    """Totals of the first group are equal, its rewards are not; the third differs only in a reward of weight 0."""
    scored = scored_of([[1, 1], [1, 1], [1, 1], [0, 1]], "s" * 8)
    by_name = {
        "a": np.array([0, 1, 1, NAN, 1, 1, 0, 0]),
        "b": np.array([1, 0, 1, 1, NAN, NAN, 0, 1]),
        "c": np.array([0.0, 0, 0, 0, 3, 4, 0, 0]),
    }
    scored = replace(scored, scores=replace(scored.scores, by_name=by_name))
    weights = zip(by_name, (1.0, 0.5, 0.0), strict=True)
    rewards = [{"name": "exact_answer", "label": label, "weight": weight} for label, weight in weights]
    one_by_one = parse_config({"algorithm": {"advantage": "gdpo"}, "rewards": rewards})
    assert informative(scored, one_by_one) == [True, False, False, True]
    assert informative(scored, config()) == [False, False, False, True]


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_those_that_do_not_count_leave_the_weights_of_the_others_as_if_alone(aggregation: Any) -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 6, 8)
    completions = [Completion(np.ones(n, np.int32), np.zeros(n, np.float32), "stop", 0) for n in counts]
    shape, counted = RowShape(2, 5, 7, 1), np.array([1, 0, 1, 1, 0, 0, 1, 1], np.bool_)

    def weight_of_each(which: Sequence[int], counted: np.ndarray | None) -> list[float]:
        chosen, prompts = [completions[i] for i in which], [[1]] * len(which)
        batch, packing = train_rows(prompts, chosen, np.zeros(len(which)), shape, aggregation, counted)
        starts = zip(packing.rows, packing.starts, strict=True)
        return [float(batch.weights[row, start + 1]) for row, start in starts]

    alone = weight_of_each(np.flatnonzero(counted).tolist(), None)
    among = weight_of_each(range(8), counted)
    assert [among[i] for i in np.flatnonzero(counted)] == alone
    assert [among[i] for i in np.flatnonzero(~counted)] == [0.0] * 3


# --- advantages of completions ---------------------------------------------------------------------------------------


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="advantages must be finite, got nan in row 2"):
        group_advantages(np.array([0, 1, np.inf, 0]), group_size=2, algorithm=opened("rloo"))


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "lite_ppo", "scale_rl", "reinforce_pp_baseline", "gdpo"])
def test_advantages_of_a_step_are_those_of_the_groups_that_are_taken(advantage: str) -> None:
    """Deviations over a step, too; and in whatever order the groups stand."""
    rng = np.random.default_rng(2)
    rewards_PG, taken = rng.normal(size=(6, 3)), np.array([1, 0, 0, 1, 1, 0], np.bool_)
    known = {"lengths_PG": rng.integers(1, 9, (6, 3)), "rewards_NPG": rewards_PG[None], "weights_N": np.ones(1)}
    algorithm = open_algorithm(config(advantage=advantage).algorithm)

    def advantages(order: np.ndarray, taken_P: np.ndarray | None) -> np.ndarray:
        of_order = {name: value if value.ndim == 1 else value[..., order, :] for name, value in known.items()}
        found = group_advantages(
            rewards_PG[order].ravel(), group_size=3, algorithm=algorithm, known=of_order, taken_P=taken_P
        )
        return found.reshape(-1, 3)

    alone, among = advantages(np.flatnonzero(taken), None), advantages(np.arange(6), taken)
    np.testing.assert_array_equal(among[taken], alone)
    assert not among[~taken].any()
    order = np.array([5, 3, 0, 1, 4, 2])
    np.testing.assert_allclose(advantages(order, taken[order]), among[order], rtol=1e-12, atol=1e-15)
    assert not advantages(np.arange(6), np.zeros(6, np.bool_)).any()


# --- a learner -------------------------------------------------------------------------------------------------------


def test_a_baseline_of_the_whole_step_learns_from_every_group() -> None:
    with pytest.raises(ValueError, match=r"drop_uninformative=true does not go with algorithm.advantage=reinforce_pp,"):
        config(drop_uninformative=True, advantage="reinforce_pp")
    assert config(drop_uninformative=True, advantage="reinforce_pp_baseline").drops_uninformative


def test_what_is_selected_of_a_step() -> None:
    chosen = GROUPS.select([4, 1])
    assert chosen.scores.total.tolist() == [2, 1, 0, 1]
    assert chosen.rollout.batch.records == (4, 1)
    assert [p.token_ids for p in chosen.rollout.batch.prompts] == [(4,), (1,)]
    assert [c.finish_reason for c in chosen.rollout.completions] == ["stop", "length", "stop", "stop"]


# --- per-token advantages -------------------------------------------------------------------------------------

PROMPTS, LENGTHS = [[1, 2], [1, 2], [3], [3]], (3, 2, 1, 2)
ADVANTAGES = np.array([0.5, -0.5, 1.0, -1.0])
PER_TOKEN = tuple(map(np.array, ([0.0, 0.25, -1.0], [0.0, 0.5], [2.0], [0.0, 0.0])))
CENTRED = config(advantage="drgrpo")
"""Advantages are the rewards less their mean."""


def with_tokens(per_token: Any) -> ScoredRollout:
    completions = tuple(Completion(np.arange(4, 4 + n), np.full(n, -0.5, np.float32), "stop", 0) for n in LENGTHS)
    rollout = Rollout(PromptBatch(1, (Prompt("", (1, 2)), Prompt("", (3,)))), 2, completions, ("",) * 4, 0.0)
    return ScoredRollout(rollout, Scores(ADVANTAGES, {}, 0.0, per_token=per_token))


def test_what_is_said_of_tokens_is_added() -> None:
    found = signal_of(with_tokens(PER_TOKEN), CENTRED).advantages
    assert lists(found) == [[0.5, 0.75, -0.5], [-0.5, 0.0], [3.0], [-1.0, -1.0]]
    plain = signal_of(with_tokens(()), CENTRED)
    assert plain.advantages is plain.advantages_B


def test_rows_hold_them_and_mini_batches_take_their_own() -> None:
    signal = signal_of(with_tokens(PER_TOKEN), CENTRED)
    halves = list(signal.mini_batches(1, seed=0, iteration=1))
    assert sorted(row for _, rows in halves for row in rows) == [0, 1, 2, 3]
    for part, rows_B in [(signal, [0, 1, 2, 3]), *halves]:
        assert part.prompts == tuple(tuple(PROMPTS[row]) for row in rows_B)
        batch, packing = train_rows(part.prompts, part.completions, part.advantages, RowShape(2, 3, 8, 1))
        for place, row in enumerate(rows_B):
            start = packing.starts[place] + len(PROMPTS[row])
            held = batch.advantages[packing.rows[place], start : start + LENGTHS[row]]
            np.testing.assert_allclose(held, ADVANTAGES[row] + PER_TOKEN[row], rtol=1e-6)
        assert not batch.advantages[~batch.rows.mask].any()


@pytest.mark.parametrize(
    ("row", "values", "message"),
    [
        (1, np.zeros(3), r"got the shape \(3,\) for the 2 tokens of row 1; the stop token counts"),
        (2, np.array([np.nan]), r"must be finite, got \[nan\] in row 2; return numbers"),
    ],
)
def test_what_is_said_of_tokens_and_does_not_fit_is_refused(row: int, values: Any, message: str) -> None:
    per_token = tuple(values if index == row else line for index, line in enumerate(PER_TOKEN))
    with pytest.raises(RewardError, match=message):
        signal_of(with_tokens(per_token), CENTRED)
    with pytest.raises(RewardError, match="for every completion, got 3 for 4; give zeros"):
        signal_of(with_tokens(PER_TOKEN[:3]), CENTRED)


# --- what turns were worth -------------------------------------------------------------------------------------------

ONE, TWO = ([11, 12], [21]), ([13], [])


def turns(**environment: Any) -> RunConfig:
    tree = {"name": "toy.py:Toy", "turn_credit": "turn", **environment}
    return parse_config({"environment": tree, "algorithm": {"advantage": "drgrpo"}})


FAILED = talk([1], ONE, rewards=[7.0], ending="failed", failure=Failure("late", "was late"))
GROUP = (
    talk([1], ONE, TWO, rewards=[0.0, 1.0], prompts={1: [1, 12]}),  # two branches
    talk([1], ONE, TWO, rewards=[1.0, None]),
    talk([1], TWO, rewards=[1.0]),
)


def test_turns_by_hand() -> None:
    """R is [1 1], [1 0] and [1]; the second turns' mean is 0.5. An answer's token gets nothing."""
    assert lists(signal_of(scored_group(*GROUP), turns()).added) == [[0, 0, 0, 0.5], [0, 0, 0, -0.5], [0]]


def test_groups_stand_alone_and_a_turn_is_compared_with_those_that_came_as_far() -> None:
    """Of the other group R is [6 4 1] and [3 0] and [0]: means 3, 2 and 1."""
    other = (
        talk([2], ONE, TWO, TWO, rewards=[2.0, 3.0, 1.0]),
        talk([2], TWO, TWO, rewards=[3.0, 0.0]),
        talk([2], TWO),
    )
    both = scored_group(*GROUP, *other)
    found = lists(signal_of(both, turns()).added)
    assert found[3:] == [[3, 3, 0, 2, 0], [0, -2], [-3]]
    assert found[:3] == lists(signal_of(scored_group(*GROUP), turns()).added)
    assert lists(signal_of(both.select([1]), turns()).added) == found[3:]


def test_they_are_added_to_the_advantages_and_to_what_scores_say_of_tokens() -> None:
    scored, total = scored_group(*GROUP), np.array([1.0, -1.0, 0.0])
    per_token = (np.array([0.0, 0.5, 9.0, 1.0]), np.zeros(4), np.array([2.0]))
    scored = replace(scored, scores=replace(scored.scores, total=total))
    assert lists(signal_of(scored, turns()).advantages) == [[1, 1, 1, 1.5], [-1, -1, -1, -1.5], [0]]
    assert signal_of(scored, turns(turn_credit="episode")).added == ()
    assert signal_of(scored, config()).added == ()
    scored = replace(scored, scores=replace(scored.scores, per_token=per_token))
    assert lists(signal_of(scored, turns()).advantages) == [[1, 1.5, 10, 2.5], [-1, -1, -1, -1.5], [2]]


def test_turns_that_differ_make_a_group_informative() -> None:
    both = scored_group(*[talk([2], ONE, TWO, rewards=[0.1, 0.2]) for _ in range(3)], *GROUP)
    assert informative(both, turns()) == [False, True]
    assert informative(both, turns(turn_credit="episode")) == [False, False]


def test_what_is_said_of_observed_tokens_makes_no_group_informative() -> None:
    for place, expected in ((2, False), (3, True)):
        per_token = (np.zeros(4), np.where(np.arange(4) == place, 1.0, 0.0), np.zeros(1))
        group = scored_group(*GROUP)
        group = replace(group, scores=replace(group.scores, per_token=per_token))
        assert informative(group, turns(turn_credit="episode")) == [expected]


def test_an_environment_that_failed_is_skipped_or_gave_nothing() -> None:
    """Skipped it is in no mean and does not count; else its 7 makes the first turns' mean (1 + 1 + 7) / 3 = 3."""
    group, skips, gives = scored_group(*GROUP[:2], FAILED), turns(on_error="skip"), turns(on_error="value")
    skipped, given = signal_of(group, skips), signal_of(group, gives)
    assert lists(skipped.added) == [[0, 0, 0, 0.5], [0, 0, 0, -0.5], [0, 0, 0]]
    assert skipped.counted_B.tolist() == [True, True, False]
    assert given.counted_B.all()
    assert lists(given.added)[2] == [4, 4, 0]
    assert lists(given.added)[0] == [-2, -2, 0, 0.5]
    assert informative(scored_group(FAILED, FAILED, FAILED), skips) == [False]


def test_a_reward_of_a_turn_that_is_no_number_is_refused() -> None:
    bad = talk([1], ONE, TWO, rewards=[0.0, float("nan")])
    with pytest.raises(NonFiniteError, match="reward of turn 2 in row 1 must be finite, got nan; repair the env.* Toy"):
        signal_of(scored_group(GROUP[0], bad, GROUP[2]), turns())


# --- mini-batches ----------------------------------------------------------------------------------------------------


def orders_of(prompts: int, size: int, seed: int, step: int, iteration: int) -> list[list[int]]:
    """The numbers of the prompts in every mini-batch of an iteration."""
    signal = signal_of(scored_of([[0.0, 1.0]] * prompts, "s" * 2 * prompts), config())
    parts = replace(signal, step=step).mini_batches(size, seed, iteration)
    return [[row // 2 for row in rows[::2]] for _, rows in parts]


def test_an_iteration_has_every_prompt_once_in_an_order_of_its_own() -> None:
    orders = [orders_of(32, 8, *key) for key in ((7, 1, 1), (7, 1, 2), (7, 2, 1), (8, 1, 1))]
    for order in orders:
        assert [len(part) for part in order] == [8, 8, 8, 8]
        assert sorted(prompt for part in order for prompt in part) == list(range(32))
    assert len({str(order) for order in orders}) == 4
    assert orders_of(32, 8, 7, 2, 1) == orders[2]


def test_prompts_are_dealt_evenly() -> None:
    """Of 4,000 iterations, each pair of 4 prompts is a mini-batch in a third; 3 standard errors are 0.022."""
    together, signal = np.zeros((4, 4)), signal_of(scored_of([[0.0, 1.0]] * 4, "s" * 8), config())
    for iteration in range(1, 4001):
        for _, rows in signal.mini_batches(2, seed=0, iteration=iteration):
            first, second = rows[0] // 2, rows[2] // 2
            together[[first, second], [second, first]] += 1
    assert together[~np.eye(4, dtype=bool)] / 4000 == pytest.approx(1 / 3, abs=0.022)
