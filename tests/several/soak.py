"""Runs two hosts with an environment and a reward worker for thousands of steps: memory must not grow.

    uv run python -m tests.several.soak --steps 2000

The resident size of every process of the run, those of rewards and environments included, is measured about every
second. A line is fitted to the sizes after the first quarter of the steps; its slope must be at most a kilobyte a step.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from tests.several.kills import last_step, start_hosts
from tests.several.runs import REWARD, settings
from tests.talking import SIZES, write_talking_files

BYTES_A_STEP = 1024.0


def slopes(steps: int, directory: Path, memory: Path | None) -> dict[str, float]:
    """Run, and return the bytes per step by which the memory of each process grew, by the name of the process."""
    files, run_dir = write_talking_files(directory / "files"), directory / "run"
    (files / "echo.py").write_text((files / "echo.py").read_text().replace("0.06", "0.001"))
    (files / "rewards.py").write_text(REWARD)
    rewards = [{"name": "environment"}, {"name": "rewards.py:ascii_share", "workers": 1}]
    tree = settings(run_dir, **{**SIZES, "run": {"max_steps": steps}, "rewards": rewards, "checkpoint": {"every": 100}})
    started = start_hosts(files, tree, 2)
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    try:
        while any(process.poll() is None for process in started):
            step = last_step(run_dir)
            for index, process in enumerate(started):
                for name, size in resident(process, f"host {index}").items():
                    seen[name].append((step, size))
            time.sleep(1.0)
    finally:
        for process in started:
            process.kill()
    if codes := [process.wait() for process in started if process.wait()]:
        raise SystemExit(f"the run ended with {codes}: {(files / 'host_0.err').read_text()[-2000:]}")
    if memory is not None:
        memory.write_text(json.dumps(seen))
    fitted: dict[str, float] = {}
    for name, points in seen.items():
        late = np.array([point for point in points if point[0] >= steps / 4], float)
        if len(late) > 20:
            fitted[f"{name}, {late[-1, 1] / 2**20:.0f} MiB"] = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
    return fitted


def resident(process: subprocess.Popen[bytes], name: str) -> dict[str, int]:
    """Return the resident bytes of a process and of its descendants, by name."""
    sizes: dict[str, int] = {}
    try:
        root = psutil.Process(process.pid)
        sizes[name] = root.memory_info().rss
        for child in sorted(root.children(recursive=True), key=lambda child: child.pid):
            sizes[f"{name}, process {child.pid}"] = child.memory_info().rss
    except psutil.Error:
        pass  # it has ended
    return sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--memory", type=Path, help="a file for all that was seen")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_soak_") as scratch:
        fitted = slopes(options.steps, Path(scratch), options.memory)
    for name, slope in fitted.items():
        print(f"{name}: {slope:.0f} bytes a step")
    raise SystemExit(max(fitted.values()) > BYTES_A_STEP)


if __name__ == "__main__":
    main()
