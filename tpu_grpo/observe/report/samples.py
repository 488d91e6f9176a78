"""Prepares completions for people: of some steps the best and the worst, and held-out prompts before and after."""

from collections.abc import Sequence

from tpu_grpo.observe.metrics.lines import Record, names_in, number_or_zero
from tpu_grpo.observe.report.conversations import conversation, is_conversation
from tpu_grpo.observe.report.reading import Rows
from tpu_grpo.observe.report.tables import Cell, Column, Table, decimal, shorten

SHOWN_ROWS = 4
"""How many samples of a step are shown: half of them the best, half the worst."""
SHOWN_PROBLEMS = 6


def step_table(rows: Rows) -> Table:
    """Show the best and the worst rows of a step, of which there is at least one."""
    shown = _best_and_worst(rows)
    rewards = names_in(row["rewards"] for row in shown)
    total = ["total"] if len(rewards) > 1 else []
    gold = ["right answer"] if any(row.get("gold") is not None for row in shown) else []
    return Table(
        title=f"Samples of step {rows[0]['step']:,}",
        note="The best and the worst by reward." if len(rows) > len(shown) else "",
        columns=[
            *map(Column, ("prompt", "conversation" if any(map(is_conversation, shown)) else "completion", *gold)),
            *(Column(name, is_number=True) for name in (*rewards, *total, "advantage", "tokens")),
        ],
        rows=[_cells(row, rewards, bool(gold)) for row in shown],
    )


def held_out_table(evaluations: Sequence[tuple[int, Rows]], best: str) -> Table | None:
    """Show held-out prompts with the greedy completion of the first evaluation beside that of the last.

    Args:
        evaluations: step and completions of the first and the last one, or of one.
        best: the reward by which prompts are chosen: what got better, what got worse, what stayed wrong, then others.
    """
    if not evaluations:
        return None
    before, after = evaluations[0], evaluations[-1]
    earlier = {row["problem"]: row for row in before[1]}
    pairs = [(earlier[row["problem"]], row) for row in after[1] if row["problem"] in earlier]
    names = names_in(row["rewards"] for _, row in pairs)
    reward = best if best in names else next(iter(names), "")
    chosen = _telling(pairs, reward)
    gold = ["right answer"] if any(row.get("gold") is not None for _, row in chosen) else []
    texts = [f"step {step:,}" for step, _ in evaluations]
    kind = "conversation" if any(is_conversation(row) for _, row in chosen) else "completion"
    rows = [_problem(pair[-len(evaluations) :], reward, bool(gold)) for pair in chosen]
    return Table(
        title="Held-out prompts",
        note="Greedy completions of the first and of the last evaluation." if len(texts) > 1 else "Greedy completions.",
        columns=[
            *map(Column, ("prompt", *gold, *(f"{kind}, {text}" for text in texts))),
            *(Column(f"{reward}, {text}", is_number=True) for text in texts),
        ],
        rows=rows,
    )


def _problem(rows: Rows, reward: str, has_gold: bool) -> list[Cell]:
    """Show a held-out prompt, with its completion in each evaluation."""
    prompt = [Cell(shorten(rows[-1]["prompt"])), *([_gold(rows[-1])] if has_gold else [])]
    return [*prompt, *map(_completion, rows), *(Cell(decimal(row["rewards"].get(reward))) for row in rows)]


def _telling(pairs: Sequence[tuple[Record, Record]], reward: str) -> list[tuple[Record, Record]]:
    """Choose prompts that tell something: of each kind two, then more of the kinds that have them, in their order."""
    kinds: list[list[int]] = [[], [], [], []]
    for number, (before, after) in enumerate(pairs):
        change = number_or_zero(after["rewards"].get(reward)) - number_or_zero(before["rewards"].get(reward))
        wrong = number_or_zero(after["rewards"].get(reward)) < 1
        kinds[0 if change > 0 else 1 if change < 0 else 2 if wrong else 3].append(number)
    chosen = [number for kind in kinds for number in kind[:2]][:SHOWN_PROBLEMS]
    rest = [number for kind in kinds for number in kind[2:]]
    return [pairs[number] for number in sorted([*chosen, *rest[: SHOWN_PROBLEMS - len(chosen)]])]


def _best_and_worst(rows: Rows) -> list[Record]:
    """Take rows from both ends of the ranking; of equal completions of a prompt one is enough."""
    different = {(row["prompt"], row["completion"]): row for row in rows}
    ranked = sorted(different.values(), key=lambda row: -number_or_zero(row["reward"]))
    half = SHOWN_ROWS // 2
    return ranked if len(ranked) <= SHOWN_ROWS else [*ranked[:half], *ranked[-half:]]


def _cells(row: Record, rewards: Sequence[str], has_gold: bool) -> list[Cell]:
    values = [row["rewards"].get(name) for name in rewards]
    values += [row["reward"]] if len(rewards) > 1 else []
    texts = [Cell(shorten(row["prompt"])), _completion(row), *([_gold(row)] if has_gold else [])]
    figures = [*map(decimal, values), decimal(row["advantage"], "+.2f"), f"{row['tokens']:,}"]
    return [*texts, *map(Cell, figures)]


def _completion(row: Record) -> Cell:
    if is_conversation(row):
        return conversation(row)
    return Cell(shorten(row["completion"]), "" if row["finish_reason"] == "stop" else "cut at the longest length")


def _gold(row: Record) -> Cell:
    gold = row.get("gold")
    return Cell("–" if gold is None else shorten(str(gold)))
