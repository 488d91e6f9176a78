"""Damages the directory of a run at random, and starts the run again there: it must continue correctly, or be refused.

    uv run python -m tests.several.damage --directories 2000

A run does 4 steps, with a checkpoint after each. In a copy of its directory, files are changed: bits, lengths, places,
types and values of JSON; files and directories are removed, emptied, swapped, renamed, or become links, pipes and
directories. A child process does what a start does: it looks at the directory, locks it, reads the newest sound
checkpoint, and opens the files that a run writes to. Two outcomes are allowed: the restored state equals that of its
step in every bit, and a line tells the user if this step is not the newest; or an error gives exit code 2. Every other
outcome is printed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from tests.several.fuzz import with_other_value
from tests.several.runs import REPOSITORY, settings, write_files

SECONDS = 120.0
"""The seconds after which a start counts as hung."""
A_CHILD = 200
"""The number of directories that one child process opens; every child has to import jax first."""
STEPS = 4


def prepare(directory: Path) -> None:
    """Write a run's inputs, run it for STEPS steps, and raise ``run.max_steps`` in its config file."""
    write_files(directory)
    tree = settings(
        Path("run"),
        run={"max_steps": STEPS},
        checkpoint={"every": 1, "keep": 3},
        evaluation={"path": "held.jsonl", "every": 2},
    )
    (directory / "c.yaml").write_text(yaml.safe_dump(tree))
    subprocess.run([sys.executable, REPOSITORY / "scripts/run.py", "c.yaml"], cwd=directory, check=True)
    tree["run"]["max_steps"] = STEPS + 2
    (directory / "c.yaml").write_text(yaml.safe_dump(tree))


def damage(run_dir: Path, draw: random.Random) -> str:
    """Damage one or two files or directories below ``run_dir``; returns a description of the damage."""
    return "; ".join(_damage_one(run_dir, draw) for _ in range(draw.choice((1, 1, 1, 2))))


def _damage_one(run_dir: Path, draw: random.Random) -> str:
    within = run_dir / "checkpoints" if draw.random() < 0.7 and (run_dir / "checkpoints").is_dir() else run_dir
    found = sorted(path for path in within.rglob("*") if path.is_file() and not path.is_symlink())
    if not found:
        return "nothing is left"
    path = draw.choice(found)
    if draw.random() < 0.15:  # a whole directory, such as a step or an item of it
        path = draw.choice([parent for parent in path.parents if run_dir in parent.parents] or [path])
    other = draw.choice(found)
    change = draw.choice(_OF_FILES if path.is_file() else _OF_DIRECTORIES)
    said = f"{path.relative_to(run_dir)} {change.__name__.strip('_')}"
    change(path, other, draw)
    return said


def _flipped(path: Path, other: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 5, 50)) if content else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, other: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def _longer(path: Path, other: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.choice((1, 100, 5000))))


def _emptied(path: Path, other: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def _removed(path: Path, other: Path, draw: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _swapped(path: Path, other: Path, draw: random.Random) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _of_another_step(path: Path, other: Path, draw: random.Random) -> None:
    names = path.parts
    place = names.index("checkpoints") + 1 if "checkpoints" in names else 0
    steps = sorted(step.name for step in Path(*names[:place]).iterdir()) if place else []
    source = Path(*names[:place], draw.choice(steps), *names[place + 1 :]) if steps else other
    if source.is_file():
        path.write_bytes(source.read_bytes())


def _with_another_value(path: Path, other: Path, draw: random.Random) -> None:
    changed = with_other_value(path.read_bytes().decode(errors="replace"), path, draw)
    if changed is not None:
        path.write_bytes(changed)


def _replaced(path: Path, other: Path, draw: random.Random) -> None:
    _removed(path, other, draw)
    match draw.randrange(5):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path.name)
        case _:
            path.symlink_to(other)


def _renamed(path: Path, other: Path, draw: random.Random) -> None:
    path.rename(path.with_name(draw.choice(("1", "7", "99", "x", f"{path.name}.bak"))))


def _copied(path: Path, other: Path, draw: random.Random) -> None:
    shutil.copytree(path, path.with_name(draw.choice(("7", "99"))), symlinks=True, dirs_exist_ok=True)


_OF_FILES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    _flipped, _flipped, _cut, _longer, _emptied, _removed, _swapped, _of_another_step, _with_another_value, _replaced,
)  # fmt: skip
_OF_DIRECTORIES = (_removed, _replaced, _renamed, _copied)


class Starts:
    """Starts the run in one directory after the other, with one model; used in a child process, which imports jax."""

    def __init__(self, sound: Path):
        from tpu_grpo.cli.starting import prepare
        from tpu_grpo.config import load_config
        from tpu_grpo.hosts import Hosts

        os.chdir(sound)
        config, hosts = load_config(Path("c.yaml")), Hosts()
        prepare(needs_hub=config.needs_hub)
        from tpu_grpo.learner import Learner
        from tpu_grpo.run.inputs import agreed_checkpoint, open_inputs
        from tpu_grpo.run.meshes import build_meshes
        from tpu_grpo.run.policies import load_inputs

        self._inputs = open_inputs(config)
        checkpoint = agreed_checkpoint(config.model, config.run.seed, hosts, self._inputs.checkpoint)
        meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
        learner = Learner(config, load_inputs(config.model, config.run.seed, checkpoint, meshes), hosts)
        self._updater = learner._updater
        self._sums: dict[int, Any] = {}
        self._newest = learner.restored_step
        scratch = sound.with_name(f"sums_{os.getpid()}")
        for step in range(self._newest, self._newest - 3, -1):  # the checksums that each kept checkpoint restores
            shutil.copytree("run/checkpoints", scratch)
            for newer in range(step + 1, self._newest + 1):
                shutil.rmtree(scratch / str(newer))
            assert self._restore(scratch)[0] == step
            self._sums[step] = self._now()
            shutil.rmtree(scratch)

    def _now(self) -> dict[str, int]:
        from tpu_grpo.learner.checkpoints import Held
        from tpu_grpo.learner.parameters import checksums

        return checksums(Held.of(self._updater).leaves())

    def _restore(self, directory: Path, run_file: Path | None = None) -> tuple[int, list[str]]:
        from tpu_grpo.learner.checkpoints import Checkpoints

        checkpoints = Checkpoints(directory, keep=3, run_file=run_file)
        try:
            step = checkpoints.restore(self._updater, resume="auto")
            if run_file is not None:
                _ = checkpoints._manager  # which the first save opens
            return step, checkpoints.notes
        finally:
            checkpoints.close()

    def once(self, directory: Path) -> str:
        """Start the run in a directory, and return the outcome; "bad: ..." is an outcome that is not allowed."""
        from tpu_grpo.records.errors import TpuGrpoError

        os.chdir(directory)
        said = StringIO()
        try:
            with redirect_stderr(said), redirect_stdout(said):
                step, notes = self._start()
        except TpuGrpoError as error:
            return "refused" if error.exit_code == 2 else f"bad: {error!r}"
        except BaseException:  # any other error is a fault that this program looks for
            return f"bad: {traceback.format_exc()}"
        if step is None:
            return "done" if any(notes) else "bad: it is done, in silence"
        if step and self._now() != self._sums.get(step):
            return f"bad: other numbers at step {step}"
        if step < self._newest and not notes and not said.getvalue():
            return f"bad: step {step} in silence"
        return "the newest" if step == self._newest else "an older one"

    def _start(self) -> tuple[int | None, list[str]]:
        from tpu_grpo.config import load_config
        from tpu_grpo.data.prompt_draw import PromptDraw
        from tpu_grpo.hosts import Hosts
        from tpu_grpo.observe.evaluation import EvaluationLog
        from tpu_grpo.observe.run_log import open_run_log
        from tpu_grpo.records.json_files import read_records
        from tpu_grpo.run.directory import RunDirectory, how_it_ended

        config, hosts = load_config(Path("c.yaml")), Hosts()
        earlier = RunDirectory(config, hosts).look()
        if earlier.summary is not None:
            return None, [how_it_ended(config.run, config.optimizer, earlier.summary)]
        earlier.refuse()
        prompts = self._inputs.prompts
        with RunDirectory(config, hosts) as directory:
            step, notes = self._restore(config.run_dir / "checkpoints", config.run_dir / "run_id")
            notes = notes + directory.begin(step, prompts.describe())
            with open_run_log(config.run_dir, config.run, config.logging, {}, step):
                place, seed = (config.run_dir, config.data, prompts, step, hosts), config.run.seed
                with PromptDraw.open(*place, seed=seed, carries=config.open_groups > 0):
                    EvaluationLog(config.run_dir, step, "greedy/rewards.py:ascii_share", hosts)
                list(read_records(config.run_dir / "changes.jsonl", missing_ok=True))
        return step, notes


def in_children(sound: Path, scratch: Path, numbers: Sequence[int], seed: int) -> Iterator[tuple[int, str, str]]:
    """For each number, damage a copy of the directory and start the run there; yields number, damage and outcome."""
    left = list(numbers)
    while left:
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as out:
                _work(sound, scratch, left[:A_CHILD], seed, out)
            os._exit(0)
        os.close(writing)
        ended: set[int] = set()
        status = 0
        with closing(_Lines(reading)) as lines, ended_at_last(pid) as await_end:
            while (line := lines.next(SECONDS + 600 * (not ended))) is not None:
                number, how, outcome = json.loads(line)
                if outcome != "begins":
                    ended.add(number)
                    yield number, how, outcome
            status = await_end()
        if not ended and not lines.last:
            raise SystemExit(f"the child could not begin, and ended with {status}")
        if lines.last and (last := json.loads(lines.last))[2] == "begins":
            ended.add(last[0])
            yield last[0], last[1], f"bad: it hung, or ended the process (status {status})"
        left = [number for number in left if number not in ended]


@contextmanager
def ended_at_last(pid: int) -> Iterator[Callable[[], int]]:
    """Yield a function that kills a child process and returns its status; at the end, the child is killed anyway."""
    statuses: list[int] = []

    def end() -> int:
        if not statuses:
            os.kill(pid, 9)
            statuses.append(os.waitpid(pid, 0)[1])
        return statuses[0]

    try:
        yield end
    finally:
        end()


class _Lines:
    """Reads lines from a pipe."""

    def __init__(self, file: int):
        os.set_blocking(file, False)
        self._file, self._data, self.last = file, b"", ""

    def next(self, seconds: float) -> str | None:
        """Return the next line; None at the end of the pipe, or if no line comes within ``seconds``."""
        end = time.monotonic() + seconds
        while b"\n" not in self._data and time.monotonic() < end:
            try:
                data = os.read(self._file, 65536)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            if not data:
                return None
            self._data += data
        line, found, self._data = self._data.partition(b"\n")
        self.last = line.decode() if found else self.last
        return self.last if found else None

    def close(self) -> None:
        os.close(self._file)


def _work(sound: Path, scratch: Path, numbers: Sequence[int], seed: int, out: Any) -> None:
    try:
        starts = Starts(sound)
        for number in numbers:
            broken = scratch / f"broken_{number}"
            shutil.copytree(sound, broken, symlinks=True)
            how = damage(broken / "run", random.Random(seed * 10**9 + number))
            print(json.dumps([number, how, "begins"]), file=out)
            outcome = starts.once(broken)
            print(json.dumps([number, how, outcome]), file=out)
            os.chdir(scratch)
            shutil.rmtree(broken, ignore_errors=True)
    except BaseException:
        traceback.print_exc()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long, and say how many were done")
    parser.add_argument("--first", type=int, default=0, help="the number of the first, to look at one again")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_damage_") as temporary:
        scratch = Path(temporary).resolve()
        prepare(scratch / "sound")
        numbers = range(options.first, options.first + options.directories)
        for number, how, outcome in in_children(scratch / "sound", scratch, numbers, options.seed):
            counts[outcome.partition(":")[0]] += 1
            if outcome.startswith("bad"):
                print(f"{number}: {how}: {outcome}", flush=True)
            if time.monotonic() > end:
                break
    print(f"{sum(counts.values())} directories: {dict(sorted(counts.items()))}")
    raise SystemExit(counts["bad"] > 0)


if __name__ == "__main__":
    main()
