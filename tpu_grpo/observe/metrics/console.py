"""Shows a run to the person who watches it: as a progress bar, or as plain lines where there is no terminal."""

import random
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tpu_grpo.observe.metrics.lines import names_in
from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.observe.metrics.values import MetricValue

PLAIN_WIDTH = 120
TABLE_WIDTH = 60
"""A narrower console shows samples as lines; in a table, a column would have room for a letter or two."""
SHOWN_ROWS = 4
SHOWN_CHARACTERS = 320
SHOWN_TURNS = 4
"""Of a longer conversation the first half of so many turns, and the last."""
SHOWN_OF_A_TURN = 160

_FIELDS = (
    ("reward", "rewards/mean", "{:.3f}"),
    ("agreement", "agreement/logprob_abs_diff_max", "{:.1e}"),
    ("tokens/s", "rollout/tokens_per_second", "{:,.0f}"),
)


class ConsoleSink:
    """Shows reward, agreement, tokens per second and progress, and some samples when asked.

    On a terminal that is a bar; elsewhere a line for the first step, the last one, and in between at most one every
    ``plain_seconds``. Model text is shown as it is: no markup is read from it, and control characters are written
    out as escapes, so that a completion cannot steer the terminal.
    """

    def __init__(
        self,
        start_step: int,
        max_steps: int,
        *,
        console: Console | None = None,
        plain_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or _default_console()
        self._max_steps = max_steps
        self._plain_seconds = plain_seconds
        self._clock = clock
        self._started = clock()
        self._last_line: float | None = None
        self._bar = _Bar(self._console, start_step, max_steps) if self._console.is_terminal else None

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Show one step."""
        step = int(metrics["step"])
        text = _describe(metrics)
        if self._bar is not None:
            self._bar.show(step, text)
        elif self._is_due(step):
            self._last_line = self._clock()
            elapsed = _clock_text(self._last_line - self._started)
            self.note(f"step {step} of {self._max_steps}  {text}  elapsed {elapsed}")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Show the best row, the worst one, and others drawn by the step."""
        if not rows:
            return
        shown = pick_rows(step, rows, SHOWN_ROWS)
        if self._console.width >= TABLE_WIDTH:
            self._console.print(_sample_table(step, shown))
        else:
            self._console.print(Text("\n".join(_sample_lines(step, shown))), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _is_due(self, step: int) -> bool:
        if self._last_line is None or step >= self._max_steps:
            return True
        return self._clock() - self._last_line >= self._plain_seconds


class _Bar:
    """Draws a rich progress bar at a step, with a line of figures."""

    def __init__(self, console: Console, start_step: int, max_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task("", total=max_steps, completed=start_step, figures="")
        self._progress.start()

    def show(self, step: int, figures: str) -> None:
        self._progress.update(self._task, completed=step, figures=figures)

    def close(self) -> None:
        self._progress.stop()


def pick_rows(step: int, rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """Pick at most ``count`` rows: the best, the worst, and others at random, which are the same ones for a step."""
    ranked = sorted(rows, key=lambda row: -row.reward)
    if len(ranked) <= count:
        return ranked
    middle = random.Random(step).sample(range(1, len(ranked) - 1), count - 2)
    return [ranked[i] for i in (0, *sorted(middle), len(ranked) - 1)]


def visible(text: str, limit: int) -> str:
    """Make text fit for one cell: write control characters as escapes, and cut out the middle beyond ``limit`` ones.

    >>> visible("2 + 2 =\\n4", 80)
    '2 + 2 =\\\\n4'
    """
    head = limit * 2 // 3
    shown = text if len(text) <= limit else f"{text[:head]} … {text[len(text) - (limit - head) :]}"
    return "".join(_escape(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _describe(metrics: Mapping[str, MetricValue]) -> str:
    shown = [(label, metrics.get(name), form) for label, name, form in _FIELDS]
    return "  ".join(f"{label} {form.format(v)}" for label, v, form in shown if isinstance(v, int | float))


def _sample_table(step: int, rows: Sequence[SampleRow]) -> Table:
    names = names_in(row.rewards for row in rows)
    table = Table(title=Text(f"samples of step {step}"), title_justify="left", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    for name in [*names, "advantage"]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows:
        rewards = [Text(_number(row.rewards.get(name))) for name in names]
        prompt = Text(visible(row.prompt, SHOWN_CHARACTERS))
        table.add_row(prompt, _completion_text(row), *rewards, Text(f"{row.advantage:+.2f}"))
    return table


def _sample_lines(step: int, rows: Sequence[SampleRow]) -> list[str]:
    lines = [f"samples of step {step}"]
    for row in rows:
        prompt, completion = visible(row.prompt, SHOWN_CHARACTERS), " ".join(text for text, _ in _pieces(row))
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in row.rewards.items() if value is not None)
        lines.append(f"{prompt} -> {completion} ({rewards}; advantage {row.advantage:+.2f})")
    return lines


def _completion_text(row: SampleRow) -> Text:
    """Return a completion for a cell: what an environment said is dim, and on lines of its own."""
    return Text("\n").join(Text(text, style="dim" if is_dim else "") for text, is_dim in _pieces(row))


def _pieces(row: SampleRow) -> list[tuple[str, bool]]:
    """Return what a completion is made of, and whether the policy did not write it: a conversation turn by turn."""
    if row.conversation is None:
        return [(visible(row.completion, SHOWN_CHARACTERS), False)]
    pieces: list[tuple[str, bool]] = []
    turns, half = row.conversation.turns, SHOWN_TURNS // 2
    left_out = range(half, len(turns) - half) if len(turns) > SHOWN_TURNS else range(0)
    for number, turn in enumerate(turns):
        if number in left_out:
            pieces += [(f"[{len(left_out)} turns left out]", True)] if number == half else []
            continue
        pieces.append((visible(turn.text, SHOWN_OF_A_TURN), False))
        if turn.answer:
            said = visible(turn.answer, SHOWN_OF_A_TURN)
            pieces.append((f"{visible(turn.caller or row.conversation.environment, 40)}> {said}", True))
    if row.conversation.ending == "failed":
        pieces.append((visible(f"[failed, {row.conversation.failure}]", SHOWN_OF_A_TURN), True))
    return pieces


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _default_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
