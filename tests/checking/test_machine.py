"""Rows about machines, with faults put in by hand: each is named in its row."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import psutil
import pytest

from tpu_grpo.checking import machine
from tpu_grpo.checking.findings import Done, Finding, Row, run_rows, within
from tpu_grpo.config import parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.launching.tpus import GIB, parse_slice

V5E = parse_slice("v5e-8").generation


class TwoHosts(Hosts):
    """Host 0 of two, whose other one answers what a function makes of host 0's answer."""

    def __init__(self, other: Callable[[Any], Any] = lambda value: value) -> None:
        service: Any = object()
        super().__init__(0, 2, service)
        self.other = other

    def gather(self, name: str, value: bytes, *, timeout_seconds: float | None = None) -> list[bytes]:
        return [value, json.dumps(self.other(json.loads(value or b"0"))).encode()]


def shared(directory: Path, hosts: Hosts, **more: Any) -> Any:
    config = parse_config({"data": {"path": str(directory / "data.jsonl")}})
    return SimpleNamespace(config=config, directory=directory, hosts=hosts, join=lambda: hosts, generation=None, **more)


def found(name: str, check: Callable[[Any], Finding], given: Any = None) -> Finding:
    told: list[str | Done] = []
    run_rows([Row(name, 1, check)], given, told.append)
    assert told[0] == name
    assert isinstance(told[1], Done)
    return told[1].finding


# --- rows and hosts --------------------------------------------------------------------------------------------------


def test_a_row_is_begun_and_ended_and_those_that_need_a_broken_one_are_not_reached() -> None:
    def fail(_: Any) -> Finding:
        raise ZeroDivisionError("of a kind")

    told: list[Any] = []
    rows = [Row("a", 1, lambda _: Finding("works", "yes")), Row("b", 2, fail), Row("c", 3, fail, needs=("a", "b"))]
    run_rows(rows, None, told.append)
    assert told[::2] == ["a", "b", "c"]
    findings = [done.finding for done in told[1::2]]
    assert [finding.verdict for finding in findings] == ["works", "broken", "not reached"]
    assert findings[1].text == "ZeroDivisionError: of a kind"
    assert findings[2].text == "it needs the row b"


def test_the_worst_of_all_hosts_counts() -> None:
    told: list[Any] = []
    hosts = TwoHosts(lambda finding: finding | {"verdict": "broken", "text": "hot", "remedy": "cool it"})
    run_rows([Row("a", 1, lambda _: Finding("works", "yes"))], None, told.append, lambda: hosts)
    assert told[1].finding == Finding("broken", "host 1: hot", "cool it")


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.5, "works"), (1.0, "works"), (1.1, "broken"), (float("nan"), "broken")]
)
def test_a_gap_is_within_its_bound(gap: float, verdict: str) -> None:
    assert within(gap, 1.0, "it is", "mend it").verdict == verdict


# --- faults ----------------------------------------------------------------------------------------------------------


def test_the_packages_of_this_environment_are_those_asked_for() -> None:
    assert machine.packages(None).verdict == "works"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_flax(name: str) -> str:
        if name == "flax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "orbax-checkpoint" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_flax)
    finding = found("packages", machine.packages)
    assert finding.verdict == "broken"
    assert "flax is missing" in finding.text
    assert "orbax-checkpoint must be" in finding.text
    assert finding.remedy == "uv sync"


def test_a_host_with_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')

    def other(values: dict[str, str]) -> dict[str, str]:
        return {name: "sha256 0" if name.startswith("data file") else value for name, value in values.items()}

    finding = found("hosts", machine.meet, shared(tmp_path, TwoHosts(other)))
    assert finding.verdict == "broken"
    assert "data file of data.path differs: host 0 has " in finding.text
    assert found("hosts", machine.meet, shared(tmp_path, TwoHosts())).text.startswith("2 hosts agree on ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    finding = found("hosts", machine.meet, shared(tmp_path, Hosts()))
    assert finding.text == "data file of data.path is not readable: FileNotFoundError"


def test_a_clock_that_is_off_by_an_hour_is_named(tmp_path: Path) -> None:
    assert found("clocks", machine.clocks, shared(tmp_path, TwoHosts())).verdict == "works"
    finding = found("clocks", machine.clocks, shared(tmp_path, TwoHosts(lambda seconds: seconds + 3600)))
    assert (finding.verdict, finding.text) == ("broken", "the clock of host 1 is +3600 s off host 0's")


@pytest.mark.parametrize(
    ("used", "verdict", "said"), [(0.5, "broken", "7.88 of 15.75 GiB"), (0.0, "works", "15.75 of")]
)
def test_memory_that_is_taken_is_named(used: float, verdict: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = V5E.chip.memory_bytes
    stats = {"bytes_limit": whole, "bytes_in_use": used * whole}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    finding = found("memory", machine.memory, SimpleNamespace(generation=V5E))
    assert finding.verdict == verdict
    assert said in finding.text


def test_a_host_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=machine.HOST_BYTES // 2))
    finding = found("memory", machine.memory, SimpleNamespace(generation=None))
    assert finding.text == "2.0 GiB of the host's memory are free, a run needs 4"


# --- which devices there are -----------------------------------------------------------------------------------------


def test_devices_that_are_missing_taken_or_hidden_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in machine.ACCELERATOR:
        monkeypatch.delenv(name, raising=False)
    assert machine.device_files(None, tmp_path).text.startswith("no TPU in this machine")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert "though this is a machine of v5litepod-8" in machine.device_files(None, tmp_path).text
    (tmp_path / "accel0").touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert machine.device_files(None, tmp_path).verdict == "works"
    wait = [sys.executable, "-c", "import sys; file = open(sys.argv[1]); print(flush=True); input()"]
    with subprocess.Popen([*wait, str(tmp_path / "accel0")], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        finding = machine.device_files(None, tmp_path)
        holder.communicate(b"\n")
    assert finding.verdict == "broken"
    assert f"taken by process {holder.pid} ({sys.executable}" in finding.text
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert machine.device_files(None, tmp_path).remedy == "unset JAX_PLATFORMS"
    assert str(os.getpid()) not in finding.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ABORTED: The TPU is already in use by process with pid 123.", "the TPU is taken by another process"),
        ("FAILED_PRECONDITION: libtpu version 0.0.42 needs a newer driver", "the machine's runtime version does not"),
        ("UNKNOWN: TPU initialization failed", "no device was found: UNKNOWN: TPU initialization failed"),
    ],
)
def test_why_jax_has_no_devices_is_told_apart(error: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(jax, "devices", refuse)
    finding = found("devices", machine.devices, SimpleNamespace(hosts=Hosts()))
    assert finding.verdict == "broken"
    assert finding.text.startswith(said)


@pytest.mark.parametrize(
    ("kind", "count", "verdict", "generation"),
    [
        ("TPU v5 lite", 8, "works", "v5e"),
        ("TPU v5 lite", 16, "broken", "v5e"),  # two slices
        ("TPU v6 lite", 8, "works", "v6e"),
        ("TPU v5 lite", 4, "broken", "v5e"),  # of a slice of 8
        ("TPU7x", 8, "works", "v7x"),  # two of each of 4 chips
        ("TPU7x", 4, "broken", "v7x"),
        ("TPU v9", 8, "works but slow", None),
    ],
)
def test_generations_are_found(
    kind: str, count: int, verdict: str, generation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"TPU v6 lite": "v6e-8", "TPU7x": "tpu7x-8"}.get(kind, "v5litepod-8")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", named)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind, platform="tpu")] * count)
    given = SimpleNamespace(hosts=Hosts(), config=parse_config({}))
    assert found("devices", machine.devices, given).verdict == verdict
    assert getattr(given.generation, "name", None) == generation
    given.config = parse_config({"meshes": {"slices": 2}})
    of_two = {8: "broken", 4: "broken", 16: "works"}[count]
    assert found("devices", machine.devices, given).verdict == (verdict if generation is None else of_two)
