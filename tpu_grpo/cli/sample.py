"""The command line of ``scripts/sample.py``: lets a model answer prompts, and shows answers and rewards."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tpu_grpo.cli.naming import NamedModel, named_model
from tpu_grpo.cli.starting import command_parser, exit_code_of, prepare
from tpu_grpo.config import parse_layers
from tpu_grpo.records.errors import ConfigError, without_controls
from tpu_grpo.records.untrusted_input import parse_json

if TYPE_CHECKING:
    from tpu_grpo.records.stages import Completion, Scores

ABOUT = """Lets a model answer prompts: the policy of a run's checkpoint, an export, or any other model.

MODEL is the directory of a run (its newest checkpoint; RUN@best, RUN@40 and RUN@initial name others), what
scripts/export.py wrote, another Hugging Face checkpoint directory, or builtin:addition. Prompts are written by the
run's template and answered with its sampling settings; a model without a run takes the defaults. To chat with a
model, serve it (scripts/serve.py)."""
USAGE = """python scripts/sample.py MODEL "prompt" ... [--n 4] [--rewards] [section.key=value ...]
       python scripts/sample.py RUN --data [FILE] --rows 0,2-4 [--rewards]"""
AS_IN_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_code_of(lambda: _sample(options))


def _parser() -> argparse.ArgumentParser:
    def number(kind: Callable[[str], float], low: float, high: float | None = None) -> Callable[[str], float]:
        """Return a function that parses an option's number, and refuses numbers that are out of range."""

        def read(text: str) -> float:
            value = kind(text)
            if value < low or (high is not None and value > high):
                limit = f"at least {low}" if high is None else f"from {low} to {high}"
                raise argparse.ArgumentTypeError(f"must be {limit}, got {text}")
            return value

        read.__name__ = "number"  # argparse shows this name if the text is not a number
        return read

    unless = "the run's unless it is given"
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("model", metavar="MODEL", help="the model that answers")
    parser.add_argument("words", nargs="*", metavar="prompt", help="prompts; section.key=value changes a setting")
    parser.add_argument("--n", type=number(int, 1), default=1, help="answers to each prompt")
    parser.add_argument("--temperature", type=number(float, 0, 100), help=unless)
    parser.add_argument("--top-p", type=number(float, 1e-6, 1), help=unless)
    parser.add_argument("--top-k", type=number(int, 0), help=unless)
    parser.add_argument("--min-p", type=number(float, 0, 1), help=unless)
    parser.add_argument("--max-new-tokens", type=number(int, 1), help=f"the longest answer; {unless}")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), help=unless)
    parser.add_argument("--context", type=number(int, 1), help="the most tokens of a prompt and its answer")
    parser.add_argument("--rewards", action="store_true", help="score answers by the run's rewards")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=VALUE", help="a column of the prompts")
    parser.add_argument("--data", nargs="?", const="", metavar="FILE", help="take prompts from the run's data, or FILE")
    parser.add_argument("--rows", default="0", help="which records of --data, from 0: 0,2-4")
    return parser


def _sample(options: argparse.Namespace) -> None:
    settings = [word for word in options.words if _is_setting(word)]
    texts = [word for word in options.words if word not in settings]
    model = named_model(options.model, settings)
    columns = dict(map(_column, options.column))
    try:
        rows = parse_layers(options.rows)
    except ValueError:
        raise ConfigError(
            f"--rows must name records like 0,2-4, got {options.rows!r}; they are counted from 0"
        ) from None
    if options.data is not None and texts:
        raise ConfigError(f"prompts come from --data or from the command line, got --data and {texts[0]!r}; drop one")
    if options.data is None and not texts:
        raise ConfigError(
            f"there must be a prompt, or --data, got neither; name one, or serve the model to chat with it: "
            f"`python scripts/serve.py {model.name}`"
        )
    if model.config.environment.is_on:
        print(
            f"note: {model.name} had conversations with an environment, which answers nothing here: its tools are not "
            f"shown; python scripts/environment.py {model.name} --model plays it",
            file=sys.stderr,
        )
    prepare(needs_hub=model.config.needs_hub)
    from tpu_grpo.serving.served_policy import ServedPolicy

    given = {name: getattr(options, name) for name in AS_IN_THE_RUN if getattr(options, name) is not None}
    speaker = ServedPolicy(model.config, model.which, samples=options.n, context=options.context, **given)
    with closing(speaker):
        if options.data is None:
            records = [speaker.record(text, columns) for text in texts]
        else:
            records = _records(model, options.data, rows)
        prompts = [speaker.prompt(record) for record in records]
        print(f"loading {model.name}{model.config.rollout.rounding_text}", file=sys.stderr)
        speaker.start(prompts)
        for turn, prompt in enumerate(prompts):
            if len(prompts) > 1:
                _write(f"=== {' '.join(prompt.asked.split())}\n")
            completions = speaker.answer(prompt, turn)
            scores = speaker.score(prompt, completions) if options.rewards else None
            _write(answers_shown(completions, [speaker.text(each) for each in completions], scores))


def answers_shown(completions: "Sequence[Completion]", texts: Sequence[str], scores: "Scores | None" = None) -> str:
    """Return the answers as lines, numbered if there are several; then a line per answer with its rewards by name, in
    which "-" marks a reward that does not apply."""
    heads = [f"[{number}] " if len(texts) > 1 else "" for number in range(1, len(texts) + 1)]
    lines = []
    for head, completion, text in zip(heads, completions, texts, strict=True):
        cut = "" if completion.finish_reason == "stop" else f" [cut after {len(completion.token_ids)} tokens]"
        lines.append(f"{head}{text}{cut}\n")
    if scores is None:
        return "".join(lines)
    for row, head in enumerate(heads):
        values = [(name, float(values[row])) for name, values in scores.by_name.items()]
        shown = [f"{name} {'-' if math.isnan(value) else f'{value:g}'}" for name, value in values]
        total = f"{float(scores.total[row]):g}" if scores.scored[row] else "-"
        lines.append(f"{head}rewards: {', '.join(shown)}; total {total}\n")
    return "".join(lines)


def _records(model: NamedModel, file: str, rows: Sequence[int]) -> list[Any]:
    """Read records of the model's data, or of another file with the same data settings."""
    from tpu_grpo.data.sources import Source, read_records

    data = model.config.data
    if not file and data.sources:
        raise ConfigError("--data must name a file, because the run's data is a mixture of several; name one of them")
    found = read_records(Source(file or data.path, data))
    if rows[-1] >= len(found):
        raise ConfigError(f"--rows must name records of {file or data.path}, which has {len(found)}, got {rows[-1]}")
    return [found[row] for row in rows]


def _is_setting(word: str) -> bool:
    """Return whether a word is a setting, not a prompt: its name has a dot, and no blank before the equals sign."""
    name, equals, _ = word.partition("=")
    return bool(equals) and "." in name and name.replace(".", "").replace("_", "").isalnum() and name[0].isalpha()


def _column(word: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a list or an object is read as JSON, any other value as text."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"--column must read name=value, got {word!r}; example: --column answer=85")
    if not value.startswith(("[", "{")):
        return name, value
    try:
        return name, parse_json(value)
    except ValueError as error:
        raise ConfigError(
            f"--column must give a text, or JSON after [ or {{, got {value!r} ({error}); mend it"
        ) from None


def _write(text: str) -> None:
    """Write and flush a text; on a terminal, control characters are shown as escapes."""
    if sys.stdout.isatty():
        text = without_controls(text)
    print(text, end="", flush=True)
