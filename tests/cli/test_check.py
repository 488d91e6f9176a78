"""scripts/check.py: what it prints and leaves, and what it says of a process that dies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.checking import machine
from tpu_grpo.checking.findings import Done, Finding
from tpu_grpo.cli.check import main, rows

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check.py"
WORKS: dict[str, Any] = {"row": "hosts", "budget": 15, "seconds": 1.5}
WORKS["finding"] = {"verdict": "works", "text": "one host", "remedy": "", "figures": {}}


def process_that(directory: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Any], end: str) -> None:
    """Let the process that has the devices write these lines, and end by a line of shell."""
    program = directory / "python"
    said = "".join(f"{json.dumps(line)}\n" for line in lines)
    program.write_text(f"#!/bin/sh\ncat > \"$6\" <<'END'\n{said}END\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("lines", "end", "row", "said"),
    [
        (
            ["hosts", WORKS, "attention"],
            "kill -ABRT $$",
            "attention",
            "the process that checked it was killed by signal 6",
        ),
        ([], "exit 3", "hosts", "the process that checked it ended with exit code 3"),
    ],
)
def test_the_row_in_which_a_process_died_is_named(
    lines: list[Any],
    end: str,
    row: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process_that(tmp_path, monkeypatch, lines, end)
    assert main([f"run.dir={tmp_path}/run"]) == 1
    record = json.loads((tmp_path / "run_check" / "check.json").read_text())
    assert record["works"] is False
    found = {done["row"]: done["finding"] for done in record["rows"]}
    assert found[row]["verdict"] == "broken"
    assert found[row]["text"].startswith(said)
    assert found["killed run"]["verdict"] == "not reached"
    assert said in capsys.readouterr().out.partition("--- to paste ---")[2]


def test_it_leaves_a_file_and_a_page_and_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {**WORKS, "row": "plan", "finding": WORKS["finding"] | {"figures": {"update": 2.5}}}
    found = {"found": {"generation": "v5e", "rates": {"memory": 0.7}, "model": str(tmp_path)}}
    (tmp_path / "tokenizer.json").touch()
    process_that(tmp_path, monkeypatch, ["hosts", WORKS, "plan", plan, found], "exit 0")
    monkeypatch.setattr(machine, "killed_run", lambda *_: Finding("works", "it <continued>"))
    assert main([f"run.dir={tmp_path}/run"]) == 0
    record = json.loads((tmp_path / "run_check" / "check.json").read_text())
    assert (record["works"], record["generation"], record["rates"]) == (True, "v5e", {"memory": 0.7})
    assert record["planned"] == {"update": 2.5}
    assert record["rows"][-1]["finding"]["text"] == "it <continued>"
    assert "it &lt;continued&gt;" in (tmp_path / "run_check" / "check.html").read_text()
    printed = capsys.readouterr().out
    assert "check of builtin:addition: 5 rows work, 0 but slow, 0 do not" in printed
    assert "packages                works" in printed


def test_a_row_is_a_line() -> None:
    done = Done("links", 3, 1.25, Finding("works but slow", "0.1 GB/s", "look at it"))
    assert done.line == "links                   works but slow     1.2 of   3 s  0.1 GB/s; do: look at it"


def test_rows_need_rows_before_them_and_two_minutes_in_all() -> None:
    names = [row.name for row in rows()]
    for place, row in enumerate(rows()):
        assert set(row.needs) <= set(names[:place]), row.name
    assert sum(row.budget for row in rows()) + 1 + 1 + 25 <= 120  # those of the command's own process


@pytest.mark.slow
def test_the_demo_on_a_cpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, str(SCRIPT), f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "run_check" / "check.json").read_text())
    assert [row["finding"]["verdict"] for row in record["rows"]] == ["works"] * (len(rows()) + 3)
    assert record["planned"].keys() == {"decode_step", "rollout", "update", "sync"}
