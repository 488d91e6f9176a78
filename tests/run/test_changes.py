"""What differs between the config that a run began with and the one it goes on with, and in the files they name."""

from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.run.changes import Change, changed_settings, changed_sources, sources


def shown(before: RunConfig, now: RunConfig) -> list[str]:
    return [str(change) for change in changed_settings(before, now)]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (
            ["optimizer.learning_rate=1e-6"],
            ["optimizer.learning_rate=1e-4"],
            "optimizer.learning_rate: 1e-06 -> 0.0001",
        ),
        (["rollout.kv_tokens=900"], [], "rollout.kv_tokens: 900 -> unset"),
        (["data.system_prompt=hello"], ["data.system_prompt="], 'data.system_prompt: hello -> ""'),
        (
            ["rewards=[{name: gsm8k}]"],
            ["rewards=[{name: gsm8k, weight: {1: 0, 5: 1}}]"],
            'rewards.0.weight: 1.0 -> {"1": 0.0, "5": 1.0}',
        ),
        (
            ["rewards=[{name: format, options: {a: {b: 1}}}]"],
            ["rewards=[{name: format, options: {a: {b: 2}}}]"],
            'rewards.0.options: {"a": {"b": 1}} -> {"a": {"b": 2}}',
        ),
        (
            ["evaluation.rewards=[{name: gsm8k}]"],
            ["evaluation.rewards=[{name: math}]"],
            "evaluation.rewards.0.name: gsm8k -> math",
        ),
        (
            ["data.columns={question: a}"],
            ["data.columns={question: b}"],
            'data.columns: {"question": "a"} -> {"question": "b"}',
        ),
        (["model.lora.rank=8"], ["model.lora.rank=16"], "model.lora.rank: 8 -> 16"),
        (["logging.profile_steps=[3]"], ["logging.profile_steps=[4]"], "logging.profile_steps: [3] -> [4]"),
    ],
)
def test_a_difference_is_named_with_both_values(before: list[str], now: list[str], expected: str) -> None:
    assert shown(load_config(None, before), load_config(None, now)) == [expected]


def test_equal_configs_do_not_differ() -> None:
    words = ["rewards=[{name: gsm8k}, {name: format}]", "data.sources=[{path: a.jsonl}]"]
    assert shown(load_config(None, words), load_config(None, words)) == []


def test_an_entry_that_was_added_shows_all_of_it() -> None:
    before, now = (load_config(None, [f"rewards=[{{name: gsm8k}}{more}]"]) for more in ("", ", {name: format}"))
    changed = changed_settings(before, now)
    assert str(changed[0]) == "rewards.1.name: absent -> format"
    assert {change.name.rpartition(".")[0] for change in changed} == {"rewards.1"}
    assert all(change.is_in(["rewards"]) and not change.is_in(["rewards.0", "reward"]) for change in changed)
    assert shown(now, before)[0] == "rewards.1.name: format -> absent"


def test_long_values_are_cut_where_they_still_differ() -> None:
    before, now = (Change("a", "x" * 100 + tail, "y" * 100, "none") for tail in "ab")
    assert str(before) == f"a: {'x' * 60}... -> {'y' * 60}..."
    same_start = Change("a", "x" * 100 + "1", "x" * 100 + "2", "none")
    assert str(same_start) == f"a: {'x' * 100}1 -> {'x' * 100}2"
    assert before != now


def config_of(directory: Path, **sections: Any) -> RunConfig:
    tree = {
        "rewards": [{"name": "exact_answer"}, {"name": f"{directory}/mine.py:reward"}],
        "evaluation": {"rewards": [{"name": f"{directory}/mine.py:reward"}]},
        "model": {"path": str(directory / "model")},
    }
    return parse_config(tree | sections)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.py").write_text("def reward(completions): ...")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"a" * 100)
    return tmp_path


def test_the_content_of_files_counts(files: Path) -> None:
    config = config_of(files)
    before = sources(config)
    assert set(before) == {"rewards.1.name", "evaluation.rewards.0.name", "model.path"}
    assert changed_sources(before, sources(config)) == []
    (files / "mine.py").write_text("def reward(completions): return 0")
    (files / "model" / "tokenizer.json").write_text("{}")
    changed = changed_sources(before, sources(config))
    assert [change.name for change in changed] == ["rewards.1.name", "evaluation.rewards.0.name", "model.path"]
    assert all(change.effect == "results" for change in changed)
    assert str(changed[0]).startswith("rewards.1.name: mine.py sha256 ")
    assert changed[2].old == "tokenizer.json absent"


def test_weights_are_read_whole_only_for_a_reference(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_grpo.run.changes.WEIGHTS_BYTES", 50)
    assert sources(config_of(files))["model.path"]["model.safetensors"] == "100 bytes"
    found = sources(config_of(files, algorithm={"beta": 0.1}))["model.path"]["model.safetensors"]
    assert found.startswith("sha256 ")


def test_a_setting_that_names_another_file_now_is_no_changed_file(files: Path) -> None:
    before = sources(config_of(files))
    now = sources(config_of(files, rewards=[{"name": "exact_answer"}], evaluation={}))
    assert changed_sources(before, now) == []
