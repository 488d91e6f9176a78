"""Stops a run of two hosts at random moments: every host must end with exit code 4, whichever host gets a signal.

    uv run python -m tests.several.stops --stops 100

Each time the run is started or continued, and host 0, host 1 or both get SIGINT or SIGTERM: a quarter of the times
while the run starts, otherwise within a second after a step. Signals, hosts and moments are random by ``--seed``.
"""

import argparse
import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.several.kills import END_SECONDS, Moment, last_step, start_hosts
from tests.several.runs import settings, write_files

HOSTS = 2
START_SECONDS = 12.0
"""The latest second after the start at which a signal is sent while the run starts."""


def stop_once(directory: Path, run_dir: Path, targets: Sequence[int], number: signal.Signals, moment: Moment) -> float:
    """Start or continue the run, send a signal at a moment, and return the seconds to the end of the last host.

    Raises:
        AssertionError: a host ended with another exit code than 4.
    """
    config = settings(run_dir, run={"max_steps": 100_000}, checkpoint={"every": 50})
    started = start_hosts(directory, config, HOSTS)
    try:
        moment.await_in(run_dir, started)
        began = time.monotonic()
        for index in targets:
            started[index].send_signal(number)
        codes = [process.wait(END_SECONDS) for process in started]
        seconds = time.monotonic() - began
    finally:
        for process in started:
            process.kill()
            process.wait()
    if codes != [4] * HOSTS:
        errors = "\n".join((directory / f"host_{index}.err").read_text()[-2000:] for index in range(HOSTS))
        raise AssertionError(f"every host must end with 4, got {codes} after {seconds:.1f} s:\n{errors}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    drawn = random.Random(options.seed)
    bad, seconds = 0, []
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_stops_") as scratch:
        files = write_files(Path(scratch) / "files")
        run_dir = Path(scratch) / "run"
        for count in range(options.stops):
            targets, number = drawn.choice([(0,), (1,), (0, 1)]), drawn.choice([signal.SIGINT, signal.SIGTERM])
            if drawn.random() < 1 / 4:
                moment = Moment(0, drawn.uniform(0.5, START_SECONDS))
            else:
                moment = Moment(last_step(run_dir) + drawn.randint(1, 4), drawn.uniform(0.0, 1.0))
            for index in range(HOSTS):
                (files / f"host_{index}.err").unlink(missing_ok=True)
            what = f"stop {count + 1} of {options.stops}: {number.name} to hosts {list(targets)} at {moment}"
            try:
                seconds.append(stop_once(files, run_dir, targets, number, moment))
                print(f"{what}: {seconds[-1]:.1f} s", flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                bad += 1
                print(f"{what}: {error}", flush=True)
    print(json.dumps({"stops": options.stops, "bad": bad, "slowest": max(seconds, default=0.0)}))
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
