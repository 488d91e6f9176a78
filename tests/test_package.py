"""What ``import tpu_grpo`` gives, and that it costs nothing until it is used."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tpu_grpo
from tpu_grpo.cli import starting
from tpu_grpo.config import HostsSection
from tpu_grpo.hosts import Hosts, StopRequest, Watch
from tpu_grpo.records import errors, stages
from tpu_grpo.run.inputs import Inputs


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """The modules of a new process after some code."""
    shown = f"{code}\nimport sys\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(tpu_grpo.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", shown], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


HEAVY = {"jax", "numpy", "pydantic", "flax", "tunix", "sgl_jax", "transformers"}


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    assert modules_after("import tpu_grpo; dir(tpu_grpo)", tmp_path) & HEAVY == set()


def test_commands_prompts_and_rewards_import_no_jax_before_they_are_used(tmp_path: Path) -> None:
    commands = ("train", "evaluate", "data", "rewards", "plan", "launch")
    modules = ["tpu_grpo.data.stream", "tpu_grpo.rewards", *(f"tpu_grpo.cli.{name}" for name in commands)]
    imported = modules_after(f"import {', '.join(modules)}", tmp_path)
    assert imported & {"jax", "flax", "tunix", "grain", "transformers"} == set()


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("from tpu_grpo import ConfigError", set()),
        ("from tpu_grpo import load_config", {"pydantic"}),
        ("from tpu_grpo import train", {"pydantic"}),
    ],
)
def test_a_name_imports_only_what_it_needs(tmp_path: Path, code: str, imported: set[str]) -> None:
    assert modules_after(code, tmp_path) & (HEAVY - {"numpy"}) == imported


def test_every_public_name_is_there() -> None:
    for package in map(import_module, ("tpu_grpo", "tpu_grpo.config", "tpu_grpo.rewards")):
        assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_every_error_and_every_record_is_public() -> None:
    for module in (errors, stages):
        defined = {
            n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        }
        assert defined <= set(dir(tpu_grpo))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="No tpu_grpo attribute trian"):
        tpu_grpo.trian  # noqa: B018  # pyrefly: ignore[missing-attribute]


# --- train, with a fake pipeline -------------------------------------------------------------------------------------


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order; the platform and the hosts are left alone."""
    events: list[str] = []

    @contextmanager
    def met_hosts(ours: HostsSection, run: str) -> Iterator[tuple[Hosts, Watch]]:
        events.append("hosts")
        yield Hosts(), Watch(Hosts())
        events.append("left")

    monkeypatch.setattr(starting, "prepare", lambda *, needs_hub: events.append("prepare"))
    monkeypatch.setattr(starting, "met_hosts", met_hosts)
    return events


def put_in_place(train: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function train, without importing the real pipeline."""
    fake = ModuleType("tpu_grpo.run.pipeline")
    fake.__dict__["train"] = train
    monkeypatch.setitem(sys.modules, "tpu_grpo.run.pipeline", fake)
    monkeypatch.setattr(import_module("tpu_grpo.run"), "pipeline", fake, raising=False)


def test_train_starts_as_the_command_does(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = tpu_grpo.parse_config({}), lambda: True

    def train(inputs: Inputs, hosts: Hosts, watch: Watch, stop: StopRequest, callbacks: Any) -> dict[str, Any]:
        assert (inputs.config, hosts.count, stop.asked, callbacks) == (config, 1, True, ())
        assert inputs.prompts.size == 7588
        joined.append("train")
        return {"steps": 3}

    put_in_place(train, monkeypatch)
    assert tpu_grpo.train(config, stop_requested=asked) == {"steps": 3}
    assert joined == ["prepare", "hosts", "train", "left"]


def test_train_takes_functions_as_rewards(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def train(inputs: Inputs, *rest: Any) -> dict[str, Any]:
        (spec,) = inputs.config.rewards
        assert (spec.name, spec.function) == ("python:reward", reward)
        return {"steps": 1}

    put_in_place(train, monkeypatch)
    assert tpu_grpo.train(tpu_grpo.parse_config({}), rewards=[reward]) == {"steps": 1}
