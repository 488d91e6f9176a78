"""The guessing game, played by whoever halves what is left."""

import random
from typing import Any

import pytest

from tests.environments.playing import acted, begun, open_pool, told
from tpu_grpo.environments.actions import Action
from tpu_grpo.environments.shipped.guessing import Guessing, secrets


def play(game: Guessing, guesses: list[str]) -> list[tuple[str, float, bool]]:
    return [game.step(guess)[:3] for guess in guesses]


def test_a_game():
    game = Guessing(guesses=8, last=0.3)
    assert game.reset(secret=63, question="...") == "Guess a number from 1 to 100."
    assert play(game, ["50", "It is 75.", "I do not know", "63"]) == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("no number", 0.0, False),
        ("right", 1.0 - 0.7 * 3 / 7, True),
    ]


def test_a_number_in_the_thinking_is_no_guess():
    with open_pool("guessing") as pool:
        begun(pool, columns={"secret": 63})
        thinking = Action(text="<think>63</think> 50", content="50")
        assert told(acted(pool, thinking)) == "higher"
        assert told(acted(pool, Action(text="<think>or 63", content=""))) == "no number"


def test_what_is_too_long_is_no_number():
    """Python would not read it, and the game would be over for everybody."""
    game = Guessing()
    game.reset(secret=63)
    assert play(game, ["9" * 5000, "9" * 1000, "5, no, 63"])[:2] == [("no number", 0.0, False), ("lower", 0.0, False)]
    assert game.made == 3


def test_the_first_guess_is_worth_most_and_the_last_still_something():
    game = Guessing(1, 10, guesses=3, last=0.4)
    game.reset(secret="7")
    assert play(game, ["7"]) == [("right", 1.0, True)]
    game.reset(secret=7)
    assert [reward for _, reward, _ in play(game, ["1", "2", "7"])] == pytest.approx([0.0, 0.0, 0.4])
    game.reset(secret=7)
    assert play(game, ["1", "10", "6"])[-1] == ("higher", 0.0, True)


@pytest.mark.parametrize("secret", [1, 37, 100])
def test_halving_finds_any_number_in_seven(secret: int):
    game = Guessing()
    game.reset(secret=secret)
    low, high, done, reward = 1, 100, False, 0.0
    while not done:
        guess = (low + high) // 2
        said, reward, done, _ = game.step(str(guess))
        low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
    assert game.made <= 7
    assert reward >= 1.0 - 0.7 * 6 / 7


def test_without_the_column_the_seed_of_the_process_decides():
    found = []
    for _ in range(2):
        random.seed(5)
        game = Guessing(1, 1000, greets=False)
        assert game.reset(seed_column="x") is None
        found.append(game.secret)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lowest": 5, "highest": 5}, "lowest must be below highest"), ({"guesses": 0}, "guesses must be >= 1, got 0")],
)
def test_options_that_make_no_game(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Guessing(**options)
    with pytest.raises(ValueError, match="secret must be from 1 to 100, got 101"):
        Guessing().reset(secret=101)


def test_data_for_it():
    records = secrets(1, 20, size=50, seed=3)
    assert records == secrets(1, 20, size=50, seed=3) != secrets(1, 20, size=50, seed=4)
    assert {r["secret"] for r in records} <= set(range(1, 21))
    assert "from 1 to 20" in records[0]["question"]
