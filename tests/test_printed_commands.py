"""The commands that README and docs print, typed where the reader is: in a clone, by a Python with nothing installed.

The default tests check every command without running it: its program can be started there, its options exist, and its
settings are a config's. The slow ones type them, page by page, in the order in which they are printed.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tpu_grpo.config import load_config

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]
PROGRAMS = (
    "uv|uvx|pip|python|tpu-grpo|gcloud|eval|export|mkdir|mountpoint|apt-get|printf|TORCH_PYTHON|torch_venv./bin/pip"
)
NOT_HERE = {
    r"gcloud|launch\.py|ssh-|gcsfuse|/mnt/|TPU_NAME": "a TPU slice",
    r"\bhf:|/models/|counting": "a model of the hub",
    r"torch|apt-get|uvx|--with |\bllama|vllm|sglang\.|lm_eval": "other software",
    r"uv venv|verifiers|atropos|demo_agent": "other software; tests/examples/test_agents.py types these",
    r"tpu-grpo serve": "a client; tests/cli/test_serve.py is one",
    r"pytest|tests\.several|benchmarks|10\.0\.0\.1": "hours, other hosts or a broken run",
    r"plan\.py": "minutes of a compiler; tests/planning compiles these configs",
    r"\bCONFIG|\[--|-> |\bNAME\b|wiki\.jsonl": "a stand-in for a name of the reader's own",
}
"""What a command needs that the tests lack."""
RUNS_BEFORE = {"docs/report.md": ["uv run scripts/run.py run.max_steps=2"]}
"""What readers of a page have run already."""


@dataclass(frozen=True)
class Command:
    """A command as it is printed."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """The words that the program gets, which is ``python`` where ``uv run`` starts a script."""
        words = shlex.split(self.line, comments=True)
        if words[:2] == ["uv", "run"]:
            return words[2:] if words[2] in ("python", "pytest") else ["python", *words[2:]]
        return words


def blocks(page: str) -> list[tuple[str, str, str, str]]:
    """The code blocks of a page: language, text, and what stands before and after."""
    text = (REPOSITORY / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```\n", text, re.M | re.S)
    return [(m[1], m[2], text[: m.start()].rstrip(), text[m.end() :].lstrip()) for m in found]


def commands(page: str) -> list[Command]:
    """The commands of a page, in order; ``a && b`` is two."""
    found = []
    for language, text, _, _ in blocks(page):
        if language in ("", "sh"):
            lines = text.replace("\\\n", " ").splitlines()
            starts = [line for line in lines if re.match(rf"({PROGRAMS})\b", line) and "section.key" not in line]
            found += [Command(page, part) for line in starts for part in re.split(r" && (?=uv |ssh-|gcloud )", line)]
    return found


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page shows: named in the first line, before the block, or after it."""
    for _, text, before, after in blocks(page):
        named = (
            re.match(r"# (\w+\.\w+)\n", text)
            or re.match(r"`(\w+\.\w+)`", before.rpartition("\n\n")[2])
            or re.match(r"in `(\w+\.\w+)`", after)
        )
        if named:
            (folder / named[1]).write_text(text)


def followed(page: str, folder: Path) -> list[str]:
    """Do in a folder what a guide says, up to its last command, the training, which the demo's own tests cover; returns
    what each command prints."""
    write_files(page, folder)
    *before, training = [command.words for command in commands(page)]
    assert training[1] == "scripts/run.py"
    shown = []
    for _, script, *words in before:
        program = str(REPOSITORY / script) if script.startswith("scripts/") else script
        done = subprocess.run([sys.executable, program, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    return shown


COMMANDS = [command for page in PAGES for command in commands(page)]


def needed(command: Command) -> str | None:
    return next((what for pattern, what in NOT_HERE.items() if re.search(pattern, command.line)), None)


def test_most_pages_have_commands() -> None:
    assert len(COMMANDS) > 100
    assert sum(needed(command) is None for command in COMMANDS) > 40


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_a_command_can_be_typed_in_a_clone(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.words
    if words[0] == "python" and not command.line.startswith("uv run"):
        finds_packages = words[1].startswith("scripts/")  # see scripts/beside.py
        assert finds_packages or words[1:3] == ["-m", "venv"], "a bare Python lacks every package: print uv run"
    if words[:2] == ["python", "-m"]:
        assert (
            words[2] == "venv"
            or (REPOSITORY / words[2].replace(".", "/")).with_suffix(".py").is_file()
            or (REPOSITORY / words[2].replace(".", "/") / "__main__.py").is_file()
        )
    script = re.match(r"scripts/(\w+)\.py", words[1]) if words[0] == "python" else None
    if script is None or re.search(NOT_HERE_NAMES, command.line):
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    write_files(command.page, tmp_path)
    path = REPOSITORY / "scripts" / f"{script[1]}.py"
    assert path.is_file()
    before, _, after = shlex.join(words[2:]).partition(" -- ")
    given = shlex.split(f"{after} " if after else before)
    help_text = help_of(script[1])
    for option in (word.split("=")[0] for word in shlex.split(before) if word.startswith("--")):
        assert option in help_text, f"{path} has no option {option}"
    settings = [word for word in given if re.match(r"[a-z_]+\.[a-z_.0-9]+=|rewards=", word)]
    file = next((word for word in given if word.endswith(".yaml")), None)
    if (file is not None and (tmp_path / file).is_file()) or (file is None and settings):
        load_config(file, settings)


NOT_HERE_NAMES = r"\bCONFIG|\[--|configs/mine\.yaml"


def help_of(script: str) -> str:
    """What a script, and each of its commands, prints about itself; it takes --help."""
    if script == "local_hosts":
        return (REPOSITORY / "scripts" / "local_hosts.py").read_text()
    module = import_module(f"tpu_grpo.cli.{import_module('tpu_grpo.cli.main').COMMANDS[script][0]}")
    shown = io.StringIO()
    verbs = [*([name] for name in LAUNCH), ["run", "--on", "gke"]] if script == "launch" else []
    for words in (["--help"], *([*verb, "--help"] for verb in verbs)):
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            module.main(words)
    return f"--help {shown.getvalue()}"


LAUNCH = ("create", "setup", "run", "status", "logs", "watch", "stop", "delete", "babysit")


# --- typed -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: a Python with nothing installed, and a uv that has made the environment already."""
    folder = tmp_path_factory.mktemp("programs")
    venv.create(folder, symlinks=True)
    starts = f'[ "$1" = run ] || exit 0\nshift\n[ "$1" != python ] || shift\nexec {sys.executable} "$@"\n'
    for name, text in (("uv", starts), ("pip", "exit 0\n")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", [page for page in PAGES if any(needed(each) is None for each in commands(page))])
def test_the_commands_of_a_page_run(page: str, programs: Path, tmp_path: Path) -> None:
    for name in ("scripts", "examples", "tpu_grpo", "configs", "benchmarks"):
        (tmp_path / name).mkdir() if name in ("scripts", "examples") else (tmp_path / name).symlink_to(
            REPOSITORY / name
        )
    for path in [*(REPOSITORY / "scripts").glob("*.py"), *(REPOSITORY / "examples").glob("*.py")]:
        (tmp_path / path.parent.name / path.name).write_text(path.read_text())
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    write_files(page, tmp_path)
    dropped = ("JAX_PLATFORMS", "XLA_FLAGS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    for line in [*RUNS_BEFORE.get(page, ()), *(each.line for each in commands(page) if needed(each) is None)]:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
