"""Games of textarena are played, where its package is installed."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from tests.environments.playing import acted, answer, begun, ended, open_pool, says, told

needs_textarena = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None,
    reason="textarena is not installed; it comes with the extra textarena",
)


@needs_textarena
def test_a_number_is_guessed():
    with open_pool("textarena", options={"game": "GuessTheNumber-v0"}) as pool:
        rules = told(begun(pool))
        assert rules.startswith("You are Player 0. You are playing Guess The Number.\nYou have to guess the number")
        first, last = 1, 20
        for _ in range(5):  # 20 numbers are found by 5 halvings
            guess = (first + last) // 2
            reply = answer(acted(pool, says(f"I say [{guess}]")))
            if reply.done:
                break
            assert reply.reward == 0.0
            first, last = (guess + 1, last) if told(reply).endswith("is higher.") else (first, guess - 1)
        assert (reply.reward, told(reply)) == (1.0, "Congratulations! You guessed the correct number.")
        assert ended(pool).reward is None


@needs_textarena
def test_the_same_seed_is_the_same_game():
    with open_pool("textarena", options={"game": "Mastermind-v0"}) as pool:
        told_twice = []
        for key in (1, 2):
            begun(pool, key)
            told_twice.append([told(acted(pool, says(f"[{code}]"), key)) for code in ("1 2 3 4", "4 5 6 1", "x")])
            pool.drop(key)
    assert told_twice[0] == told_twice[1]
    assert "invalid move" in told_twice[0][2]


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="textarena is installed")
def test_without_the_package_it_says_what_is_needed():
    from tpu_grpo.records.errors import EpisodeError

    with pytest.raises(EpisodeError, match=r'^the environment textarena needs .* install "tpu-grpo\[textarena\]"'):
        open_pool("textarena")


def test_a_game_that_raises_for_a_move_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """GuessTheNumber does, for a number of 5,000 digits."""

    class Game:
        def step(self, action: str) -> Any:
            return int(action)

    stand_in: Any = ModuleType("textarena")
    stand_in.__spec__, stand_in.make = ModuleSpec("textarena", None), lambda name: Game()
    monkeypatch.setitem(sys.modules, "textarena", stand_in)
    monkeypatch.delitem(sys.modules, "tpu_grpo.environments.shipped.textarena_games", raising=False)
    from tpu_grpo.environments.shipped.textarena_games import TextArena

    game = TextArena()
    assert game.step("9" * 5000) == ("The move cannot be played: ValueError.", 0.0, True, {})
    monkeypatch.delitem(sys.modules, "tpu_grpo.environments.shipped.textarena_games")
