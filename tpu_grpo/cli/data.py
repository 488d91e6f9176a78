"""The command line of ``scripts/data.py``: shows the first prompts of a config as the model will see them."""

import argparse
from collections.abc import Iterator, Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.cli.starting import command_parser, config_from_words, exit_code_of, prepare
from tpu_grpo.records.short_texts import shortened

if TYPE_CHECKING:
    from tpu_grpo.data.stream import PromptStream
    from tpu_grpo.records.stages import Prompt

ABOUT = """Looks at the data of a config, without a model.

Shows how many prompts there are, how long they are, how many were dropped as too long, and the first ones as the model
will see them: the text, the tokens, and the columns that the rewards get."""
USAGE = "python scripts/data.py [CONFIG.yaml] [--preview 5] [--step 1] [--evaluation] [section.key=value ...]"
MEASURED = 10_000
"""Lengths are measured on at most this many prompts, because each must be tokenized."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = command_parser(USAGE, ABOUT, words="the config, and settings")
    parser.add_argument("--preview", type=int, default=5, metavar="N", help="prompts to show (default: 5)")
    parser.add_argument("--step", type=int, default=1, help="the step whose prompts come first (default: 1)")
    parser.add_argument("--evaluation", action="store_true", help="show the held-out prompts instead")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: show(Console(highlight=False), options))


def show(console: Console, options: argparse.Namespace) -> None:
    """Print the table of sources and the first prompts. Rewards are not opened, so the data may lack their columns.

    Raises:
        TpuGrpoError: for data, templates or a tokenizer that do not fit the config.
    """
    config = config_from_words(options.words)
    prepare(needs_hub=config.needs_hub)
    from tpu_grpo.data.stream import open_evaluation_prompts, open_prompts
    from tpu_grpo.run.conversations import load_environments, tools_of
    from tpu_grpo.run.inputs import check_model, open_tokenizer, read_model

    if (checkpoint := read_model(config.model)) is not None:
        check_model(config, checkpoint)
    tools = tools_of(load_environments(config.environment, config.every_reward))
    tokenizer = open_tokenizer(config.model, checkpoint)
    prompts = open_prompts(config.data, config.run.seed, tokenizer, tools)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer, tools) or ()
    console.print(_sources(prompts, held_out))
    chosen = held_out if options.evaluation else first(prompts, options.preview, step=options.step)
    for number, prompt in enumerate(list(chosen)[: options.preview], start=1):
        console.rule(f"prompt {number}: {len(prompt.token_ids)} tokens")
        console.print(Text(prompt.text))
        tokens = Text()  # each token's id and its text in quotes: 151644'<|im_start|>' 872'user' 198'\\n'
        for token in prompt.token_ids:
            tokens.append(str(token), style="dim").append(f"{tokenizer.decode([token])!r} ")
        console.print(tokens)
        console.print(Text("\n".join(f"{name}: {shown_value(value)}" for name, value in prompt.columns.items())))


def first(stream: "PromptStream", count: int, *, step: int = 1) -> "Iterator[Prompt]":
    """Yield ``count`` prompts in the order in which a run samples them, starting at ``step``."""
    while count > 0:
        prompts = stream.batch(step).prompts[:count]
        yield from prompts
        count, step = count - len(prompts), step + 1


def shown_value(value: Any) -> str:
    """Show a column's value on one line of at most 200 characters."""
    return shortened(repr(value), 197)


def lengths_of(prompts: "Sequence[Prompt]") -> list[int]:
    """Measure at most MEASURED prompts, spread evenly over all; returns their lengths in tokens, ascending."""
    count = min(len(prompts), MEASURED)
    chosen = prompts if count == len(prompts) else (prompts[n * len(prompts) // count] for n in range(count))
    return sorted(len(prompt.token_ids) for prompt in chosen)


def _sources(stream: "PromptStream", held_out: "Sequence[Prompt]") -> Table:
    table = Table("source", "prompts", "dropped", "weight", "shortest", "median", "longest", title="Prompts, in tokens")
    rows = [(p.name, p.rendered.prompts, str(p.rendered.dropped), f"{p.weight:g}") for p in stream.parts]
    if held_out:
        rows.append(("held out", held_out, "", ""))
    for name, prompts, dropped, weight in rows:
        lengths = lengths_of(prompts)
        shown = map(str, (lengths[0], median_high(lengths), lengths[-1]))
        table.add_row(name, str(len(prompts)), dropped, weight, *shown)
        if len(lengths) < len(prompts):
            table.caption = f"lengths of {len(lengths)} prompts, spread evenly"
    return table
