"""A reward gets a rollout's rows in batches, and answers with values and problems; these are the records of both.

table = build_table(rollout, ["completions", "answer"])             # all columns that the rewards need, each [B]
batches = split_rows(range(table.size), group_size, workers, call)  # the rows of each batch: [[0, 1], [2, 3]]
batch = table.batch(["completions", "answer"], batches[0])          # goes to the reward's process or thread
answer = Answer([1.0, nan], [Problem("raised", "...", row=1)])      # comes back
"""

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Conversation, Rollout
from tpu_grpo.rewards.conversations import failure_of, last_words, of_environments, spoken
from tpu_grpo.rewards.protocol import OF_ROWS, TEXT_ARGUMENTS

SHORT_REPR = reprlib.Repr(maxstring=120, maxother=120)
"""It shortens the texts and values that error messages show."""
_BATCHES_PER_WORKER = 4
"""A worker gets several batches, so that one slow batch does not keep it busy while the others are done."""


@dataclass(frozen=True)
class Call:
    """A Call says how a reward is found and called; worker processes are sent theirs."""

    name: str
    """The metrics show this name."""
    source: str
    """The config gives this name, by which the reward is found."""
    passed_options: Mapping[str, Any] = field(default_factory=dict)
    """These options are passed by name, to the function or to a class's constructor."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """A function that declares ``options`` gets all of them."""
    extras: tuple[str, ...] = ()
    """The function declares these of protocol.EXTRAS."""
    concurrency: int | None = None
    """An async function of one row runs for this many rows at a time; it is None for a function of a batch."""
    is_async: bool = False
    messages: bool = False
    """If set, prompts and completions are passed as lists of messages."""
    per_token: bool = False
    """If set, the function gives a number per token, see `per_token`."""
    verl: bool = False
    """If set, a row's arguments have verl's names, see signatures.py."""
    max_steps: int = 0
    """The steps of the run, for ``trainer_state``."""
    find_failing_row: bool = True
    """If set, the row that makes a reward of a batch raise is looked for."""


@dataclass(frozen=True)
class RewardBatch:
    """A RewardBatch holds the rows that a reward is asked about at once."""

    columns: Mapping[str, Sequence[Any]]
    """It holds the reward's arguments by name, each [size], and those of protocol.OF_ROWS that it declares."""
    step: int
    size: int
    """It counts the rows."""


@dataclass(frozen=True)
class Problem:
    """A Problem is what a reward did instead of giving a number."""

    kind: Literal["raised", "late", "died", "wrong"]
    text: str
    """It says what happened, in words that follow the reward's name."""
    row: int | None = None
    """It concerns this row of the batch, from 0, or the whole batch when None."""
    failing_row: int | None = None
    """This row was found to raise on its own, where the whole batch is concerned."""
    trace: str = ""
    """It holds the text of the traceback, where there is one."""


@dataclass(frozen=True)
class Answer:
    """An Answer is what a reward says about a batch."""

    values: list[float]
    """It has one value per row, which is NaN where the reward does not apply or had a problem."""
    problems: list[Problem] = field(default_factory=list)
    logged: dict[str, list[float]] = field(default_factory=dict)
    """The reward passed these values to log_metric, by name."""
    of_tokens: list[Float[np.ndarray, "_"]] = field(default_factory=list)
    """A reward of single tokens gave these per row, see tokens.py; it is empty of any other."""


def failed_answer(size: int, problem: Problem) -> Answer:
    """Make the answer to a batch of which no row has a value."""
    return Answer([math.nan] * size, [problem])


# --- what a reward returned ------------------------------------------------------------------------------------------


def check_values(values: Any, expected: int) -> tuple[list[float], list[Problem]]:
    """Turn what a reward returned into ``expected`` numbers, NaN for None, and the problems that were found."""
    found = length_of(values)
    if found != expected:
        got = f"a {type(values).__name__}" if found is None else f"{found} values"
        text = f"must return a list of one number (or None) per completion, {expected} here, got {got}"
        return [math.nan] * expected, [Problem("wrong", text)]
    numbers, problems = [], []
    for row, value in enumerate(values):
        number = number_or_none(value)
        if number is None:
            marked = "" if length_of(value) is None else "; marked with @per_token, a number per token"
            wanted = f"must return finite numbers (or None where it does not apply{marked})"
            text = f"{wanted}, got {SHORT_REPR.repr(value)}"
            problems.append(Problem("wrong", text, row))
        numbers.append(math.nan if number is None else number)
    return numbers, problems


def length_of(values: Any) -> int | None:
    """Return the length of a list, tuple or array, None for anything else: generators, texts, sets, mappings."""
    if isinstance(values, str | bytes | set | frozenset | Mapping) or not hasattr(values, "__len__"):
        return None
    if getattr(values, "shape", (0,)) == ():
        return None
    return len(values)


def number_or_none(value: Any) -> float | None:
    """Return a finite number as a float, NaN for None, and None for anything else."""
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of numpy or jax
    try:
        number = float(value) if isinstance(value, Real) else math.inf
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else None


# --- what a reward is asked about ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A Table holds a rollout's rows as columns: the texts, their token ids, and what rewards need of the data."""

    columns: dict[str, Sequence[Any]]
    """Each column, by its name, has one value per row: [B]."""
    step: int
    group_size: int
    numbers: Sequence[int]
    """Each row's number in the whole rollout, for error messages."""
    conversations: Sequence[Conversation]
    """The prompts as messages, which a reward may ask for in place of the texts."""
    spoken: Sequence[Any] = ()
    """What came of each prompt as messages, or as a text where it is a single one."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """The rows whose environment failed; no reward is asked about them."""

    @property
    def size(self) -> int:
        """Return the number of rows, B."""
        return len(self.columns["completions"])

    def batch(self, names: Sequence[str], rows: Sequence[int], *, messages: bool = False) -> RewardBatch:
        """Make a batch of some columns of some rows; with ``messages`` the prompts are conversations."""
        texts = {"prompts": self.conversations, "completions": self.spoken} if messages else {}
        columns = self.columns | texts
        return RewardBatch({name: [columns[name][row] for row in rows] for name in names}, self.step, len(rows))


def build_table(rollout: Rollout, names: Collection[str], *, numbers: Sequence[int] | None = None) -> Table:
    """Collect the texts and the columns called ``names``, of the data or of OF_ROWS.

    ``numbers`` are those that messages give the rows, where the rollout is part of a larger one.

    Raises:
        RewardError: for a row that lacks one of the columns.
    """
    rows = rollout.row_prompts
    said = list(zip(rollout.completions, rollout.texts, strict=True))
    columns: dict[str, Sequence[Any]] = {
        "prompts": [p.asked for p in rows],
        "completions": [last_words(completion, text) for completion, text in said],
    }
    wanted = [name for name in OF_ROWS if name in names and not (rows and name in rows[0].columns)]
    if "completion_ids" in wanted:
        columns["completion_ids"] = [c.token_ids.tolist() for c in rollout.completions]
    if "rendered_prompts" in wanted:
        columns["rendered_prompts"] = [p.text for p in rows]
    for name in ("environments", "environment_rewards"):
        if name in wanted:
            columns[name] = of_environments(name, rollout.completions)
    table = Table(
        columns,
        rollout.batch.step,
        rollout.group_size,
        range(len(rows)) if numbers is None else numbers,
        [p.conversation for p in rows],
        [spoken(completion, text) for completion, text in said],
        {row: f for row, c in enumerate(rollout.completions) if (f := failure_of(c)) is not None},
    )
    for name in sorted(set(names) - {*TEXT_ARGUMENTS, *wanted}):
        lacking = next((i for i, p in enumerate(rows) if name not in p.columns), None)
        if lacking is not None:
            raise RewardError(
                f"rewards were opened for data with the column {name!r}, which {describe_row(lacking, table)} lacks; "
                f"it has {sorted(rows[lacking].columns)}. Add the column to the data"
            )
        columns[name] = [p.columns[name] for p in rows]
    return table


def split_rows(rows: Sequence[int], group_size: int, workers: int, call: Call) -> list[list[int]]:
    """Split rows into batches: one batch for one worker, otherwise a few batches per worker.

    A batch is made of whole groups, unless the reward is a function of one row. With two workers and groups of 2, rows
    0 to 7 become ``[[0, 1], [2, 3], [4, 5], [6, 7]]``. Async functions of one row get one batch per worker, since a
    worker awaits all rows of a batch together.
    """
    keys = [row // group_size for row in rows] if call.concurrency is None else list(range(len(rows)))
    distinct = list(dict.fromkeys(keys))
    each = max(1, math.ceil(len(distinct) / most_batches(workers, call)))
    batch_of = {key: i // each for i, key in enumerate(distinct)}
    batches: list[list[int]] = [[] for _ in range(math.ceil(len(distinct) / each))]
    for row, key in zip(rows, keys, strict=True):
        batches[batch_of[key]].append(row)
    return batches


def most_batches(workers: int, call: Call) -> int:
    """Return how many batches the rows of a step are split into at most."""
    if workers <= 1 and call.concurrency is None:
        return 1
    return max(1, workers) * (1 if call.is_async else _BATCHES_PER_WORKER)


def split_group(rows: Sequence[int], workers: int, call: Call) -> list[list[int]]:
    """Split the rows of one group: a synchronous function of one row gets a batch per worker, any other a single one.

    With two workers, rows 0 to 4 become ``[[0, 1, 2], [3, 4]]``.
    """
    batches = 1 if call.concurrency is None or call.is_async else max(1, min(workers, len(rows)))
    each = max(1, math.ceil(len(rows) / batches))
    return [list(rows[start : start + each]) for start in range(0, len(rows), each)]


def describe_row(row: int, table: Table) -> str:
    """Name a row in an error message by its number and the beginnings and ends of its texts."""
    prompt, completion = table.columns["prompts"][row], table.columns["completions"][row]
    return f"row {table.numbers[row]} (prompt {SHORT_REPR.repr(prompt)}, completion {SHORT_REPR.repr(completion)})"
