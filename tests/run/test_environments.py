"""What of environments is found out before a run starts."""

from typing import Any

import pytest

from tpu_grpo.config import parse_config
from tpu_grpo.records.errors import DataError, EpisodeError
from tpu_grpo.run.environments import check_environment_columns, load_environments, tools_of

SEVERAL = {"a": "calculator", "b": "guessing"}
REWARDS = [{"name": "exact_answer"}]


def found(name: Any, rewards: Any = None, held_out: Any = None, **section: Any) -> Any:
    tree: dict[str, Any] = {"environment": {"name": name, **section}}
    tree |= {} if rewards is None else {"rewards": rewards}
    tree |= {} if held_out is None else {"evaluation": {"rewards": held_out}}
    return load_environments(parse_config(tree))


def test_a_run_without() -> None:
    assert load_environments(parse_config({})) == {}
    assert tools_of({}) is None


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("calculator", {}),  # the reward is the environment's, as there is no other
        ("calculator", {"rewards": [*REWARDS, {"name": "environment"}]}),
        ("calculator", {"rewards": REWARDS, "held_out": [{"name": "environment"}]}),
        ({"a": "calculator", "b": "arithmetic"}, {}),
    ],
)
def test_a_reward_that_no_environment_gives_is_refused(name: Any, more: Any) -> None:
    with pytest.raises(EpisodeError, match="needs an environment with get_reward, .* or set rewards"):
        found(name, **more)
    assert found(name, rewards=REWARDS)


def test_it_is_enough_that_one_environment_gives_a_reward() -> None:
    assert sorted(found(SEVERAL)) == ["a", "b"]
    assert list(found("guessing")) == [""]


def test_turns_that_nobody_rewards_are_not_credited() -> None:
    with pytest.raises(EpisodeError, match="environment.turn_credit=turn needs an environment with get_turn_rewards"):
        found("calculator", rewards=REWARDS, turn_credit="turn")
    assert found("guessing", turn_credit="turn")


def test_a_column_chooses_among_several() -> None:
    loaded = found(SEVERAL)
    with pytest.raises(DataError, match="several environments need a column 'environment' that chooses among a, b"):
        check_environment_columns(loaded, ["question"])
    check_environment_columns(loaded, ["question", "environment"])
    tools = tools_of(loaded)
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools({"environment": "a"}, "record 0")] == ["add"]
    assert tools({"environment": "b"}, "record 0") == ()
    with pytest.raises(DataError, match="must name one of the environments a, b, got 'c' in record 7"):
        tools({"environment": "c"}, "record 7")
