"""This is the command line of ``scripts/sample.py``: it parses, calls, prints and returns an exit code.

Nothing that imports jax is imported before ``prepare`` has chosen jax's platform.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tpu_grpo.cli.naming import named_models
from tpu_grpo.cli.starting import exit_code_of, prepare
from tpu_grpo.config import parse_layers
from tpu_grpo.records.errors import ConfigError

ABOUT = """Lets a model answer prompts, or talk: the policy of a run's checkpoint, an export, or any other model.

MODEL is the directory of a run (its newest checkpoint; RUN@best, RUN@40 and RUN@initial name others), what
scripts/export.py wrote, another Hugging Face checkpoint directory, or builtin:addition. Prompts are written by the
run's template and answered with its sampling settings. A model without a run takes those of the first one that has
some. Without a prompt it is a chat; where nobody types, every line of stdin is a turn."""
USAGE = """python scripts/sample.py MODEL ["prompt" ...] [--with MODEL ...] [--n 4] [--rewards] [section.key=value ...]
       python scripts/sample.py RUN --data [FILE] --rows 0,2-4 [--rewards]"""
FROM_THE_RUN = "the run's"


def _range(kind: Callable[[str], float], low: float, high: float | None = None) -> Callable[[str], float]:
    """Make what reads a number of an option, and refuses one that is out of range."""

    def number(text: str) -> float:
        value = kind(text)
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {text}")
        return value

    return number


_COUNT = _range(int, 1)
_SAMPLING = {
    "temperature": _range(float, 0, 100),
    "top-p": _range(float, 1e-6, 1),
    "top-k": _range(int, 0),
    "min-p": _range(float, 0, 1),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        return exit_code_of(lambda: _sample(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="the model that answers")
    parser.add_argument("words", nargs="*", metavar="prompt", help="prompts; section.key=value changes a setting")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="MODEL", help="another model")
    parser.add_argument("--n", type=_COUNT, default=1, help="answers to each prompt")
    for name, kind in _SAMPLING.items():
        parser.add_argument(f"--{name}", type=kind, help=f"{FROM_THE_RUN} unless it is given")
    parser.add_argument("--max-new-tokens", type=_COUNT, help=f"the longest answer; {FROM_THE_RUN} unless it is given")
    parser.add_argument("--seed", type=_range(int, 0, 2**32 - 1), help=f"{FROM_THE_RUN} unless it is given")
    parser.add_argument("--context", type=_COUNT, help="the most tokens of a conversation and its answer")
    parser.add_argument("--rewards", action="store_true", help="score answers by the run's rewards")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=VALUE", help="a column of the prompts")
    parser.add_argument("--data", nargs="?", const="", metavar="FILE", help="take prompts from the run's data, or FILE")
    parser.add_argument("--rows", default="0", help="which records of --data, from 0: 0,2-4")
    return parser


def _sample(options: argparse.Namespace) -> None:
    prompts, settings = _divided(options.words)
    models = named_models([options.model, *options.others], settings)
    columns, rows = _columns(options.column), _rows(options.rows)
    if options.data is not None and prompts:
        raise ConfigError(f"prompts come from --data or from the command line, got --data and {prompts[0]!r}; drop one")
    for model in models:
        if model.config.environment.is_on:
            print(
                f"note: {model.name} had conversations with an environment, which answers nothing here: its tools are "
                f"not shown; python scripts/environment.py {model.name} --model plays it",
                file=sys.stderr,
            )
    prepare(models[0].config)
    from tpu_grpo.cli.talking import answer_prompts, answer_records, talk
    from tpu_grpo.run.answering import Asked

    names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed", "context")
    asked = Asked(samples=options.n, **{name: getattr(options, name) for name in names})
    if options.data is not None:
        answer_records(models, asked, options.data, rows, rewards=options.rewards)
    elif prompts:
        answer_prompts(models, asked, prompts, columns, rewards=options.rewards)
    else:
        talk(models, asked, columns, rewards=options.rewards)


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell prompts from settings: a setting has no blank before its equals sign, and a dot."""
    settings = [word for word in words if _is_setting(word)]
    return [word for word in words if word not in settings], settings


def _is_setting(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and "." in name and name.replace(".", "").replace("_", "").isalnum() and name[0].isalpha()


def _columns(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"--column must read name=value, got {word!r}; example: --column answer=85")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    """Read a list or an object as JSON, and anything else as text."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--column must give a text, or JSON after [ or {{, got {text!r} ({error}); mend it"
        ) from None


def _rows(text: str) -> tuple[int, ...]:
    try:
        return parse_layers(text)
    except ValueError:
        raise ConfigError(f"--rows must name records like 0,2-4, got {text!r}; they are counted from 0") from None
