"""What launches of several decode steps save on a TPU, and when to refill rows: python -m benchmarks.launches

Nothing runs on a device: the seconds are those of ``scripts/plan.py`` (planning/costs.py), the shapes and the
number of steps those of the engine. Two tables:

    time a token    milliseconds between two tokens of a row, in an engine whose rows all run, with one step a launch
                    and with as many as ``rollout.steps_per_launch: auto`` takes. Prompts have 256 tokens, completions
                    768. All engines of a host are driven by one thread. No request waits, so that devices have the
                    next launch before this one has ended
    refill          seconds of a rollout with four times as many completions as rows, when a launch ends as soon as one
                    row in 64, 32, .. 4 has ended while requests wait, or one row at all, or none. Completions have a
                    mean of 256 tokens, log-normal as those of GSM8K are, or with a long tail, and at most 768
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
    """Those of one host."""

    @property
    def generation(self) -> Generation:
        """The kind of TPU."""
        return parse_slice(self.slice).generation

    @cached_property
    def sizes(self) -> EngineSizes:
        """What a step of an engine reads."""
        checkpoint = abstract_checkpoint(PUBLISHED / self.model)
        cache = checkpoint.config.num_hidden_layers * 2 * checkpoint.config.kv_width * 2 / self.tensor
        split = self.tensor > 1
        return EngineSizes.of(checkpoint, tensor=self.tensor, itemsize=2, split_vocabulary=split, cache_bytes=cache)

    @property
    def steps(self) -> int:
        """The steps of a launch."""
        return choose_steps(int(self.sizes.weight_bytes), "tpu")

    def token_seconds(self, rows: int, steps: int) -> float:
        """Seconds from one token of a row to the next, in the middle of its completion."""
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
    """A launch ends when 1 row in this many has ended while requests wait: infinite for any row, 0 for none."""
    seconds: float = 0.0
    running: list[int] = field(default_factory=list)
    """Tokens that each running row still needs."""

    def run(self, lengths: Sequence[int]) -> float:
        """Return the seconds of completions of these lengths."""
        waiting = list(reversed(lengths))
        while waiting or self.running:
            if waiting and len(self.running) < self.rows:
                self._admit([waiting.pop() for _ in range(min(self.rows - len(self.running), len(waiting)))])
            else:
                self._launch(waiting=bool(waiting))
        return self.seconds

    def _admit(self, lengths: list[int]) -> None:
        """Prefill rows whose prompts are in the cache, which gives each its first token."""
        step = prefill_step(self.case.sizes, self.case.generation, len(lengths), PROMPT)
        self.seconds += sum(step.values()) + host_seconds(self.case.sizes, len(lengths))
        self.running += [length - 1 for length in lengths if length > 1]

    def _launch(self, *, waiting: bool) -> None:
        """Make decode steps until the launch ends: all are made, rows fit a smaller program, or rows are refilled."""
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
    """Log-normal lengths with a mean of MEAN after they are cut at LONGEST; the scale is found by halving."""
    drawn = np.random.default_rng(seed).lognormal(0.0, spread, rows)
    low, high = 0.0, 10.0 * LONGEST
    while high - low > 1e-3:
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * drawn, 1, LONGEST).mean() < MEAN else (low, scale)
    return np.clip(high * drawn, 1, LONGEST).astype(int).tolist()


def mean_seconds(case: Case, rows: int, share: float, drawn: Sequence[Sequence[int]]) -> float:
    """The seconds of a rollout, a mean over several of these lengths."""
    return sum(Rollout(case, rows, share).run(lengths) for lengths in drawn) / len(drawn)


def token_table() -> Table:
    """The first table."""
    table = Table("model", "slice", "tensor", "steps", "rows", "one step", "ms", "times", title="time a token")
    for case in CASES:
        for rows in ROWS:
            alone, together = (1e3 * case.token_seconds(rows, steps) for steps in (1, case.steps))
            cells = (case.steps, rows, f"{alone:.2f}", f"{together:.2f}", f"{alone / together:.2f}")
            table.add_row(case.model, case.slice, str(case.tensor), *map(str, cells))
    return table


def refill_table() -> Table:
    """The second table."""
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
