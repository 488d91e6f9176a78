"""The list of settings that --help shows, and what changing one on the way does to results."""

from pathlib import Path

import pytest
import yaml

from tests.config.asking import leaves
from tests.goldens import labelled
from tpu_grpo.config import RunConfig, effect_of, listed_name, load_config, settings
from tpu_grpo.config.run_config import known_names
from tpu_grpo.config.setting_names import COMMON, EFFECTS, MEANT

LABELLED = Path(__file__).with_name("labelled.txt")


def test_every_leaf_is_listed_once_with_its_default_and_a_meaning() -> None:
    listed = [(name, None if default == "unset" else yaml.safe_load(default)) for name, _, default, _ in settings()]
    assert sorted(listed, key=str) == sorted(leaves(RunConfig().model_dump(mode="json")), key=str)
    assert len(listed) == len(dict(listed))
    assert [name for name, _, _, meaning in settings() if len(meaning) < 10] == []


@pytest.mark.parametrize(("name", "kind", "default"), labelled(LABELLED, "shown"))
def test_types_and_defaults_as_shown(name: str, kind: str, default: str) -> None:
    assert {n: (k, d) for n, k, d, _ in settings()}[name] == (kind, default)


def test_every_setting_is_decided_and_nothing_else() -> None:
    """A new setting fails here until config/setting_names.py says what a change of it does to the results of a run."""
    assert {effect_of(name, rate_ends_with_run=False) for name, *_ in settings()} == {"none", "rounding", "results"}
    assert set(EFFECTS) <= set(known_names())


@pytest.mark.parametrize(("name", "effect"), labelled(LABELLED, "effects"))
def test_effects(name: str, effect: str) -> None:
    assert effect_of(name, rate_ends_with_run=False) == effect
    assert effect_of("run.max_steps", rate_ends_with_run=True) == "results"  # its learning rate falls towards the end


def test_common_settings_and_those_that_others_name_differently_are_there_in_the_order_of_all() -> None:
    listed = [name for name, *_ in settings()]
    assert [name for name in listed if name in COMMON] == sorted(COMMON, key=listed.index)
    assert len(set(COMMON)) == len(COMMON)
    assert set(COMMON) | set(MEANT.values()) <= set(listed)


def test_names_of_entries() -> None:
    assert listed_name("data.sources.0.path") == "data.sources[i].path"
    assert listed_name("evaluation.rewards.10.name") == "rewards[i].name"
    assert listed_name("rewards") == "rewards"


@pytest.mark.parametrize("name", ["rewards", "rewards.0", "rewards.0.weight", "data", "data.dynamic", "data.sources"])
def test_settings_sections_and_entries_may_be_allowed(name: str) -> None:
    config = load_config(None, [f"checkpoint.allow_changes=[{name}, run.seed]"])
    assert config.checkpoint.allow_changes == (name, "run.seed")
