"""Rollout tokens per second: python -m benchmarks.rollout [samplers | launches | filters | replicas] [--rounds N]

One model (4-layer, 256-wide Qwen3, random weights, float32), 8 prompts of 30 tokens x 8 samples, on the CPU; every
contender samples the same workload in turn, round after round in one process, and the medians are compared.

``samplers``:

    ours          this package's two engines on a CPU, as runs of small models have them
    tunix         Tunix's own sampler: one compiled loop for the whole batch, up to the longest row

``launches``: our engines with 1, 4, 16 and 64 decode steps per launch, with all rows at once, and with 16 at a time, so
that requests wait; each with the host's time per token by stage.

``filters``: our engines without a filter and with each filter.

``replicas``: 1, 2 and 4 engines on as many virtual devices, with 16 rows at once in all, and shares of idle engines.
The devices share the machine's cores, so that seconds mean little here; idle shares are counted in decode steps.

Workloads: *even*, 64 tokens each; *uneven*, lengths from a long tail up to 256; *as GSM8K*, lengths spread as those of
its published solutions, up to 256 (Tunix's sampler has no limit per request; only the wanted tokens count).
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "replicas" in sys.argv:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.rollout.contenders import build_engines, engine_workload, host_times, tunix_workload
from benchmarks.rollout.workloads import NO_FILTER, WORKLOADS, Workload, make_model
from tpu_grpo.records.stages import SamplingParams

FILTERS = {
    "none": NO_FILTER,
    "min-p 0.05": SamplingParams(1, min_p=0.05),
    "top-k 20": SamplingParams(1, top_k=20),
    "top-p 0.95": SamplingParams(1, top_p=0.95),
    "top-k 20, top-p 0.95": SamplingParams(1, temperature=0.6, top_k=20, top_p=0.95),
}


def measure(contenders: dict[str, Workload], rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each contender in each round, after one round that is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run(number)
            if number:
                speeds[name].append(tokens / (time.perf_counter() - start))
    return speeds


def report(workload: str, lengths: Sequence[int], speeds: dict[str, list[float]]) -> Table:
    """Return a table of medians, and the median over rounds of the first contender's speed divided by each speed."""
    title = f"{workload}: {sum(lengths)} tokens, median length {median(lengths):.0f}, longest {max(lengths)}"
    first = next(iter(speeds))
    table = Table("contender", "tokens/s (median)", "min", "max", f"times {first}", title=title)
    for name, values in speeds.items():
        ratios = [theirs / ours for ours, theirs in zip(speeds[first], values, strict=True)]
        figures = (f"{median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}", f"{median(ratios):.2f}")
        table.add_row(name, *figures)
    return table


def compare_samplers(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Compare our engines with Tunix's sampler."""
    engines = build_engines(directory, model)
    for workload, lengths in WORKLOADS.items():
        contenders = {"ours": engine_workload(engines, lengths), "tunix": tunix_workload(model, lengths)}
        console.print(report(workload, lengths, measure(contenders, rounds)))
        console.print(f"ours: {host_times(engines, contenders['ours'])}\n")


def compare_launches(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Compare our engines with different numbers of decode steps per launch."""
    for rows in (64, 16):
        engines = {
            f"{steps} steps": build_engines(directory, model, rows=rows, steps_per_launch=steps)
            for steps in (1, 4, 16, 64)
        }
        for workload, lengths in WORKLOADS.items():
            contenders = {name: engine_workload(engine, lengths) for name, engine in engines.items()}
            console.print(report(f"{workload}, {rows} rows at a time", lengths, measure(contenders, rounds)))
            for name, engine in engines.items():
                console.print(f"{name}: {host_times(engine, contenders[name])}")
            console.print()


def compare_filters(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Compare our rollouts with different filters."""
    engine = build_engines(directory, model)
    for workload, lengths in WORKLOADS.items():
        contenders = {name: engine_workload(engine, lengths, sampling) for name, sampling in FILTERS.items()}
        console.print(report(workload, lengths, measure(contenders, rounds)))


def compare_replicas(directory: Path, model: nnx.Module, rounds: int, console: Console) -> None:
    """Compare one, two and four engines with the same number of rows in all."""
    engines = {f"{n} engines": build_engines(directory, model, jax.devices()[:n], rows=16) for n in (1, 2, 4)}
    for workload, lengths in WORKLOADS.items():
        contenders = {name: engine_workload(replicas, lengths) for name, replicas in engines.items()}
        console.print(report(workload, lengths, measure(contenders, rounds)))
        for name, replicas in engines.items():
            figures = ", ".join(f"{figure.removeprefix('rollout/')} {x:.2f}" for figure, x in replicas.figures.items())
            console.print(f"{name}: {figures}")


COMPARISONS = {
    "samplers": compare_samplers,
    "launches": compare_launches,
    "filters": compare_filters,
    "replicas": compare_replicas,
}


def main() -> None:
    """Run the comparison that the command line names, and print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", nargs="?", choices=tuple(COMPARISONS), default="samplers")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        COMPARISONS[asked.comparison](directory, make_model(directory), asked.rounds, Console(width=130))


if __name__ == "__main__":
    main()
