"""Files and overrides: in which order settings are set, and what is said about those that are not settings."""

from pathlib import Path

import pytest

from tests.config.asking import REPOSITORY, file_message
from tpu_grpo.config import load_config, parse_config
from tpu_grpo.records.errors import ConfigError

# --- where values come from -------------------------------------------------------------------------------------------


def test_overrides_replace_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: from_file, seed: 1, max_steps: 9}\n")
    run = load_config(path, ["run.seed=2", "run.seed=3"]).run
    assert (run.name, run.seed, run.max_steps) == ("from_file", 3, 9)


def test_a_list_is_set_whole() -> None:
    overrides = ["rewards=[{name: gsm8k, weight: 2}, {name: format, options: {limit: 1e-4}}]"]
    first, second = load_config(None, overrides).rewards
    assert (first.name, first.weight, first.options) == ("gsm8k", 2.0, {})
    assert (second.name, second.weight, second.options) == ("format", 1.0, {"limit": 1e-4})


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "c.yaml") == parse_config({"run": {"name": "c"}})


@pytest.mark.parametrize(
    ("file", "name"),
    [("grpo.yaml", "grpo"), ("my run (2).v1.yaml", "my-run-2-.v1"), (".hidden.yaml", "hidden"), ("наш.yaml", "run")],
)
def test_a_run_without_a_name_has_that_of_its_file(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text("run: {seed: 1}\n")
    assert load_config(tmp_path / file).run_dir == Path("runs") / name
    assert load_config(tmp_path / file, ["run.name=mine"]).run.name == "mine"
    assert load_config(None).run.name == "run"


# --- files that cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{1: 2}", "run: {2: 3}", "null: 1"])
def test_a_key_that_is_not_text_is_a_config_error(tmp_path: Path, text: str) -> None:
    assert "got" in file_message(tmp_path / "c.yaml", text)


@pytest.mark.parametrize("text", ['data: {path: "\\ud800"}', '{"run": {"name": "a\\udfff"}}', '"\\ud800": {}'])
def test_half_of_a_surrogate_pair_is_a_config_error(tmp_path: Path, text: str) -> None:
    assert "a text must be Unicode, got" in file_message(tmp_path / "c.yaml", text)


def test_of_steps_and_epochs_the_later_override_counts_and_a_file_sets_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {max_steps: 9}\n")
    assert load_config(path, ["run.epochs=1.5"]).run.epochs == 1.5
    run = load_config(path, ["run.epochs=1.5", "run.max_steps=4"]).run
    assert (run.max_steps, run.epochs) == (4, None)
    assert file_message(path, "run: {max_steps: 9, epochs: 2}\n") == (
        "run.epochs=2 and run.max_steps=9 exclude each other; leave one of them out"
    )


@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (2, 8), (1.5, 6), (0.1, 1), (2.2, 9)])
def test_epochs_come_to_steps(epochs: float, steps: int, tmp_path: Path) -> None:
    """Of 30 prompts, 8 a step: an epoch is 3.75 steps, and the last step is whole."""
    config = load_config(None, [f"run.epochs={epochs}", "data.prompts_per_step=8"])
    counted = config.counted(30).run
    assert (counted.max_steps, counted.epochs) == (steps, None)
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "c.yaml") == config


def test_a_step_that_the_epochs_do_not_reach_cannot_be_profiled() -> None:
    config = load_config(None, ["run.epochs=1", "logging.profile_steps=[5]", "data.prompts_per_step=8"])
    with pytest.raises(ConfigError, match=r"logging.profile_steps must be at most run.max_steps=4, got \[5\]"):
        config.counted(30)


def test_a_missing_file_lists_the_shipped_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError) as caught:
        load_config("nosuch.yaml")
    shipped = sorted(f"configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.yaml"))
    assert "configs/demo_cpu.yaml" in shipped
    assert str(caught.value) == f"config file not found: nosuch.yaml; shipped configs: {shipped}"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^config file not found: nosuch\.yaml; shipped configs: none here$"):
        load_config("nosuch.yaml")


@pytest.mark.parametrize(("text", "kind"), [("- run\n- model\n", "list"), ("just words", "str"), ("5", "int")])
def test_a_file_holds_sections(tmp_path: Path, text: str, kind: str) -> None:
    assert file_message(tmp_path / "c.yaml", text) == (
        f"config file {tmp_path / 'c.yaml'} must hold sections (run:, model:, ...), got a {kind}"
    )


def test_a_directory_is_not_a_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not readable YAML: .*Is a directory"):
        load_config(tmp_path)
