"""Measures how slow tools delay a rollout: python -m benchmarks.conversations [--rounds N] [--seconds 0.1] ...

64 conversations (8 prompts with 8 samples) of up to 8 turns of 16 to 64 tokens each, on one engine with all rows at
once, on the CPU; the model is that of benchmarks/rollout. An answer has up to 4 tokens. The environments are threads,
which sleep. Contenders take turns in one process, round after round; the first two sample the same tokens:

    at once       tools answer without delay
    slow          every answer takes ``--seconds`` seconds, that of ``reset`` too
    one turn      each row samples the same number of tokens in a single turn
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console

from benchmarks.rollout.__main__ import measure, report
from benchmarks.rollout.contenders import build_engines
from benchmarks.rollout.workloads import GROUP, PROMPT_TOKENS, PROMPTS, Workload, make_model, make_requests
from tests.engine.scripted import Script, ScriptedConversations, script
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.records.stages import Request

ROWS, TURNS, TOKENS = PROMPTS * GROUP, 8, (16, 65)
CONTEXT = PROMPT_TOKENS + 4 + TURNS * (64 + 4)


class ThreadedConversations(ScriptedConversations):
    """Scripted conversations whose environments are threads of a pool, which sleep."""

    def __init__(self, requests: Sequence[Request], scripts: Sequence[Script], pool: ThreadPoolExecutor, delay: float):
        super().__init__(requests, scripts)
        self._pool = pool
        self._seconds = delay
        self._answers: dict[int, Future[None]] = {}

    def ready(self, row: int) -> bool:
        """Whether the thread of the row's environment has finished."""
        return self._answers[row].done()

    def next(self, row: int) -> Request | None:
        """Wait for the row's thread, and return the next request."""
        self._answers[row].result()
        return super().next(row)

    def _go_out(self, row: int) -> None:
        super()._go_out(row)
        self._answers[row] = self._pool.submit(time.sleep, self._seconds)


def workload(engines: Replicas, scripts: Sequence[Script], pool: ThreadPoolExecutor, delay: float) -> Workload:
    """Return a workload of conversations whose answers take ``delay`` seconds; it clears the prefix cache first."""

    def run(number: int) -> int:
        engines.forget_prefixes()
        rows = make_requests([CONTEXT - PROMPT_TOKENS] * ROWS, number)
        found = engines.generate(rows, conversations=ThreadedConversations(rows, scripts, pool, delay))
        return sum(completion.sampled_tokens for completion in found)

    return run


def in_one_turn(play: Script) -> Script:
    """Return a script that samples the tokens of all turns in one turn."""
    return replace(play, turns=(sum(play.turns),) if play.turns else (), answers=())


def main() -> None:
    """Measure, and print the speeds and how many times longer slow tools take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--tool-steps", type=int, default=16)
    asked, console = parser.parse_args(), Console(width=130)
    plays = [replace(script(row, row // GROUP, TURNS, TOKENS), forgets=None) for row in range(ROWS)]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(ROWS) as pool:
        directory = Path(temporary) / "model"
        sizes = {"context_tokens": CONTEXT, "tool_steps": asked.tool_steps, "steps_per_launch": 16}
        engines = build_engines(directory, make_model(directory), jax.devices()[:1], **sizes)
        contenders = {
            "at once": workload(engines, plays, pool, 0.0),
            "slow": workload(engines, plays, pool, asked.seconds),
            "one turn": workload(engines, [in_one_turn(play) for play in plays], pool, 0.0),
        }
        speeds = measure(contenders, asked.rounds)
        console.print(report("conversations", [sum(play.turns) for play in plays], speeds))
        ratios = [fast / slow for fast, slow in zip(speeds["at once"], speeds["slow"], strict=True)]
        turns = sum(len(play.turns) for play in plays)
        console.print(
            f"{turns} turns with tools of {1000 * asked.seconds:.0f} ms take {median(ratios):.2f} times as long as "
            f"with tools that answer at once ({min(ratios):.2f} to {max(ratios):.2f})"
        )
        for name in ("at once", "slow"):
            contenders[name](0)
            figures = ", ".join(f"{key.removeprefix('rollout/')} {value:.2f}" for key, value in engines.figures.items())
            console.print(f"{name}: {figures}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
