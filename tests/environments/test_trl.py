"""Environments of the shapes that TRL documents are played."""

import random

import pytest

from tests.environments.playing import acted, answer, begun, call, ended, open_pool, told
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.attributes import rebuilt

FILE = "tests.environments.trl_examples"


def tools(name: str) -> list[str]:
    loaded = load_environment(f"{FILE}:{name}", {})
    return [tool["function"]["name"] for tool in loaded.tools]


@pytest.mark.full
def test_the_counter_that_draws_its_task():
    random.seed(7)  # the seed that the conversation gets
    target = random.randint(1, 6)
    with open_pool(f"{FILE}:IncrementEnv") as pool:
        assert told(begun(pool)) == f"Increment the counter by {target}."
        assert told(acted(pool, call("increment", step=target))) == str(target)
        assert ended(pool).reward == 1.0


@pytest.mark.full
def test_the_counter_with_data():
    with open_pool(f"{FILE}:IncrementEnvWithData") as pool:
        prompt = [{"role": "user", "content": "Increment the counter to 4."}]
        for step, reward in ((4, 1.0), (3, 0.0)):
            assert told(begun(pool, columns={"prompt": prompt, "target": 4})) == ""
            assert told(acted(pool, call("increment", step=step))) == str(step)
            assert ended(pool).reward == reward


@pytest.mark.full
def test_several_environments_with_tools_of_their_own():
    names = {"coding": f"{FILE}:CodingEnv", "game": f"{FILE}:GameEnv"}
    with open_pool(names) as pool:
        assert told(begun(pool, 0, {"environment": "coding"}, "coding")).startswith("Compute the ")
        assert told(begun(pool, 1, {"environment": "game"}, "game")) == "Reach the goal tile."
        assert told(acted(pool, call("run_code", code="1"))) == "None"  # its body is ... in the documentation
        assert told(acted(pool, call("move", action="up"))).startswith("Error: there is no tool 'move'")
        assert told(acted(pool, call("move", action="up"), 1)) == "None"
        assert ended(pool).reward is None


def test_echo():
    with open_pool(f"{FILE}:EchoToolEnv", keep=True) as pool:
        assert told(begun(pool)) == ""
        assert told(acted(pool, call("echo", message="Hello"))) == "Hello"
        kept = ended(pool).kept
        assert kept is not None
        assert {*vars(rebuilt(kept, EpisodeError))} == {"env", "reward"}


def test_wordle_ends_by_raising():
    with open_pool(f"{FILE}:WordleEnv") as pool:
        assert told(begun(pool)) == "You are playing Wordle.\n"
        assert told(acted(pool, call("guess", guess="[slate]"))) == "[slate] is wrong.\n"
        assert told(acted(pool, call("guess", guess="[crane]"))) == "[crane] is right.\n"
        over = answer(acted(pool, call("guess", guess="[crane]")))
        assert (told(over), over.errors) == ("Error: ValueError: Game over.", 1)


@pytest.mark.full
def test_catch():
    assert tools("CatchEnv") == ["move", "stay"]
    with open_pool(f"{FILE}:CatchEnv") as pool:
        above = "The ball is directly above the paddle."
        assert told(begun(pool)) == f"Ball: row 1/10, column 3/5\nPaddle: column 3/5\n{above}"
        assert told(acted(pool, call("move", direction="left"))).endswith("1 column(s) to the RIGHT of the paddle.")
        assert told(acted(pool, call("move", direction="up"))).startswith("Error: ValueError: Invalid direction 'up'")
        assert told(acted(pool, call("stay"))).startswith("Ball: row 3/10")


@pytest.mark.full
def test_one_class_for_two_games():
    assert tools("MultiEnv") == ["guess", "move", "stay"]
    with open_pool(f"{FILE}:MultiEnv") as pool:
        assert told(begun(pool, 0, {"env": "wordle"})) == "You are playing Wordle.\n"
        assert told(begun(pool, 1, {"env": "catch"})).startswith("Ball: row 1/10")
        assert told(acted(pool, call("stay"))) == "Error: ValueError: stay is only available in Catch"
        assert told(acted(pool, call("guess", guess="[crane]"))) == "[crane] is right.\n"
        assert told(acted(pool, call("stay"), 1)).startswith("Ball: row 2/10")
