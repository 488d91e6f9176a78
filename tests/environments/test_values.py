"""What environments give becomes numbers."""

from pathlib import Path
from typing import Any

import pytest

from tests.goldens import labelled
from tpu_grpo.environments.tool_values import WrongError, turn_rewards_of

LABELLED = Path(__file__).with_name("labelled.txt")


@pytest.mark.parametrize(("given", "lengths", "rewards"), labelled(LABELLED, "turn_rewards"))
def test_what_a_turn_adds_is_its_reward(given: list[Any], lengths: list[int], rewards: tuple[float, ...]) -> None:
    assert turn_rewards_of(given, lengths) == rewards


@pytest.mark.parametrize(
    ("given", "lengths", "message"),
    [
        ([1.0], [0, 0], "must give a list to which turns add, or of 2 numbers in the end, .*got list"),
        ([1.0], [1, 2], "must give a list to which turns add, or of 2 numbers in the end"),
        ("12", [1, 2], "must give a list of numbers, to which turns add, of 0 at least, got str '12'"),
        ([float("nan")], [1], "must give a finite number or None, got float nan from get_turn_rewards"),
        (
            [1e308],
            [1],
            r"got float 1e\+308 from get_turn_rewards; correct what it returns, which may be at most 1e\+15",
        ),
        ([10**400], [1], "must give a finite number or None, got int 1000.* from get_turn_rewards"),
    ],
)
def test_rewards_that_do_not_fit_the_turns(given: Any, lengths: list[int], message: str) -> None:
    with pytest.raises(WrongError, match=message):
        turn_rewards_of(given, lengths)
