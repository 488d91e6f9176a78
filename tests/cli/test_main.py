"""The one name for all commands, typed as a user types it."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tpu_grpo.cli.main import COMMANDS, help_text, main

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY = Path(sys.executable).with_name("tpu-grpo")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_what_its_script_does(command: str) -> None:
    module = import_module(f"tpu_grpo.cli.{COMMANDS[command][0]}")
    script = (REPOSITORY / "scripts" / f"{command}.py").read_text()
    assert f'beside.run("{COMMANDS[command][0]}")' in script
    assert callable(module.main)


def test_every_module_with_a_main_is_a_command() -> None:
    modules = {path.stem for path in (REPOSITORY / "tpu_grpo" / "cli").glob("*.py")} - {"main"}
    with_main = {name for name in modules if hasattr(import_module(f"tpu_grpo.cli.{name}"), "main")}
    assert with_main == {module for module, _ in COMMANDS.values()}


@pytest.mark.parametrize("code", [0, 2, 3])
def test_arguments_and_exit_code_are_handed_on(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    fake = ModuleType("tpu_grpo.cli.data")
    fake.__dict__["main"] = lambda arguments: given.append(arguments) or code
    monkeypatch.setitem(sys.modules, "tpu_grpo.cli.data", fake)
    assert main(["data", "x.yaml", "--preview", "3"]) == code
    assert given == [["x.yaml", "--preview", "3"]]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == help_text() + "\n"
    assert re.findall(r"^  (\w+) ", help_text(), flags=re.MULTILINE) == list(COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--help"]) == 2
    assert capsys.readouterr().err == (
        "a command must be one of run, plan, check, eval, export, report, sample, serve, data, environment, rewards, "
        "launch, got 'trian'; "
        "see tpu-grpo --help\n"
    )


@pytest.mark.parametrize("typed", [[str(ENTRY)], [sys.executable, "-m", "tpu_grpo"]], ids=["tpu-grpo", "-m tpu_grpo"])
def test_the_installed_command_finds_the_default_config(typed: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [*typed, "run", "--print-config", "run.seed=7"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "name: demo_cpu" in done.stdout
    assert "seed: 7" in done.stdout
