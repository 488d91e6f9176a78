"""Functions that are passed to ``train``: which run in workers, which in this process, and what they become."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards import faulty
from tests.rewards.conftest import make_rollout, scored
from tpu_grpo.config import RewardSpec, RunConfig, load_config, parse_config
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import Scores
from tpu_grpo.rewards import GivenReward, open_rewards, reward_specs

ROLLOUT = make_rollout(["p0", "p1"], ["a", "bb", "ccc", "dddd"], [{"answer": "a"}, {"answer": "dddd"}], step=2)


def given(*rewards: GivenReward, **tree: Any) -> RunConfig:
    return with_rewards(parse_config(tree), rewards)


def with_rewards(config: RunConfig, rewards: Any) -> RunConfig:
    return parse_config({**dict(config), "rewards": reward_specs(rewards)})


def score(config: RunConfig) -> Scores:
    return scored(ROLLOUT, *config.rewards, max_steps=config.run.max_steps)


class Length:
    """An object holds what it needs, such as a connection."""

    def __init__(self, unit: float):
        self.unit = unit

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [self.unit * len(text) for text in completions]


def test_a_closure_is_called_in_this_process() -> None:
    seen: list[tuple[int, int, int]] = []

    def right(completion: str, answer: str, bonus: float = 0.0, **rest: Any) -> float:
        state = rest["trainer_state"]
        seen.append((os.getpid(), state.global_step, state.max_steps))
        return float(completion == answer) + bonus

    config = given({"name": right, "weight": 2.0, "options": {"bonus": 0.5}}, run={"max_steps": 9})
    (spec,) = config.rewards
    assert (spec.name, spec.shown, spec.workers, spec.weight) == ("python:right", "right", 0, 2.0)
    np.testing.assert_array_equal(score(config).total, [3.0, 1.0, 1.0, 3.0])
    assert seen == [(os.getpid(), 2, 9)] * 4


@pytest.mark.full
def test_a_function_of_a_module_is_one_that_workers_import() -> None:
    """Another process gives its number; the test's own module is there by name, too."""
    config = given(faulty.good, {"name": process_number, "label": "process"})
    assert [(spec.name, spec.workers) for spec in config.rewards] == [
        ("tests.rewards.faulty:good", None),
        ("tests.rewards.test_given:process_number", None),
    ]
    assert all(spec.function is None for spec in config.rewards)
    assert set(score(config).by_name["process"]).isdisjoint({float(os.getpid())})


def process_number(completions: Sequence[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


def test_lambdas_objects_and_partial_functions_have_names() -> None:
    def scaled(completions: Sequence[str], factor: float) -> list[float]:
        return [factor * len(text) for text in completions]

    rewards: list[GivenReward] = [lambda completions: [1.0] * len(completions), Length(0.5)]
    config = given(*rewards, functools.partial(scaled, factor=2.0), "exact_answer")
    assert [spec.shown for spec in config.rewards] == ["reward0", "Length", "scaled", "exact_answer"]
    np.testing.assert_array_equal(score(config).total, [1 + 0.5 + 2 + 1, 1 + 1 + 4, 1 + 1.5 + 6, 1 + 2 + 8 + 1])


def test_they_take_the_place_of_the_configs_rewards_or_stand_beside_them() -> None:
    config = parse_config({"rewards": [{"name": "format", "weight": 0.25}]})
    both = with_rewards(config, [*config.rewards, Length(1.0)])
    assert [(spec.shown, spec.weight) for spec in both.rewards] == [("format", 0.25), ("Length", 1.0)]
    np.testing.assert_array_equal(score(both).total, [1.0, 2.0, 3.0, 4.0])
    assert [spec.shown for spec in with_rewards(config, [Length(1.0)]).rewards] == ["Length"]
    assert both.data == config.data
    again = with_rewards(both, [*both.rewards, "gsm8k"])  # an entry keeps its function
    assert score(again).by_name["Length"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "must be a list of at least one function, got "),
        ("gsm8k", "must be a list of at least one function, got 'gsm8k'; put it in a list"),
        ([5], r"rewards\[0\] must be a function, a name, or an entry of the config .*, got 5"),
        ([{"weight": 1.0}], r"rewards\[0\] must be a function, a name"),
        ([{"name": Length(1.0), "wait": 2}], "rewards.0.wait is not a setting"),
        ([{"name": Length(1.0), "workers": 2}], r"rewards\[0\], Length, cannot run in 2 workers: .* move it to a file"),
        ([Length(1.0), Length(2.0)], r"rewards must have names of their own in the metrics, got \['Length'\] twice"),
    ],
)
def test_what_is_refused(rewards: Any, message: str) -> None:
    with pytest.raises((ConfigError, RewardError), match=message):
        score(with_rewards(parse_config({}), rewards))


def test_the_saved_config_names_them_and_says_that_they_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(given(Length(1.0)).to_yaml())
    config = load_config(tmp_path / "config.yaml")
    assert config.rewards == (RewardSpec(name="python:Length", workers=0),)
    message = "reward Length was passed to tpu_grpo.train as a function, .* pass it with rewards= again"
    with pytest.raises(RewardError, match=message):
        open_rewards(config.rewards, [])
