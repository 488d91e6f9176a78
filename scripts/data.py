"""Look at the data of a config, without a model.

    python scripts/data.py [CONFIG.yaml] [--preview 5] [--step 1] [--evaluation] [section.key=value ...]

Shows how many prompts there are, how long they are, how many were dropped as too long, and the first ones as the model
will see them: the text, the tokens, and the columns that the rewards get.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.commands.train import prepare, split_words
from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.errors import TpuGrpoError, say


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(*split_words(options.words))
        show(config, Console(highlight=False), options)
    except TpuGrpoError as error:
        say(error)
        return error.exit_code
    return 0


def show(config: RunConfig, console: Console, options: argparse.Namespace) -> None:
    """Print the tables and the prompts."""
    prepare(config)
    from tpu_grpo.commands.data import Lengths, open_preview, shown_value

    preview = open_preview(config)
    table = Table("source", "prompts", "dropped", "weight", "shortest", "median", "longest", title="Prompts, in tokens")
    rows = [(p.name, p.rendered.prompts, str(p.rendered.dropped), f"{p.weight:g}") for p in preview.stream.parts]
    if preview.held_out:
        rows.append(("held out", preview.held_out, "", ""))
    for name, prompts, dropped, weight in rows:
        lengths = Lengths.of(prompts)
        shown = (lengths.shortest, lengths.median, lengths.longest)
        table.add_row(name, str(len(prompts)), dropped, weight, *map(str, shown))
    console.print(table)
    chosen = preview.held_out if options.evaluation else preview.first(options.preview, step=options.step)
    for number, prompt in enumerate(list(chosen)[: options.preview], start=1):
        console.rule(f"prompt {number}: {len(prompt.token_ids)} tokens")
        console.print(Text(prompt.text))
        console.print(_tokens(preview.tokens(prompt)))
        console.print(Text("\n".join(f"{name}: {shown_value(value)}" for name, value in prompt.columns.items())))


def _tokens(tokens: Sequence[tuple[int, str]]) -> Text:
    """Each token's text in quotes after its id, dimmed: 151644'<|im_start|>' 872'user' 198'\\n'."""
    shown = Text()
    for token, text in tokens:
        shown.append(str(token), style="dim").append(f"{text!r} ")
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [CONFIG.yaml] ..."
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help="the config, and settings")
    parser.add_argument("--preview", type=int, default=5, metavar="N", help="prompts to show (default: 5)")
    parser.add_argument("--step", type=int, default=1, help="the step whose prompts come first (default: 1)")
    parser.add_argument("--evaluation", action="store_true", help="show the held-out prompts instead")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
