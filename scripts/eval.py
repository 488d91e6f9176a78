"""Evaluate a checkpoint of a run on held-out prompts, without training.

    python scripts/eval.py [CONFIG.yaml] --checkpoint best [section.key=value ...]

CHECKPOINT is a step of run.dir, latest, best, initial (the model as the run starts), or a directory of a step. What is
evaluated, and how, is the section `evaluation`. On several hosts every one runs the same command; on one machine
scripts/local_hosts.py --command "python scripts/eval.py" starts them.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tpu_grpo.commands.train import joined_hosts, prepare, split_words
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.errors import TpuGrpoError, say


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        return _evaluate(load_config(*split_words(options.words)), options.checkpoint)
    except TpuGrpoError as error:
        say(error)
        return error.exit_code


def _evaluate(config: RunConfig, which: str) -> int:
    prepare(config)
    with joined_hosts(config) as (hosts, watch):
        from tpu_grpo.commands.evaluate import evaluate_checkpoint

        chosen, evaluation = evaluate_checkpoint(config, which, hosts, watch)
        if hosts.is_first:
            table = Table("", "reward", "mean", "95 % interval", "problems", title=f"{config.run.name}, {chosen.name}")
            for mode, found in evaluation.estimates.items():
                for name, e in found.items():
                    table.add_row(mode, name, f"{e.value:.4f}", f"{e.low:.4f} to {e.high:.4f}", str(e.problems))
            console = Console(highlight=False)
            console.print(table)
            for mode, tokens in evaluation.tokens.items():
                console.print(f"{mode}: {tokens:.1f} tokens, {evaluation.truncated[mode]:.1%} cut")
            console.print(f"samples: {config.run_dir}/evaluations/{chosen.name}.jsonl")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [CONFIG.yaml] ..."
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help="the config, and settings")
    parser.add_argument("--checkpoint", required=True, help="a step, latest, best, initial, or a directory")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
