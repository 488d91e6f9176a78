"""The command line of ``scripts/data.py``: shows the first prompts of a config.

Nothing that imports jax is imported before ``prepare`` has chosen jax's platform.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.cli.starting import command_parser, config_from_words, exit_code_of, prepare
from tpu_grpo.config import RunConfig

if TYPE_CHECKING:
    from tpu_grpo.cli.preview import Preview

ABOUT = """Looks at the data of a config, without a model.

Shows how many prompts there are, how long they are, how many were dropped as too long, and the first ones as the model
will see them: the text, the tokens, and the columns that the rewards get."""
USAGE = "python scripts/data.py [CONFIG.yaml] [--preview 5] [--step 1] [--evaluation] [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT, words="the config, and settings")
    parser.add_argument("--preview", type=int, default=5, metavar="N", help="prompts to show (default: 5)")
    parser.add_argument("--step", type=int, default=1, help="the step whose prompts come first (default: 1)")
    parser.add_argument("--evaluation", action="store_true", help="show the held-out prompts instead")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: show(config_from_words(options.words), Console(highlight=False), options))


def show(config: RunConfig, console: Console, options: argparse.Namespace) -> None:
    """Print the table of sources and the first prompts.

    Raises:
        TpuGrpoError: for data, templates or a tokenizer that do not fit.
    """
    prepare(config)
    from tpu_grpo.cli.preview import open_preview, shown_value

    preview = open_preview(config)
    console.print(_sources(preview))
    chosen = preview.held_out if options.evaluation else preview.first(options.preview, step=options.step)
    for number, prompt in enumerate(list(chosen)[: options.preview], start=1):
        console.rule(f"prompt {number}: {len(prompt.token_ids)} tokens")
        console.print(Text(prompt.text))
        tokens = Text()  # each token's text in quotes after its id: 151644'<|im_start|>' 872'user' 198'\\n'
        for token, text in preview.tokens(prompt):
            tokens.append(str(token), style="dim").append(f"{text!r} ")
        console.print(tokens)
        console.print(Text("\n".join(f"{name}: {shown_value(value)}" for name, value in prompt.columns.items())))


def _sources(preview: "Preview") -> Table:
    from tpu_grpo.cli.preview import Lengths

    table = Table("source", "prompts", "dropped", "weight", "shortest", "median", "longest", title="Prompts, in tokens")
    rows = [(p.name, p.rendered.prompts, str(p.rendered.dropped), f"{p.weight:g}") for p in preview.stream.parts]
    if preview.held_out:
        rows.append(("held out", preview.held_out, "", ""))
    for name, prompts, dropped, weight in rows:
        lengths = Lengths.of(prompts)
        shown = (lengths.shortest, lengths.median, lengths.longest)
        table.add_row(name, str(len(prompts)), dropped, weight, *map(str, shown))
        if lengths.measured < len(prompts):
            table.caption = f"lengths of {lengths.measured} prompts, spread evenly"
    return table
