"""Scores completions of a file, without a model.

A line of the file is ``{"completion": ..., "prompt": ..., <columns>}``; a line for a group has a list ``completions``
in place of ``completion``. The prompt is a text, or a list of messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.outside import parse_json, read_file
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.reward_runner import RewardResult
from tpu_grpo.rewards.scoring import RewardSet, open_rewards

_RESERVED_KEYS = ("prompt", "completion", "completions", "completion_ids")


@dataclass(frozen=True)
class RowTiming:
    """The time that a reward took for a call with one row."""

    seconds: float
    reward: str
    row: int


@dataclass(frozen=True)
class Disagreement:
    """The rows that one of two rewards scores above 0 while the other does not."""

    first: str
    second: str
    rows: tuple[int, ...]
    """Both rewards apply to these rows, and they disagree."""
    comparable: int
    """The number of rows to which both rewards apply."""


@dataclass(frozen=True)
class Failure:
    """A problem of a reward."""

    reward: str
    rows: tuple[int, ...]
    text: str
    """What happened, where, and what to do about it."""


@dataclass(frozen=True)
class Trial:
    """The results of rewards for the completions of a file."""

    rollout: Rollout
    scores: Scores
    failures: tuple[Failure, ...]
    slowest: tuple[RowTiming, ...]
    disagreements: tuple[Disagreement, ...]


def try_rewards(
    specs: Sequence[RewardSpec], path: Path, *, step: int = 0, max_steps: int = 0, slowest: int = 5
) -> Trial:
    """Score the completions of a file; problems of rewards are returned as failures, not raised.

    Raises:
        DataError: for a file that cannot be read, or whose lines do not hold completions.
        RewardError: for a reward that cannot be loaded or set up.
    """
    rollout = read_completions(path, step)
    columns = set.intersection(*(set(p.columns) for p in rollout.batch.prompts))
    lenient = [spec.model_copy(update={"on_error": "skip"}) for spec in specs]
    with open_rewards(lenient, sorted(columns), max_steps) as rewards:
        scores, results = rewards.score_and_explain(rollout)
        several = any(len(rows) > 1 for result in results.values() for rows, _ in result.failures)
        alone = row_by_row(rewards, rollout) if slowest or several else []
    timed = [RowTiming(result.seconds, name, row) for row, found in enumerate(alone) for name, result in found.items()]
    ranked = sorted(timed, key=lambda t: -t.seconds)[:slowest]
    failures = [failure for name, result in results.items() for failure in _failures(name, result, alone)]
    return Trial(rollout, scores, tuple(failures), tuple(ranked), tuple(disagreements(scores)))


def _failures(name: str, result: RewardResult, alone: Sequence[Mapping[str, RewardResult]]) -> Iterator[Failure]:
    """Yield a reward's failures. A failure of several rows is replaced by those of the rows that also fail when they
    are called alone, if there are any."""
    for rows, text in result.failures:
        of_one = [Failure(name, *failure) for row in rows if len(rows) > 1 for failure in alone[row][name].failures]
        yield from of_one or [Failure(name, rows, text)]


def read_completions(path: Path, step: int = 0) -> Rollout:
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
    return Rollout(PromptBatch(step, tuple(prompts)), len(groups[0]), tuple(completions), texts, seconds=0.0)


def row_by_row(rewards: RewardSet, rollout: Rollout) -> list[dict[str, RewardResult]]:
    """Call every reward for every row alone; return for each row the results by the rewards' names."""
    found = []
    for row, prompt in enumerate(rollout.row_prompts):
        batch, own = PromptBatch(rollout.batch.step, (prompt,)), slice(row, row + 1)
        one = Rollout(batch, 1, rollout.completions[own], rollout.texts[own], seconds=0.0)
        found.append(rewards.score_and_explain(one, [row])[1])
    return found


def disagreements(scores: Scores) -> list[Disagreement]:
    """Find, for each pair of rewards, the rows that one scores above 0 and the other does not."""
    found = []
    for (first, a), (second, b) in combinations(scores.by_name.items(), 2):
        both = ~np.isnan(a) & ~np.isnan(b)
        rows = tuple(int(row) for row in np.flatnonzero(both & ((a > 0) != (b > 0))))
        if rows:
            found.append(Disagreement(first, second, rows, int(both.sum())))
    return found


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
