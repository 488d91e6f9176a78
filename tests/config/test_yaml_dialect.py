"""The YAML of configs: what a plain value is read as, what is refused, and that any text survives being written."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.asking import file_message, message, value_of
from tests.goldens import labelled
from tpu_grpo.config import load_config, parse_config
from tpu_grpo.config.yaml_dialect import Loader

LABELLED = Path(__file__).with_name("labelled.txt")

# --- plain values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [*labelled(LABELLED, "values"), ("-.INF", float("-inf"))])
def test_a_value_is_read_as_a_person_means_it(text: str, value: Any) -> None:
    found = yaml.load(text, Loader)
    assert found == value
    assert isinstance(found, type(value))


@pytest.mark.parametrize("value", ["0b101", "1:30", "1,5", "2026-01-01", "0X1F"])
def test_what_is_no_number_is_refused_where_one_is_asked_for(value: str) -> None:
    assert "must be a valid number" in message(f"rollout.temperature={value}")
    assert "must be a valid integer" in message(f"run.seed={value}")


@pytest.mark.parametrize(("text", "twice"), labelled(LABELLED, "twice"))
def test_a_key_that_is_set_twice_is_refused_however_it_is_written(text: str, twice: str) -> None:
    with pytest.raises(yaml.YAMLError, match=re.escape(f"{twice!r} is set twice; keep one of them")):
        yaml.load(text, Loader)


@pytest.mark.parametrize("text", ["{a: 1, b: &a 2, c: *a}", "{1: 1, 1e1: 2, x: 3}"])
def test_keys_that_differ_are_told_apart(text: str) -> None:
    assert len(yaml.load(text, Loader)) == 3


@pytest.mark.parametrize(("text", "reason"), labelled(LABELLED, "refused"))
def test_what_no_setting_takes_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in file_message(tmp_path / "c.yaml", text)


# --- in overrides and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [*labelled(LABELLED, "overrides"), ("run.seed=4294967295", 2**32 - 1), ("run.dir=out/x", Path("out/x"))],
)
def test_override_values(override: str, value: Any) -> None:
    found = value_of(load_config(None, [override]), override.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


def test_plain_yaml_in_a_file_reads_as_in_an_override(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: 2026-01-01}\noptimizer: {learning_rate: 3e-4}\nlogging: {wandb: off}\n")
    config = load_config(path)
    assert (config.run.name, config.optimizer.learning_rate, config.logging.wandb) == ("2026-01-01", 3e-4, "off")


@pytest.mark.parametrize(("text", "reason"), labelled(LABELLED, "broken"))
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, text: str | bytes, reason: str) -> None:
    found = file_message(tmp_path / "c.yaml", text)
    assert found.startswith(f"config file {tmp_path / 'c.yaml'} is not readable YAML: ")
    assert reason in found


TEXTS = ["1e5", "010", "off", "yes", "null", "~", "2026-01-01", "1:30", "0o17", "0x1F", "<<", "a: b", "# x", " x ", ""]


@pytest.mark.parametrize("text", [*TEXTS, "é\n\t{}"])
def test_any_text_round_trips(text: str, tmp_path: Path) -> None:
    config = parse_config({"data": {"system_prompt": text}, "rewards": [{"name": "r", "options": {"o": [text, 1e-7]}}]})
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config
    assert yaml.safe_load(config.to_yaml())["data"]["system_prompt"] == text  # for YAML 1.1 readers too
