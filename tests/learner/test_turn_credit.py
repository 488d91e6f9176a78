"""What turns are worth, by hand, and where it arrives: in advantages of tokens, and in which groups are informative."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.talks import talk
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.learner.signal import counted_rows, informative_groups
from tpu_grpo.learner.token_advantages import token_advantages
from tpu_grpo.learner.turn_credit import turn_credits
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

ONE, TWO = ([11, 12], [21]), ([13], [])


def config(**environment: Any) -> RunConfig:
    return parse_config({"environment": {"name": "toy.py:Toy", "turn_credit": "turn", **environment}})


def scored(*completions: Completion, group: int = 3) -> ScoredRollout:
    prompts = tuple(Prompt("", (number,)) for number in range(len(completions) // group))
    rollout = Rollout(PromptBatch(1, prompts), group, completions, ("",) * len(completions), 0.0)
    return ScoredRollout(rollout, Scores(np.zeros(len(completions)), {}, 0.0))


FAILED = talk([1], ONE, rewards=[7.0], ending="failed", failure=Failure("late", "was late"))
GROUP = (
    talk([1], ONE, TWO, rewards=[0.0, 1.0], prompts={1: [1, 12]}),  # two branches
    talk([1], ONE, TWO, rewards=[1.0, None]),
    talk([1], TWO, rewards=[1.0]),
)


def lists(credits: Any) -> list[list[float]]:
    return [line.tolist() for line in credits]


def test_the_example_by_hand() -> None:
    """R is [1 1], [1 0] and [1]; the second turns' mean is 0.5. An answer's token gets nothing."""
    assert lists(turn_credits(scored(*GROUP).rollout, config())) == [[0, 0, 0, 0.5], [0, 0, 0, -0.5], [0]]


def test_groups_stand_alone_and_a_turn_is_compared_with_those_that_came_as_far() -> None:
    """Of the other group R is [6 4 1] and [3 0] and [0]: means 3, 2 and 1."""
    other = (
        talk([2], ONE, TWO, TWO, rewards=[2.0, 3.0, 1.0]),
        talk([2], TWO, TWO, rewards=[3.0, 0.0]),
        talk([2], TWO),
    )
    both = scored(*GROUP, *other)
    found = lists(turn_credits(both.rollout, config()))
    assert found[3:] == [[3, 3, 0, 2, 0], [0, -2], [-3]]
    assert found[:3] == lists(turn_credits(scored(*GROUP).rollout, config()))
    assert lists(turn_credits(both.select([1]).rollout, config())) == found[3:]


def test_they_are_added_to_the_advantages_and_to_what_scores_say_of_tokens() -> None:
    advantages = np.array([1.0, -1.0, 0.25])
    found = token_advantages(advantages, scored(*GROUP), config())
    assert lists(found) == [[1, 1, 1, 1.5], [-1, -1, -1, -1.5], [0.25]]
    assert token_advantages(advantages, scored(*GROUP), config(turn_credit="episode")) is advantages
    assert token_advantages(advantages, scored(*GROUP), RunConfig()) is advantages
    per_token = (np.array([0.0, 0.5, 9.0, 1.0]), np.zeros(4), np.array([2.0]))
    with_both = replace(scored(*GROUP), scores=replace(scored(*GROUP).scores, per_token=per_token))
    assert lists(token_advantages(advantages, with_both, config())) == [[1, 1.5, 10, 2.5], [-1, -1, -1, -1.5], [2.25]]


def test_turns_that_differ_make_a_group_informative() -> None:
    equal = [talk([2], ONE, TWO, rewards=[0.1, 0.2]) for _ in range(3)]
    both = scored(*equal, *GROUP)
    assert informative_groups(both, {}, config()).tolist() == [False, True]
    assert informative_groups(both, {}, config(turn_credit="episode")).tolist() == [False, False]


def test_what_is_said_of_observed_tokens_makes_no_group_informative() -> None:
    for place, informative in ((2, False), (3, True)):
        per_token = (np.zeros(4), np.where(np.arange(4) == place, 1.0, 0.0), np.zeros(1))
        group = scored(*GROUP)
        group = replace(group, scores=replace(group.scores, per_token=per_token))
        assert informative_groups(group, {}, config(turn_credit="episode")).tolist() == [informative]


def test_an_environment_that_failed_is_skipped_or_gave_nothing() -> None:
    """Skipped it is in no mean and does not count; else its 7 makes the first turns' mean (1 + 1 + 7) / 3 = 3."""
    group = scored(*GROUP[:2], FAILED)
    skipped = config(on_error="skip")
    assert lists(turn_credits(group.rollout, skipped)) == [[0, 0, 0, 0.5], [0, 0, 0, -0.5], [0, 0, 0]]
    counted = counted_rows(group.rollout, np.array([True]), skipped)
    assert counted.tolist() == [True, True, False]
    assert counted_rows(group.rollout, np.array([True]), config(on_error="value")).all()
    assert lists(turn_credits(group.rollout, config(on_error="value")))[2] == [4, 4, 0]
    assert lists(turn_credits(group.rollout, config(on_error="value")))[0] == [-2, -2, 0, 0.5]
    assert informative_groups(scored(FAILED, FAILED, FAILED), {}, skipped).tolist() == [False]


def test_a_reward_that_is_no_number_is_refused() -> None:
    bad = talk([1], ONE, TWO, rewards=[0.0, float("nan")])
    with pytest.raises(NonFiniteError, match="reward of turn 2 in row 1 must be finite, got nan; repair the env.* Toy"):
        turn_credits(scored(GROUP[0], bad, GROUP[2]).rollout, config())
