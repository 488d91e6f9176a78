"""The rows that rewards are called for, as columns: texts, data columns and extras."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.short_texts import SHORT_REPR
from tpu_grpo.records.stages import Conversation, Rollout
from tpu_grpo.rewards.protocol import OF_ROWS, TEXT_ARGUMENTS
from tpu_grpo.rewards.reward_call import Call, RewardBatch
from tpu_grpo.rewards.shipped.correctness import as_read


@dataclass(frozen=True)
class Table:
    """A rollout's rows as columns: texts, token ids, and the columns of the data that rewards need."""

    columns: dict[str, Sequence[Any]]
    """Name -> the column's values, one per row: [B]."""
    messages: dict[str, Sequence[Conversation | str]]
    """Prompts and completions for rewards with ``messages: true``; a completion without an environment stays a text."""
    step: int
    group_size: int
    numbers: Sequence[int]
    """Each row's number in the whole rollout, for error messages."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """The rows whose environment failed, and how. No reward is called for these rows."""
    rendered: Sequence[str] = ()
    """Each row's rendered prompt."""

    @property
    def size(self) -> int:
        """Return the number of rows, B."""
        return len(self.columns["completions"])

    def batch(self, call: Call, rows: Sequence[int]) -> RewardBatch:
        """Make a batch of some rows for a reward, with texts as `Call.thinking` says; messages have no thinking."""
        columns = self.columns | self.messages if call.messages else self.columns
        found = {n: [columns[n][row] for row in rows] for n in call.batch_columns}
        if call.thinking != "kept":
            pairs, names = zip(found["completions"], rows, strict=True), str(dict(call.options))
            found["completions"] = [
                as_read(text, self.rendered[row], call.thinking, names) if isinstance(text, str) else text
                for text, row in pairs
            ]
        return RewardBatch(found, self.step, len(rows))

    def shown(self, row: int) -> str:
        """Describe a row for an error message, by its number and its shortened texts."""
        prompt, completion = (SHORT_REPR.repr(self.columns[name][row]) for name in TEXT_ARGUMENTS)
        return f"row {self.numbers[row]} (prompt {prompt}, completion {completion})"


def build_table(rollout: Rollout, calls: Iterable[Call], *, numbers: Sequence[int] | None = None) -> Table:
    """Collect the texts, data columns and extras (OF_ROWS) that calls of rewards need.

    A plain completion is passed as its text. A conversation with an environment is passed as the policy's last turn, or
    as all messages for ``messages: true``. If the rollout is part of a larger one, ``numbers`` are its rows' numbers
    there, for error messages. Raises RewardError for a row without a column or environment that a reward needs.
    """
    rows, episodes = rollout.row_prompts, [completion.episode for completion in rollout.completions]
    pairs = list(zip(episodes, rollout.texts, strict=True))
    columns: dict[str, Sequence[Any]] = {
        "prompts": [p.asked for p in rows],
        "completions": [text if episode is None else episode.last_words for episode, text in pairs],
    }
    messages: dict[str, Sequence[Any]] = {
        "prompts": [p.conversation for p in rows],
        "completions": [text if e is None else [dict(message) for message in e.messages] for e, text in pairs],
    }
    failures = {row: e.failure for row, e in enumerate(episodes) if e is not None and e.failure is not None}
    numbers = range(len(rows)) if numbers is None else numbers
    rendered = [p.text for p in rows]
    table = Table(columns, messages, rollout.batch.step, rollout.group_size, numbers, failures, rendered)
    for name in sorted({name for call in calls for name in call.batch_columns} - {*TEXT_ARGUMENTS}):
        if name in OF_ROWS and not (rows and name in rows[0].columns):
            columns[name] = _extra_column(name, rollout)
            continue
        lacking = next((i for i, p in enumerate(rows) if name not in p.columns), None)
        if lacking is not None:
            raise RewardError(
                f"rewards were opened for data with the column {name!r}, which {table.shown(lacking)} lacks; "
                f"it has {sorted(rows[lacking].columns)}. Add the column to the data"
            )
        columns[name] = [p.columns[name] for p in rows]
    return table


def _extra_column(name: str, rollout: Rollout) -> list[Any]:
    """Return the values of the argument ``name``, one of OF_ROWS, for all rows."""
    if name == "completion_ids":
        return [completion.token_ids.tolist() for completion in rollout.completions]
    if name == "rendered_prompts":
        return [prompt.text for prompt in rollout.row_prompts]
    episodes = [completion.episode for completion in rollout.completions if completion.episode is not None]
    if len(episodes) < len(rollout.completions):
        raise RewardError(
            f"a reward that takes {name} needs conversations with environments, got plain completions; set "
            "environment.name, or take another reward"
        )
    return [episode.kept if name == "environments" else episode.reward for episode in episodes]
