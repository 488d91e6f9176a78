"""Makes the tables of pages: evaluations, samples of some steps, and held-out prompts before and after training.

Every cell is a text, or a conversation turn by turn; numbers are aligned to the right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_grpo.observe.json_lines import Lines, interval_of, is_number, names_in, number_or_zero
from tpu_grpo.observe.sample_rows import called_tools, shown_turns, without_marks
from tpu_grpo.records.json_files import Record
from tpu_grpo.records.short_texts import shortened
from tpu_grpo.report.charts import evaluation_label, evaluation_lines, evaluation_names
from tpu_grpo.report.run_reader import Rows, RunRead, setting_of

HEAD_CHARACTERS, TAIL_CHARACTERS = 1400, 500
"""How many characters of a longer text are shown: of its beginning, and of its end."""
TURN_CHARACTERS = (500, 200)
"""How many characters of a turn's longer text are shown: of its beginning, and of its end."""
SHOWN_TURNS = 12
"""The most turns of a conversation that are shown: half of them its first, half its last."""
SHOWN_ROWS = 4
"""How many samples of a step are shown: half of them the best, half the worst."""
SHOWN_PROBLEMS = 6
ENDINGS = {
    "answered": "ended with its answer",
    "done": "ended by the environment",
    "turns": "cut at the most turns",
    "tokens": "cut at the longest length",
    "failed": "ended because the environment failed",
}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    label: str
    is_number: bool = False


@dataclass(frozen=True)
class Utterance:
    """A text in a conversation: a turn of the policy, an answer of the environment, or a remark."""

    text: str
    by: str = ""
    """The speaker; empty for the policy."""
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    note: str = ""
    utterances: Sequence[Utterance] = ()
    """A conversation in place of the text."""


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell for each column."""

    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def shorten(text: str, head: int = HEAD_CHARACTERS, tail: int = TAIL_CHARACTERS) -> str:
    """Cut the middle out of a long text, and say how much was cut."""
    return shortened(text, head, tail, f"\n… {len(text) - head - tail:,} characters left out …\n")


def decimal(value: Any, form: str = ".2f") -> str:
    """Format a number; a dash for any other value."""
    return format(value, form) if is_number(value) else "–"


def evaluation_table(run: RunRead) -> Table | None:
    """Return a table of the rewards' first, highest and last evaluation, with intervals; None without evaluations."""
    records = evaluation_lines(run)
    if not records:
        return None
    several = len(records) > 1
    heads = ["first", "highest", "last"] if several else [f"step {records[0]['step']:,}"]
    rows = []
    for name in evaluation_names(records):
        known = [record for record in records if is_number(record.get(name))]
        chosen = [known[0], max(known, key=lambda record: record[name]), known[-1]] if several else known
        rows.append([Cell(evaluation_label(name)), *(_value(record, name, say_step=several) for record in chosen)])
    columns = [Column("held out"), *(Column(head, is_number=True) for head in heads)]
    return Table("Evaluation", "With 95 % intervals.", columns, rows)


def _value(record: Record, name: str, *, say_step: bool) -> Cell:
    """Return a cell with an evaluated metric's value and, below it, the interval and (with ``say_step``) the step."""
    low, high = interval_of(record, name)
    notes = [f"{low:.3f} to {high:.3f}"] if low <= high else []
    notes += [f"step {record['step']:,}"] if say_step else []
    return Cell(decimal(record[name], ".3f"), ", ".join(notes))


def best_name(config: Mapping[str, Any], records: Lines) -> str:
    """Return the metric that evaluation.best names, or else the first evaluated metric; empty if there is none."""
    names = evaluation_names(records)
    chosen = f"evaluation/{setting_of(config, 'evaluation', 'best')}"
    return chosen if chosen in names else next(iter(names), "")


def step_table(rows: Rows) -> Table:
    """Return a table of the best and the worst of a step's rows; ``rows`` must not be empty."""
    different = {(row["prompt"], row["completion"]): row for row in rows}  # shows equal completions once
    ranked = sorted(different.values(), key=lambda row: -number_or_zero(row["reward"]))
    half = SHOWN_ROWS // 2
    shown = ranked if len(ranked) <= SHOWN_ROWS else [*ranked[:half], *ranked[-half:]]
    rewards = names_in(row["rewards"] for row in shown)
    total = ["total"] if len(rewards) > 1 else []
    gold = _gold_column(shown)
    cells = []
    for row in shown:
        values = [row["rewards"].get(name) for name in rewards] + [row["reward"] for _ in total]
        figures = [*map(decimal, values), decimal(row["advantage"], "+.2f"), f"{row['tokens']:,}"]
        texts = [_prompt(row), _completion(row), *(_gold(row) for _ in gold)]
        cells.append([*texts, *map(Cell, figures)])
    return Table(
        title=f"Samples of step {rows[0]['step']:,}",
        note="The best and the worst by reward." if len(rows) > len(shown) else "",
        columns=[
            *map(Column, ("prompt", "conversation" if any(map(_is_conversation, shown)) else "completion", *gold)),
            *(Column(name, is_number=True) for name in (*rewards, *total, "advantage", "tokens")),
        ],
        rows=cells,
    )


def held_out_table(evaluations: Sequence[tuple[int, Rows]], best: str) -> Table | None:
    """Return a table of held-out prompts with greedy completions of the first and the last (or only) evaluation.

    `_telling` chooses the prompts by the reward ``best``. Returns None without evaluations.
    """
    if not evaluations:
        return None
    before, after = evaluations[0], evaluations[-1]
    earlier = {row["problem"]: row for row in before[1]}
    pairs = [(earlier[row["problem"]], row) for row in after[1] if row["problem"] in earlier]
    names = names_in(row["rewards"] for _, row in pairs)
    reward = best if best in names else next(iter(names), "")
    chosen = _telling(pairs, reward)
    gold = _gold_column([row for _, row in chosen])
    texts = [f"step {step:,}" for step, _ in evaluations]
    kind = "conversation" if any(_is_conversation(row) for _, row in chosen) else "completion"
    cells = []
    for pair in chosen:
        prompt, shown = [_prompt(pair[1]), *(_gold(pair[1]) for _ in gold)], pair[-len(evaluations) :]
        values = [Cell(decimal(row["rewards"].get(reward))) for row in shown]
        cells.append([*prompt, *map(_completion, shown), *values])
    return Table(
        title="Held-out prompts",
        note="Greedy completions of the first and of the last evaluation." if len(texts) > 1 else "Greedy completions.",
        columns=[
            *map(Column, ("prompt", *gold, *(f"{kind}, {text}" for text in texts))),
            *(Column(f"{reward}, {text}", is_number=True) for text in texts),
        ],
        rows=cells,
    )


def _telling(pairs: Sequence[tuple[Record, Record]], reward: str) -> list[tuple[Record, Record]]:
    """Choose up to SHOWN_PROBLEMS prompts of four kinds: the reward rose, fell, stayed wrong (below 1), stayed right.

    Two prompts of each kind are chosen first, in this order of kinds, and then further prompts in the same order.
    """
    kinds: list[list[int]] = [[], [], [], []]
    for number, (before, after) in enumerate(pairs):
        change = number_or_zero(after["rewards"].get(reward)) - number_or_zero(before["rewards"].get(reward))
        wrong = number_or_zero(after["rewards"].get(reward)) < 1
        kinds[0 if change > 0 else 1 if change < 0 else 2 if wrong else 3].append(number)
    chosen = [number for kind in kinds for number in kind[:2]][:SHOWN_PROBLEMS]
    rest = [number for kind in kinds for number in kind[2:]]
    return [pairs[number] for number in sorted([*chosen, *rest[: SHOWN_PROBLEMS - len(chosen)]])]


def _prompt(row: Record) -> Cell:
    return Cell(shorten(without_marks(row["prompt"])))


def _gold_column(rows: Rows) -> list[str]:
    return ["right answer"] if any(row.get("gold") is not None for row in rows) else []


def _gold(row: Record) -> Cell:
    gold = row.get("gold")
    return Cell("–" if gold is None else shorten(str(gold)))


def _is_conversation(row: Record) -> bool:
    return isinstance(row.get("turns"), list)


def _completion(row: Record) -> Cell:
    if not _is_conversation(row):
        return Cell(shorten(row["completion"]), "" if row["finish_reason"] == "stop" else "cut at the longest length")
    turns = row["turns"]
    ending = ENDINGS.get(str(row.get("ending")), str(row.get("ending")))
    failure = f": {row['failure']}" if row.get("failure") else ""
    count = "1 turn" if len(turns) == 1 else f"{len(turns):,} turns"
    return Cell("", f"{count}, {ending}{failure}", utterances=list(_said(row)))


def _said(row: Record) -> Iterator[Utterance]:
    for turn in shown_turns(row["turns"], SHOWN_TURNS):
        if isinstance(turn, int):
            yield Utterance(f"… {turn:,} turns left out …")
            continue
        calls, answer, reward = called_tools(turn), turn.get("answer", ""), turn.get("reward")
        notes = [f"called {calls}"] if calls and not answer else []
        notes += [f"reward {decimal(reward)}"] if is_number(reward) else []
        yield Utterance(shorten(turn.get("text", ""), *TURN_CHARACTERS), note=", ".join(notes))
        if answer:
            errors = int(number_or_zero(turn.get("errors")))
            failed = "" if not errors else "1 call failed" if errors == 1 else f"{errors:,} calls failed"
            yield Utterance(
                shorten(answer, *TURN_CHARACTERS), calls or str(row.get("environment") or "environment"), failed
            )
