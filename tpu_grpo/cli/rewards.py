"""The command line of ``scripts/rewards.py``: scores the completions in a file with the rewards of a config."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_grpo.cli.starting import command_parser, exit_code_of
from tpu_grpo.config import load_config
from tpu_grpo.hosts import choose_platform
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.short_texts import shortened
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, Scores
from tpu_grpo.records.untrusted_input import parse_json, read_file
from tpu_grpo.rewards import open_rewards

ABOUT = """Scores completions that are there already with the rewards of a config, without a model.

A line of the file is {"completion": "...", "prompt": "...", and the columns that the rewards need}, or holds a group as
"completions": [...]. The prompt is a text, or a list of messages. Prints each row's rewards and their total. A reward
that fails ends the command, which names the row, unless its on_error says otherwise."""
USAGE = "python scripts/rewards.py CONFIG.yaml --completions file.jsonl [section.key=value ...]"
_RESERVED_KEYS = ("prompt", "completion", "completions", "completion_ids")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0, or 2 for input that cannot be scored."""
    parser = command_parser(USAGE, ABOUT)
    parser.add_argument("config", help="the config whose rewards are tried")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument("--completions", type=Path, required=True, help="a .jsonl file")
    options = parser.parse_intermixed_args(arguments)
    choose_platform()  # the user's rewards may import jax
    return exit_code_of(lambda: _score(options))


def _score(options: argparse.Namespace) -> None:
    config, rollout = load_config(options.config, options.overrides), read_completions(options.completions)
    columns = set.intersection(*(set(prompt.columns) for prompt in rollout.batch.prompts))
    with open_rewards(config.rewards, sorted(columns), config.run.max_steps) as rewards:
        scores = rewards.score(rollout)
    Console().print(scores_table(rollout.texts, scores))


def scores_table(texts: Sequence[str], scores: Scores) -> Table:
    """Return a table of each completion's rewards and total, and their means; "-" marks what does not apply."""
    columns = {**scores.by_name, "total": np.where(scores.scored, scores.total, np.nan)}
    table = Table("row", *columns, "completion", show_footer=True)
    for row, text in enumerate(texts):
        short = Text(shortened(" ".join(text.split()), 30, 30, " ... "))
        table.add_row(str(row), *(_number(values[row]) for values in columns.values()), short)
    table.columns[0].footer = "mean"
    for column, values in zip(table.columns[1:-1], columns.values(), strict=True):
        known = values[~np.isnan(values)]
        column.footer = _number(known.mean() if len(known) else np.nan)
    return table


def read_completions(path: Path) -> Rollout:
    """Read the completions of a file as a rollout, a prompt per line. Raises DataError."""
    try:
        lines = read_file(path, 2**32).decode().split("\n")  # as a text may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"completions must be readable from {path}, got {type(error).__name__}; correct the path"
        ) from error
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise DataError(f'{path} must hold a completion per line, got none; write e.g. {{"completion": "..."}}')
    groups = [r["completions"] if "completions" in r else [r["completion"]] for r in records]
    if len({len(group) for group in groups}) != 1:
        raise DataError(f"{path}: every line must hold as many completions, got {sorted({len(g) for g in groups})}")
    prompts = [_prompt(r) for r in records]
    ids = [r.get("completion_ids") for r in records]
    completions = [_completion(i, text) for i, group in zip(ids, groups, strict=True) for text in group]
    texts = tuple(text for group in groups for text in group)
    return Rollout(PromptBatch(0, tuple(prompts)), len(groups[0]), tuple(completions), texts, seconds=0.0)


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} must be one JSON object per line, got {line[:60]!r}") from error
    given = record.get("completions", [record.get("completion")]) if isinstance(record, dict) else None
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise DataError(f"{path}:{number} must hold completion, a text, or completions, a list of texts; add it")
    prompt = record.get("prompt", "")
    if not isinstance(prompt, str) and not (prompt and isinstance(prompt, list) and all(map(_is_message, prompt))):
        raise DataError(
            f"{path}:{number}: prompt must be a text or a list of messages {{role, content}}, got {prompt!r}"
        )
    return record


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _prompt(record: dict[str, Any]) -> Prompt:
    """Make a prompt from a text, or from messages, which are joined by newlines without a chat template."""
    columns = {k: v for k, v in record.items() if k not in _RESERVED_KEYS}
    given = record.get("prompt", "")
    if isinstance(given, str):
        return Prompt(given, (), columns)
    return Prompt("\n".join(f"{m['role']}: {m['content']}" for m in given), (), columns, messages=given)


def _completion(ids: Any, text: str) -> Completion:
    """Make a completion from its text and token ids; if ``ids`` is None, make up one token per word."""
    tokens = np.asarray(ids if ids is not None else range(len(text.split())), np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), finish_reason="stop", cached_tokens=0)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:g}"
