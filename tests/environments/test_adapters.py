"""Classes whose actions are texts, in the manner of other libraries."""

from pathlib import Path

import pytest

from tests.environments.playing import acted, answer, begun, open_pool, says, told
from tests.goldens import labelled
from tpu_grpo.environments.actions import Answered
from tpu_grpo.environments.adapter_classes import OpenenvAdapter, adapter_for
from tpu_grpo.environments.environment_classes import find_environment, load_environment
from tpu_grpo.environments.tool_values import WrongError, observed_text, step_of

LABELLED = Path(__file__).with_name("labelled.txt")

LIBRARIES = "tests.environments.libraries"


# --- OpenEnv ---------------------------------------------------------------------------------------------------------


def test_a_client_of_openenv():
    echo = find_environment(f"{LIBRARIES}:Echo")
    assert adapter_for(echo, {}) == (OpenenvAdapter, {})
    loaded = load_environment(f"{LIBRARIES}:Echo", {"base_url": "there"})
    assert (loaded.takes, loaded.is_async) == ("texts", False)
    with open_pool(f"{LIBRARIES}:Echo", options={"base_url": "there"}) as pool:
        assert told(begun(pool, columns={"level": 1})) == "there ['level', 'seed']"  # a single field is the text
        reply = acted(pool, says("hello"))
        assert reply == Answered(({"role": "user", "content": '{"echoed": "hello", "length": 5}'},), 0.5, False)
        assert answer(acted(pool, says("stop"))).done


# --- Tunix -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_environments_of_tunix():
    columns = {"question": "Which?", "answer": "a"}
    names = {"task": "tests.environments.tunix_games:Guess", "plain": "tests.environments.tunix_games:Plain"}
    with open_pool(names["task"], options={"max_steps": 2}) as pool:
        assert told(begun(pool, columns=columns)) == ""  # the question is in the prompt
        assert acted(pool, says("b")) == Answered(({"role": "user", "content": "no"},), 0.0, False)
        assert answer(acted(pool, says("b"))).done  # max_steps, which Tunix counts
    with open_pool(names["plain"], options={"size": 3}) as pool:
        assert told(begun(pool, columns=columns)) == "Which? (of 3)"
        assert acted(pool, says("a")) == Answered((), 1.0, True)


# --- what a step returns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [None, "text", ("a", 0.0), ("a", 0.0, True), ("a", 0.0, True, "info"), {"observation": "a", "reward": 0.0}, 3],
)
def test_what_is_no_step_is_refused(returned):
    with pytest.raises(WrongError, match="must return \\(observation, reward, done, info\\)"):
        step_of(returned)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", [1.0]])
def test_rewards_of_steps_are_finite_numbers(reward):
    with pytest.raises(WrongError, match="must give a finite number or None, got .* from step"):
        step_of(("a", reward, True, {}))


@pytest.mark.parametrize(("observation", "text"), labelled(LABELLED, "observations"))
def test_texts_of_observations(observation, text: str):
    assert observed_text(observation, "step") == text


def test_an_observation_may_be_empty():
    """A step that is not the last one is followed by another, whatever there is to be seen."""
    with open_pool(f"{LIBRARIES}:Silent") as pool:
        for key, shows in enumerate((None, "", [])):
            assert begun(pool, key, {"shows": shows}) == Answered(())
            assert acted(pool, says("go"), key) == Answered(({"role": "user", "content": ""},), 0.5, False)
            assert acted(pool, says("stop"), key) == Answered((), 0.5, True)
