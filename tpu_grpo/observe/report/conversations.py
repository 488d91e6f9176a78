"""Prepares conversations for people: what the policy wrote and what the environment answered, turn by turn."""

from collections.abc import Iterator

from tpu_grpo.observe.metrics.lines import Record, is_number, number_or_zero
from tpu_grpo.observe.report.tables import Cell, Said, decimal, shorten

SHOWN_TURNS = 12
"""Of a longer conversation the first half of so many turns is shown, and the last."""
HEAD_CHARACTERS, TAIL_CHARACTERS = 500, 200
"""Of a longer text of a turn so much is shown, from its beginning and from its end."""
ENDINGS = {
    "answered": "ended with its answer",
    "done": "ended by the environment",
    "turns": "cut at the most turns",
    "tokens": "cut at the longest length",
    "failed": "ended because the environment failed",
}


def is_conversation(row: Record) -> bool:
    """Tell whether a sample is a conversation."""
    return isinstance(row.get("turns"), list)


def conversation(row: Record) -> Cell:
    """Show a sample that is a conversation."""
    turns = row["turns"]
    ending = ENDINGS.get(str(row.get("ending")), str(row.get("ending")))
    failure = f": {row['failure']}" if row.get("failure") else ""
    count = "1 turn" if len(turns) == 1 else f"{len(turns):,} turns"
    return Cell("", f"{count}, {ending}{failure}", said=list(_said(row)))


def _said(row: Record) -> Iterator[Said]:
    turns, half = row["turns"], SHOWN_TURNS // 2
    left_out = len(turns) - SHOWN_TURNS
    for number, turn in enumerate(turns):
        if left_out > 0 and number == half:
            yield Said(f"… {left_out:,} turns left out …")
        if left_out > 0 and half <= number < half + left_out:
            continue
        calls = ", ".join(name or "a call that cannot be read" for name in turn.get("calls", ()))
        answer, reward = turn.get("answer", ""), turn.get("reward")
        notes = [f"called {calls}"] if calls and not answer else []
        notes += [f"reward {decimal(reward)}"] if is_number(reward) else []
        yield Said(shorten(turn.get("text", ""), HEAD_CHARACTERS, TAIL_CHARACTERS), note=", ".join(notes))
        if answer:
            errors = int(number_or_zero(turn.get("errors")))
            failed = "" if not errors else "1 call failed" if errors == 1 else f"{errors:,} calls failed"
            by = calls or str(row.get("environment") or "environment")
            yield Said(shorten(answer, HEAD_CHARACTERS, TAIL_CHARACTERS), by, failed)
