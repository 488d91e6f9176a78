"""The command line of ``scripts/rewards.py``: tries the rewards of a config on the completions in a file."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.cli.starting import command_parser, exit_code_of
from tpu_grpo.config import load_config
from tpu_grpo.hosts import choose_platform
from tpu_grpo.rewards.workbench import Trial, try_rewards

ABOUT = """Tries the rewards of a config on completions that are there already, without a model.

A line of the file is {"completion": "...", "prompt": "...", and the columns that the rewards need}, or holds a group as
"completions": [...]. Shows each reward's values, the slowest samples, and where rewards disagree. If a reward fails, it
says on which rows, and exits with 1."""
_TOKENS = 24
"""The number of tokens shown per completion."""
_FAILURES = 20
"""The number of failures whose texts are shown."""
USAGE = "python scripts/rewards.py CONFIG.yaml --completions file.jsonl [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0, 1 if a reward failed on a row, 2 for input that cannot be scored."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("config", help="the config whose rewards are tried")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument("--completions", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--step", type=int, default=0, help="the step to score for (default: 0)")
    parser.add_argument("--show", type=int, default=5, help="rows per table (default: 5)")
    options = parser.parse_intermixed_args(arguments)
    choose_platform()  # the user's rewards may import jax
    return exit_code_of(lambda: _try_and_show(options))


def _try_and_show(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    logger = logging.getLogger("tpu_grpo.rewards")
    level = logger.level
    logger.setLevel(logging.ERROR)  # all problems are shown at the end instead
    try:
        trial = try_rewards(
            config.rewards, options.completions, step=options.step, max_steps=config.run.max_steps, slowest=options.show
        )
    finally:
        logger.setLevel(level)
    show(trial, Console(), options.show)
    for line in failure_lines(trial):
        print(line, file=sys.stderr)
    return 1 if trial.failures else 0


def failure_lines(trial: Trial) -> list[str]:
    """List, line by line, the rows on which each reward failed, and the first _FAILURES error texts."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for failure in trial.failures:
        by_text.setdefault((failure.reward, failure.text), []).extend(failure.rows)
    failed = {name: sorted(row for (n, _), rows in by_text.items() if n == name for row in rows) for name, _ in by_text}
    counts = [
        f"{name} failed on {len(rows)} of {len(trial.rollout.texts)} rows: {', '.join(map(str, rows))}"
        for name, rows in failed.items()
    ]
    texts = [f"  {text}" for _, text in by_text]
    more = [f"  and {len(texts) - _FAILURES} more"] if len(texts) > _FAILURES else []
    return [*counts, *texts[:_FAILURES], *more]


def show(trial: Trial, console: Console, most: int) -> None:
    """Print tables: the rewards, samples, the slowest samples, and each pair of rewards that disagrees."""
    console.print(_by_reward(trial))
    console.print(_samples(trial, most))
    if trial.scores.per_token:
        console.print(_of_tokens(trial, most))
    if trial.slowest:
        table = Table("seconds", "reward", "row", "completion", title="Slowest, each row alone")
        for timed in trial.slowest:
            table.add_row(f"{timed.seconds:.4f}", timed.reward, str(timed.row), _short(trial.rollout.texts[timed.row]))
        console.print(table)
    for found in trial.disagreements:
        title = f"{found.first} and {found.second} disagree on {len(found.rows)} of {found.comparable}"
        table = Table("row", found.first, found.second, "completion", title=title)
        for row in found.rows[:most]:
            values = [f"{trial.scores.by_name[name][row]:g}" for name in (found.first, found.second)]
            table.add_row(str(row), *values, _short(trial.rollout.texts[row]))
        console.print(table)


def _by_reward(trial: Trial) -> Table:
    def spread(values: np.ndarray) -> list[str]:
        return [f"{values.mean():.3f}", f"{values.std():.3f}"] if len(values) else ["-", "-"]

    scores = trial.scores
    table = Table("reward", "mean", "std", "rows", "errors", "timeouts", "seconds", title="Rewards")
    for name, values in scores.by_name.items():
        known = values[~np.isnan(values)]
        counts = [f"{scores.figures[f'rewards/{name}/{n}'].value:g}" for n in ("errors", "timeouts")]
        seconds = f"{scores.figures[f'rewards/{name}/seconds'].value:.3f}"
        table.add_row(name, *spread(known), str(len(known)), *counts, seconds)
    total = scores.total[scores.scored]
    table.add_row("total", *spread(total), str(len(total)), "", "", "")
    return table


def _samples(trial: Trial, most: int) -> Table:
    table = Table("row", *trial.scores.by_name, "total", "completion", title="Samples")
    for row, text in enumerate(trial.rollout.texts[:most]):
        values = [values[row] for values in trial.scores.by_name.values()]
        shown = ["-" if np.isnan(value) else f"{value:g}" for value in values]
        total = f"{trial.scores.total[row]:g}" if trial.scores.scored[row] else "-"
        table.add_row(str(row), *shown, total, _short(text))
    return table


def _of_tokens(trial: Trial, most: int) -> Table:
    table = Table("row", "completion", "tokens", title="Added to the advantages of tokens, with the weights")
    for row, values in enumerate(trial.scores.per_token[:most]):
        shown = " ".join(f"{value:g}" for value in values[:_TOKENS])
        more = f" ... ({len(values)})" if len(values) > _TOKENS else ""
        table.add_row(str(row), _short(trial.rollout.texts[row]), shown + more)
    return table


def _short(text: str) -> Text:
    line = " ".join(text.split())
    return Text(line if len(line) <= 60 else f"{line[:30]} ... {line[-30:]}")
