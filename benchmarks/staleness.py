"""Measures what sampling during the update saves: python -m benchmarks.staleness [--rounds N] [--steps N]

Two hosts, each pinned to a core of its own: one trains and one samples (meshes.layout=split). Each round has a run
with algorithm.staleness 0 and one with 1. Shown are median seconds over steps and rounds: rollout, update (with
staleness 1 including the wait for the other host), weight sync, and step, from the end of one update to the next.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.hosts.processes import free_port
from tests.several.runs import REPOSITORY, settings, write_files

SIZES: dict[str, Any] = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 32, "intermediate": 384}
SKIPPED = 4
"""The number of first steps that are left out, because they compile programs."""


def timed(directory: Path, staleness: int, steps: int) -> dict[str, list[float]]:
    """Run both hosts; returns the seconds of rollouts, updates, syncs and whole steps after the skipped ones."""
    run_dir = directory / "run"
    tree = settings(
        run_dir,
        run={"dir": str(run_dir), "max_steps": steps + SKIPPED, "seed": 5},
        data={"path": "data.jsonl", "prompts_per_step": 8, "max_prompt_tokens": 12},
        rollout={"max_new_tokens": 48, "prefill_tokens": 128, "batch_paddings": [64], "max_running_requests": 64},
        algorithm={"group_size": 8, "iterations": 2, "staleness": staleness},
        optimizer={"learning_rate": 1e-9},  # so that all rollouts are alike
        meshes={"layout": "split", "probe_every": 0},
        checkpoint={"every": 10**6, "resume": "never"},
        logging={"samples_every": 0},
    )
    path, port = directory / "run.yaml", free_port()
    path.write_text(yaml.safe_dump(tree))
    words = [sys.executable, str(REPOSITORY / "scripts/run.py"), str(path), f"hosts.coordinator=127.0.0.1:{port}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    started = [
        subprocess.Popen(
            ["taskset", "-c", str(index), *words, "hosts.count=2", f"hosts.index={index}"],
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for index in (0, 1)
    ]
    if codes := [process.returncode for process in started if process.wait()]:
        raise SystemExit(f"a run ended with {codes}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    log = (run_dir / "logs/host_0.log").read_text().splitlines()
    ends = [line[:23] for line in log if "update of step" in line and "ends after" in line]
    at = [datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp() for text in ends]
    return {
        "rollout": [line["rollout/seconds"] for line in lines[SKIPPED:]],
        "update": [line["update/seconds"] for line in lines[SKIPPED:]],
        "sync": [line["weights/sync_seconds"] for line in lines[SKIPPED:]],
        "step": [later - earlier for earlier, later in zip(at[SKIPPED - 1 :], at[SKIPPED:], strict=False)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    found: dict[int, dict[str, list[float]]] = {0: {}, 1: {}}
    for _ in range(options.rounds):
        for staleness, seconds in found.items():
            with tempfile.TemporaryDirectory(prefix="tpu_grpo_staleness_") as scratch:
                for name, values in timed(write_files(Path(scratch), **SIZES), staleness, options.steps).items():
                    seconds.setdefault(name, []).extend(values)
    in_turn, ahead = ({name: median(values) for name, values in seconds.items()} for seconds in found.values())
    for staleness, seconds in enumerate((in_turn, ahead)):
        print(f"staleness {staleness}: {', '.join(f'{name} {value:.3f} s' for name, value in seconds.items())}")
    both = in_turn["rollout"] + in_turn["update"]
    print(f"step with staleness 1: {ahead['step'] / in_turn['step']:.2f} of that with staleness 0", end=", ")
    print(f"{ahead['step'] / both:.2f} of rollout + update")


if __name__ == "__main__":
    main()
