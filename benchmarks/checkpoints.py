"""Measures the cost of saving checkpoints in a run: python -m benchmarks.checkpoints [--steps 100] [--every 5]

It runs the demo with ``checkpoint.every`` and reads the seconds of every step from the run's log. A save copies arrays
after its step and writes them during the next step, so these two steps are compared with the other steps of the run.
The first eleven steps, which compile, are left out.

    step        mean seconds of the other steps
    saving      additional seconds of the step that is saved, and of the step after it
    share       both together, as a share of the seconds of ``--every`` steps
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

FIRST = 11
_BEGINS = re.compile(r"^(\S+ \S+) host 0 INFO tpu_grpo\.host: rollout of step (\d+) begins$", re.MULTILINE)


def step_seconds(log: str) -> dict[int, float]:
    """Return the seconds from the beginning of each step's rollout to that of the next step."""
    begins = {int(step): datetime.fromisoformat(at.replace(",", ".")).timestamp() for at, step in _BEGINS.findall(log)}
    return {step: begins[step + 1] - at for step, at in begins.items() if step + 1 in begins}


def costs(seconds: dict[int, float], every: int) -> tuple[float, float, float]:
    """Return the mean seconds of steps without a save, and the additional seconds of a saved step and of the next."""

    def mean(places: Sequence[int]) -> float:
        return float(np.mean([s for step, s in seconds.items() if step > FIRST and step % every in places]))

    undisturbed = mean(range(2, every))
    return undisturbed, mean([0]) - undisturbed, mean([1]) - undisturbed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo and print what saving costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        settings = [f"run.dir={run_dir}", f"run.max_steps={options.steps}", f"checkpoint.every={options.every}"]
        command = [sys.executable, "scripts/run.py", "configs/demo_cpu.yaml", "evaluation.every=0", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
        seconds = step_seconds((run_dir / "logs" / "host_0.log").read_text())
    step, saved, after = costs(seconds, options.every)
    share = (saved + after) / (options.every * step)
    print(f"step {step:.3f} s; saving {saved:+.3f} s in its own step and {after:+.3f} s in the next; share {share:.1%}")


if __name__ == "__main__":
    main()
