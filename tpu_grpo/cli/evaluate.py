"""This is the command line of ``scripts/eval.py``: it parses, calls, prints and returns an exit code.

Nothing that imports jax is imported before ``prepare`` has chosen jax's platform.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tpu_grpo.cli.starting import config_from_words, exit_code_of, joined_hosts, prepare
from tpu_grpo.config import RunConfig
from tpu_grpo.observe.run_files import EVALUATIONS_DIR

if TYPE_CHECKING:
    from tpu_grpo.observe.evaluation import Evaluation

ABOUT = """Evaluates a checkpoint of a run on held-out prompts, without training.

CHECKPOINT is a step of run.dir, latest, best, initial (the model as the run starts), or a directory of a step. What is
evaluated, and how, is the section `evaluation`. On several hosts every one runs the same command; on one machine
scripts/local_hosts.py --command "python scripts/eval.py" starts them."""
USAGE = "python scripts/eval.py [CONFIG.yaml] --checkpoint best [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_code_of(lambda: _evaluate(config_from_words(options.words), options.checkpoint))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help="the config, and settings")
    parser.add_argument("--checkpoint", required=True, help="a step, latest, best, initial, or a directory")
    return parser


def _evaluate(config: RunConfig, which: str) -> None:
    prepare(config)
    with joined_hosts(config) as (hosts, watch):
        from tpu_grpo.cli.checkpoint_evaluation import evaluate_checkpoint

        chosen, evaluation = evaluate_checkpoint(config, which, hosts, watch)
        if hosts.is_first:
            show(evaluation, f"{config.run.name}, {chosen.name}", Console(highlight=False))
            print(f"samples: {config.run_dir}/{EVALUATIONS_DIR}/{chosen.name}.jsonl")


def show(evaluation: "Evaluation", title: str, console: Console) -> None:
    """Print a table of the estimates, and how long the completions are."""
    table = Table("", "reward", "mean", "95 % interval", "problems", title=title)
    for mode, found in evaluation.estimates.items():
        for name, e in found.items():
            table.add_row(mode, name, f"{e.value:.4f}", f"{e.low:.4f} to {e.high:.4f}", str(e.problems))
    console.print(table)
    for mode, tokens in evaluation.tokens.items():
        console.print(f"{mode}: {tokens:.1f} tokens, {evaluation.truncated[mode]:.1%} cut")
