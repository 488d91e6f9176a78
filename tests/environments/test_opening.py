"""The environments of a config fit its rewards and its data; tests/cli/mistakes.txt has more of what does not."""

from typing import Any

import pytest

from tpu_grpo.config import EnvironmentSection, parse_config
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.opening import LoadedEnvironments, load_environments
from tpu_grpo.records.errors import DataError, EpisodeError

SEVERAL = {"a": "calculator", "b": "guessing"}
REWARDS = [{"name": "exact_answer"}]


def found(name: Any, rewards: Any = None, **section: Any) -> LoadedEnvironments:
    tree: dict[str, Any] = {"environment": {"name": name, **section}}
    tree |= {} if rewards is None else {"rewards": rewards}
    config = parse_config(tree)
    return load_environments(config.environment, config.rewards)


@pytest.mark.parametrize("name", ["calculator", {"a": "calculator", "b": "arithmetic"}])
def test_an_environment_without_rewards_takes_others(name: Any) -> None:
    assert found(name, rewards=REWARDS).by_name


def test_it_is_enough_that_one_environment_gives_a_reward() -> None:
    assert sorted(found(SEVERAL).by_name) == ["a", "b"]
    assert list(found("guessing").by_name) == [""]


def test_turns_that_are_rewarded_are_credited() -> None:
    assert found("guessing", turn_credit="turn").by_name


def test_columns_that_reset_requires() -> None:
    by_name = {"": load_environment("tests.environments.games:Counter", {}, "count")}
    counter = LoadedEnvironments(by_name, EnvironmentSection())
    counter.check_columns(["target", "answer"])
    said = "environment count: reset requires 'target', which is no column of the data"
    with pytest.raises(EpisodeError, match=said):
        counter.check_columns(["question", "answer"])


def test_a_column_chooses_among_several() -> None:
    loaded = found(SEVERAL)
    loaded.check_columns(["question", "environment"])
    assert [tool["function"]["name"] for tool in loaded.tools({"environment": "a"}, "record 0")] == ["add"]
    assert loaded.tools({"environment": "b"}, "record 0") == ()
    with pytest.raises(DataError, match="must name one of the environments a, b, got 'c' in record 7"):
        loaded.tools({"environment": "c"}, "record 7")
