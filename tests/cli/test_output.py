"""What a command prints when its reader is gone, or cannot show all of it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.records.errors import DiskError, disk_error, disk_errors_explained

PROLOGUE = """
import sys
from tpu_grpo.cli.starting import exit_code_of
from tpu_grpo.observe.console import ConsoleSink

def command():
{body}

sys.exit(exit_code_of(command))
"""
PRINTING = """
    from rich.console import Console
    console = ConsoleSink(0, 3, plain_seconds=0.0)
    for step in (1, 2, 3):
        for _ in range(3000):
            console.write({"step": step, "rewards/mean": 0.5})
        print("prompt \\u2192 \\u7b54", flush=True)
        print("on stderr", file=sys.stderr, flush=True)
    print("done", file=open(sys.argv[1], "w"))
"""


def run(body: str, tmp_path: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "command.py"
    script.write_text(PROLOGUE.format(body=body))
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {script} {tmp_path}/done {shell}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )


@pytest.mark.full
@pytest.mark.parametrize("shell", ["| head -1", "2>&1 | head -1", ">&- 2>&-", "> /dev/full", "> /dev/full 2>&1"])
def test_a_command_whose_output_nobody_reads_goes_on(tmp_path: Path, shell: str) -> None:
    ended = run(PRINTING, tmp_path, shell)
    assert (tmp_path / "done").read_text() == "done\n"
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


@pytest.mark.parametrize("words", ["", "plan --help", "run --help all"])
def test_help_whose_reader_has_seen_enough_ends_quietly(words: str) -> None:
    shell = f"set -o pipefail; {sys.executable} -m tpu_grpo {words} | head -1"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: ")


@pytest.mark.full
def test_what_an_encoding_lacks_is_written_as_escapes(tmp_path: Path) -> None:
    ended = run(PRINTING, tmp_path, "| tail -1", PYTHONIOENCODING="latin-1")
    assert ended.stdout == "prompt \\u2192 \\u7b54\n"
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "got: No space left on device; free some space, or name a directory elsewhere"),
        (errno.EROFS, "got: Read-only file system; mount it for writing, or name"),
        (errno.EMFILE, r"got: Too many open files; have the limit on open files raised \(ulimit -n\)"),
    ],
)
def test_an_error_of_the_disk_is_a_line_with_its_remedy(tmp_path: Path, number: int, expected: str) -> None:
    body = f"    raise OSError({number}, 'x', 'runs/mine/metrics.jsonl')"
    ended = run(body, tmp_path, "")
    assert ended.returncode == 1
    assert ended.stderr.startswith("DiskError: the disk must take runs/mine/metrics.jsonl, ")
    assert ended.stderr.count("\n") == 1
    error = disk_error(OSError(number, "x"))
    assert error is not None
    with pytest.raises(OSError, match=expected):
        raise error


def test_other_errors_of_the_system_are_left_as_they_are() -> None:
    refused = OSError(errno.ECONNREFUSED, "refused")
    assert disk_error(refused) is None
    explained = DiskError("explained before")
    for error in (refused, explained, ValueError("no error of the system")):
        with pytest.raises(type(error)) as caught, disk_errors_explained():
            raise error
        assert caught.value is error
    with (
        pytest.raises(DiskError, match="of a library") as caught,
        disk_errors_explained(lambda error: DiskError("of a library")),
    ):
        raise ValueError("os_error_code='28'")
    assert isinstance(caught.value.__cause__, ValueError)
