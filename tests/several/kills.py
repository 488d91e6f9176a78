"""Kills a run at random moments and continues it until it is done: its results must equal those without kills.

    uv run python -m tests.several.kills --kills 50 --hosts 1
    uv run python -m tests.several.kills --kills 50 --hosts 2
    uv run python -m tests.several.kills --kills 50 rollout.partial_extra=0.5 rollout.max_new_tokens=64
    uv run python -m tests.several.kills --kills 30 --hosts 2 algorithm.staleness=1 meshes.layout=split
    uv run python -m tests.several.kills --kills 50 --hosts 2 --stops
    uv run python -m tests.several.kills --kills 30 algorithm.name=distill 'teachers=[{path: teacher}]'

A run of 12 steps, with a checkpoint after every second step, is done once undisturbed, and once with ``--kills`` kills
by SIGKILL: a third of them while the run starts, the others within a second after a step, at random by ``--seed``. Both
must end with the same parameters, tokens, metrics and history. With ``--stops`` some hosts get SIGINT or SIGTERM
instead, after which all must end with exit code 4.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.hosts.processes import free_port
from tests.models.random_checkpoint import edit_config
from tests.several.runs import lines, settings, write_files

REPOSITORY = Path(__file__).parents[2]
STEPS = 12
END_SECONDS = 600.0
TIMED = ("seconds", "per_second", "compile/", "share", "bytes", "occupied", "/use", "memory")
"""Parts of the names of metrics that depend on the machine or on where a run was killed."""
SAMPLED = ("rollout/prefills", "rollout/accepted", "rollout/tokens_per", "agreement/r",
           "agreement/l", "agreement/k", "agreement/e")  # fmt: skip
"""Parts of the names of metrics that a continued step lacks, or has as 0, if its completions were sampled before the
kill, as with algorithm.staleness."""


@dataclass(frozen=True)
class Moment:
    """When a run is killed: ``seconds`` after ``step`` was logged, or after the start of the run if ``step`` is 0."""

    step: int
    seconds: float

    def await_in(self, run_dir: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait until this moment of a run, or until the run ends."""
        end = time.monotonic() + END_SECONDS
        while self.step and last_step(run_dir) < self.step and _running(started) and time.monotonic() < end:
            time.sleep(0.02)
        end = time.monotonic() + self.seconds
        while _running(started) and time.monotonic() < end:
            time.sleep(0.02)


WHOLE = Moment(STEPS + 1, 0.0)
"""A moment after the last step: the run is not killed."""


@dataclass(frozen=True)
class Left:
    """The results of a run that must not depend on kills."""

    params_digest: str
    metrics: list[dict[str, Any]]
    history: list[str]


def start_hosts(
    directory: Path, config: Mapping[str, Any], hosts: int, changes: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """Start the command on ``hosts`` processes, with 4 devices in all; stderr goes to host_I.err in the directory."""
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // hosts}",
    }
    command = [sys.executable, str(REPOSITORY / "scripts" / "run.py"), str(path), *changes]
    port = free_port()
    return [
        subprocess.Popen(
            [*command, f"hosts.coordinator=127.0.0.1:{port}", f"hosts.count={hosts}", f"hosts.index={index}"]
            if hosts > 1
            else command,
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(directory / f"host_{index}.err").open("ab"),
        )
        for index in range(hosts)
    ]


def run_once(
    directory: Path,
    run_dir: Path,
    hosts: int,
    moment: Moment,
    changes: Sequence[str] = (),
    number: signal.Signals = signal.SIGKILL,
    targets: Sequence[int] = (),
) -> bool:
    """Start or continue the run, with changed settings, and at a moment kill all of its hosts, or send another signal
    to some, after which all must end with exit code 4; returns whether the run was done before that moment."""
    config = settings(run_dir, run={"max_steps": STEPS}, checkpoint={"every": 2})
    started = start_hosts(directory, config, hosts, changes)
    try:
        moment.await_in(run_dir, started)
        for index in targets or range(hosts):
            started[index].send_signal(number)
        codes = [process.wait(END_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    allowed = {0, -signal.SIGKILL} if number is signal.SIGKILL else {codes[0]} & {0, 4}
    if not {*codes} <= allowed:
        errors = (directory / "host_0.err").read_text()[-3000:]
        raise AssertionError(f"a run must continue, and end after {number.name}, got exit codes {codes}:\n{errors}")
    return codes == [0] * hosts


def what_is_left(run_dir: Path, changes: Sequence[str] = ()) -> Left:
    """Read the results of a run whose settings had these changes."""
    out = TIMED + SAMPLED * any("staleness" in change for change in changes)
    kept = [{name: value for name, value in line.items() if not any(t in name for t in out)} for line in lines(run_dir)]
    summary = json.loads((run_dir / "summary.json").read_text())
    return Left(summary["params_digest"], kept, (run_dir / "history.jsonl").read_text().splitlines())


def disturbed(
    directory: Path, hosts: int, kills: int, seed: int, changes: Sequence[str] = (), *, stops: bool = False
) -> int:
    """Compare a run that is killed ``kills`` times, or stopped, with an undisturbed one; returns how often the run was
    started."""
    files = write_files(directory / "files")
    edit_config(files / "model", eos_token_id=[*range(10, 22)])  # completions end after about 20 tokens
    (write_files(directory / "other", seed=9) / "model").rename(files / "teacher")
    began = time.monotonic()
    if not run_once(files, directory / "whole", hosts, WHOLE, changes):
        raise AssertionError(f"the undisturbed run must end within {END_SECONDS:g} s")
    whole = time.monotonic() - began
    drawn, starts, run_dir = random.Random(seed), 0, directory / "killed"
    for count in range(kills):
        starts += 1
        if drawn.random() < 1 / 3:
            moment = Moment(0, drawn.uniform(0.5 * stops, whole))  # who stops has to be listening
        else:
            moment = Moment(drawn.randint(min(last_step(run_dir) + 1, STEPS), STEPS), drawn.uniform(0.0, 1.0))
        number = drawn.choice([signal.SIGINT, signal.SIGTERM]) if stops else signal.SIGKILL
        targets = drawn.sample(range(hosts), drawn.randint(1, hosts)) if stops else ()
        if run_once(files, run_dir, hosts, moment, changes, number, targets):  # the run is done, so a new one begins
            _compare(directory, run_dir, changes)
            shutil.rmtree(run_dir)
        print(f"kill {count + 1} of {kills}, {moment}: checkpoints {_saved(run_dir)}", flush=True)
    while not run_once(files, run_dir, hosts, WHOLE, changes):
        starts += 1
    _compare(directory, run_dir, changes)
    return starts + 1


def _compare(directory: Path, run_dir: Path, changes: Sequence[str]) -> None:
    found, expected = what_is_left(run_dir, changes), what_is_left(directory / "whole", changes)
    if found != expected:
        raise AssertionError(
            f"what a killed run leaves must be that of an undisturbed one, got\n{found}\nnot\n{expected}"
        )


def _running(started: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is None for process in started)


def last_step(run_dir: Path) -> int:
    """Return the last step that a run has logged."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stops", action="store_true", help="SIGINT or SIGTERM to some hosts in the place of SIGKILL")
    parser.add_argument("changes", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_kills_") as scratch:
        given = (Path(scratch), options.hosts, options.kills, options.seed, options.changes)
        starts = disturbed(*given, stops=options.stops)
    print(f"{options.kills} signals on {options.hosts} hosts, {starts} starts: the same parameters, tokens and metrics")


if __name__ == "__main__":
    main()
