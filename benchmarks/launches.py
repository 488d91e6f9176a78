"""Estimates the effect of several decode steps per launch, and when to refill rows: python -m benchmarks.launches

Nothing runs on a device: seconds on a TPU are estimated as by ``scripts/plan.py`` (planning/costs.py), and shapes and
numbers of steps are the engine's. Two tables are printed:

    time a token    milliseconds between two tokens of a row, in an engine with all rows in use, with one step per
                    launch and with as many as ``rollout.steps_per_launch: auto`` chooses. Prompts have 256 tokens,
                    completions 768. One thread drives all engines of a host. No request waits, so that devices get the
                    next launch before the current one has ended
    refill          seconds of a rollout with four times as many completions as rows. While requests wait, a launch ends
                    as soon as one row in 64, 32, .. 4 has ended, or any single row, or no row. Lengths of completions
                    are log-normal, like those of GSM8K or with a longer tail, with a mean of 256 and at most 768
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from rich.console import Console
from rich.table import Table

from tpu_grpo.engine.options import choose_steps, ladder, pad_to
from tpu_grpo.launching.tpus import Generation, parse_slice
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.planning.costs import EngineSizes, decode_step, host_seconds, prefill_step, round_seconds
from tpu_grpo.planning.slice_plan import PUBLISHED

PROMPT, LONGEST, MEAN = 256, 768, 256
SPREADS = {"as GSM8K": 0.49, "long tail": 0.9}
ROWS = (32, 64, 256)


@dataclass(frozen=True)
class Case:
    """A model on a host of a slice."""

    model: str
    slice: str
    tensor: int
    engines: int
    """The number of engines of one host."""

    @property
    def generation(self) -> Generation:
        """The generation of the slice's TPUs."""
        return parse_slice(self.slice).generation

    @cached_property
    def sizes(self) -> EngineSizes:
        """The sizes of weights and cache that a step of an engine reads."""
        checkpoint = abstract_checkpoint(PUBLISHED / self.model)
        cache = checkpoint.config.num_hidden_layers * 2 * checkpoint.config.kv_width * 2 / self.tensor
        split = self.tensor > 1
        return EngineSizes.of(checkpoint, tensor=self.tensor, itemsize=2, split_vocabulary=split, cache_bytes=cache)

    @property
    def steps(self) -> int:
        """The number of decode steps per launch that the engine chooses."""
        return choose_steps(int(self.sizes.weight_bytes), "tpu")

    def token_seconds(self, rows: int, steps: int) -> float:
        """Return the seconds from one token of a row to the next, in the middle of its completion."""
        device = decode_step(self.sizes, self.generation, rows, rows * (PROMPT + LONGEST / 2))
        launch = {cause: seconds * steps for cause, seconds in device.items()}
        engines = [(launch, host_seconds(self.sizes, rows, steps))] * self.engines
        return sum(round_seconds(engines, ahead=steps > 1).values()) / steps


CASES = (
    Case("Qwen3-0.6B", "v5e-8", 1, 8),
    Case("Qwen3-1.7B", "v5e-8", 1, 8),
    Case("Qwen3-8B", "v5e-16", 4, 1),
)


@dataclass
class Rollout:
    """A rollout of one engine, simulated launch by launch."""

    case: Case
    rows: int
    share: float
    """While requests wait, a launch ends when 1 row in ``share`` has ended: infinity means any row, 0 means no row."""
    seconds: float = 0.0
    running: list[int] = field(default_factory=list)
    """The number of tokens that each running row still needs."""

    def run(self, lengths: Sequence[int]) -> float:
        """Simulate a rollout of completions of these lengths, and return its seconds."""
        waiting = list(reversed(lengths))
        while waiting or self.running:
            if waiting and len(self.running) < self.rows:
                self._admit([waiting.pop() for _ in range(min(self.rows - len(self.running), len(waiting)))])
            else:
                self._launch(waiting=bool(waiting))
        return self.seconds

    def _admit(self, lengths: list[int]) -> None:
        """Simulate the prefill of rows whose prompts are in the prefix cache; each row gets its first token."""
        step = prefill_step(self.case.sizes, self.case.generation, len(lengths), PROMPT)
        self.seconds += sum(step.values()) + host_seconds(self.case.sizes, len(lengths))
        self.running += [length - 1 for length in lengths if length > 1]

    def _launch(self, *, waiting: bool) -> None:
        """Simulate a launch. It ends after all its steps, when rows fit a smaller program, or to refill rows."""
        rungs, rows = ladder(8, self.rows, 2), len(self.running)
        left = max((rung for rung in rungs if rung < rows), default=0)
        if waiting and self.share:
            left = max(left, rows - max(1, int(rows // self.share)))
        steps = min(self.case.steps, sorted(self.running)[rows - left - 1])
        context = rows * (PROMPT + MEAN)
        device = decode_step(self.case.sizes, self.case.generation, pad_to(rungs, rows), context)
        host = host_seconds(self.case.sizes, rows, steps) if waiting else 0.0  # else devices have the next launch
        self.seconds += steps * sum(device.values()) + host
        self.running = [length - steps for length in self.running if length > steps]


def drawn_lengths(rows: int, spread: float, seed: int) -> list[int]:
    """Draw log-normal lengths, cut at LONGEST; their scale is found by bisection, so that the mean is MEAN."""
    drawn = np.random.default_rng(seed).lognormal(0.0, spread, rows)
    low, high = 0.0, 10.0 * LONGEST
    while high - low > 1e-3:
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * drawn, 1, LONGEST).mean() < MEAN else (low, scale)
    return np.clip(high * drawn, 1, LONGEST).astype(int).tolist()


def mean_seconds(case: Case, rows: int, share: float, drawn: Sequence[Sequence[int]]) -> float:
    """Return the mean seconds of a rollout over several draws of lengths."""
    return sum(Rollout(case, rows, share).run(lengths) for lengths in drawn) / len(drawn)


def token_table() -> Table:
    """Return the table of the time per token."""
    table = Table("model", "slice", "tensor", "steps", "rows", "one step", "ms", "times", title="time a token")
    for case in CASES:
        for rows in ROWS:
            alone, together = (1e3 * case.token_seconds(rows, steps) for steps in (1, case.steps))
            cells = (case.steps, rows, f"{alone:.2f}", f"{together:.2f}", f"{alone / together:.2f}")
            table.add_row(case.model, case.slice, str(case.tensor), *map(str, cells))
    return table


def refill_table() -> Table:
    """Return the table of rollouts with different rules for refilling rows."""
    shares = {"a row": float("inf"), **{f"1 in {n}": float(n) for n in (64, 32, 16, 8, 4)}, "never": 0.0}
    table = Table("model", "rows", "lengths", *shares, title="refill, seconds of a rollout")
    for case in CASES:
        for rows in (32, 256):
            for name, spread in SPREADS.items():
                lengths = [drawn_lengths(4 * rows, spread, seed) for seed in range(3)]
                seconds = [mean_seconds(case, rows, share, lengths) for share in shares.values()]
                table.add_row(case.model, str(rows), name, *(f"{value:.2f}" for value in seconds))
    return table


if __name__ == "__main__":
    console = Console(width=130)
    console.print(token_table())
    console.print(refill_table())
