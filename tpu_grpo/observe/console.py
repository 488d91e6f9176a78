"""Shows the progress of a run: as a bar in a terminal or below a notebook's cell, elsewhere as lines of text."""

import html
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tpu_grpo.observe.json_lines import names_in
from tpu_grpo.observe.sample_rows import SampleRow, called_tools, pick_rows, shown_turns, visible, without_marks
from tpu_grpo.observe.step_metrics import MetricValue

PLAIN_WIDTH = 120
TABLE_WIDTH = 60
"""A narrower console shows samples as lines, because a column of a table would hold only a letter or two."""
SHOWN_ROWS = 4
SHOWN_CHARACTERS = 320
SHOWN_TURNS = 4
"""The most turns of a conversation that are shown: half of them its first, half its last."""
SHOWN_OF_A_TURN = 160
PAGE_HEIGHT = 640
"""The height in pixels of the report in a notebook; the reader scrolls in it."""

AGREEMENT = "agreement/logprob_abs_diff_max"
EXPLANATION = (
    "(agreement: the largest difference of the log-probabilities that engine and trainer give the same tokens; up to "
    "1e-4 is right in float32)"
)
_FIELDS = (
    ("reward", "rewards/mean", "{:.3f}"),
    ("agreement", AGREEMENT, "{:.1e}"),
    ("tokens/s", "rollout/tokens_per_second", "{:,.0f}"),
)


class ConsoleSink:
    """Shows reward, engine-trainer agreement, tokens per second, time left, next evaluation, and some steps' samples.

    ``evaluation_every`` is the setting evaluation.every; None for a run without held-out prompts.

    A terminal or a notebook shows a bar. Elsewhere the first and the last step have a line, and between them there is
    at most a line every ``plain_seconds``. Model text is shown literally: markup has no effect, and control characters
    are escaped, so that a completion cannot control the terminal.
    """

    def __init__(
        self,
        start_step: int,
        max_steps: int,
        *,
        evaluation_every: int | None = None,
        console: Console | None = None,
        plain_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if console is None:
            console = Console()
            console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
        self._console = console
        self._start, self._max_steps, self._evaluation_every = start_step, max_steps, evaluation_every
        self._began: tuple[int, float] | None = None
        """The first step and its end time. This step compiles, so the time left is estimated from later steps."""
        self._plain_seconds = plain_seconds
        self._clock = clock
        self._started = clock()
        self._last_line: float | None = None
        self._bar: Progress | None = None
        self._cell = Cell() if is_in_notebook() else None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=max_steps, completed=start_step, figures="")
            self._bar.start()

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Show one step."""
        step, now = int(metrics["step"]), self._clock()
        known = [(label, metrics.get(name), form) for label, name, form in _FIELDS]
        figures = "  ".join(f"{label} {form.format(v)}" for label, v, form in known if isinstance(v, int | float))
        first, since = self._began = self._began or (step, now)
        evaluation = left = ""
        if (every := self._evaluation_every) is not None and step < self._max_steps:
            following = min((step // every + 1) * every, self._max_steps) if every else self._max_steps
            evaluation = f"  evaluation after step {following}"
        if first < step < self._max_steps:
            left = f"  left {_clock_time((now - since) / (step - first) * (self._max_steps - step))}"
        times = f"elapsed {_clock_time(now - self._started)}{left}"
        line = f"step {step} of {self._max_steps}  {figures}  {times}{evaluation}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures + evaluation)
        elif self._cell is not None:
            self._cell.show_progress(step, self._max_steps, line)
        elif self._last_line is None or step >= self._max_steps or now - self._last_line >= self._plain_seconds:
            self._last_line = now
            self.note(line)
        if step == first and AGREEMENT in metrics:
            self.note(EXPLANATION)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Show the best completion, the worst, and some others, which are drawn with the step as seed."""
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
        """Stop updating the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _sample_table(step: int, rows: Sequence[SampleRow]) -> Table:
    names = names_in(row.rewards for row in rows)
    table = Table(title=Text(f"samples of step {step}"), title_justify="left", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    has_gold = any(row.gold is not None for row in rows)
    for name in [*(["right answer"] if has_gold else []), *names, "advantage"]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows:
        rewards = [Text(_number(row.rewards.get(name))) for name in names]
        gold = [Text(visible(row.gold or "", SHOWN_CHARACTERS))] if has_gold else []
        prompt = Text(visible(without_marks(row.prompt), SHOWN_CHARACTERS))
        completion = Text("\n").join(Text(text, style="dim" if is_dim else "") for text, is_dim in _pieces(row))
        table.add_row(prompt, completion, *gold, *rewards, Text(f"{row.advantage:+.2f}"))
    return table


def _sample_lines(step: int, rows: Sequence[SampleRow]) -> list[str]:
    lines = [f"samples of step {step}"]
    for row in rows:
        prompt = visible(without_marks(row.prompt), SHOWN_CHARACTERS)
        completion = " ".join(text for text, _ in _pieces(row))
        right = "" if row.gold is None else f"right answer {visible(row.gold, SHOWN_CHARACTERS)}; "
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in row.rewards.items() if value is not None)
        lines.append(f"{prompt} -> {completion} ({right}{rewards}; advantage {row.advantage:+.2f})")
    return lines


def _pieces(row: SampleRow) -> list[tuple[str, bool]]:
    """Split a completion into (text, False) for the policy's texts, and (text, True) for answers and remarks."""
    if not (talk := row.conversation):
        return [(visible(row.completion, SHOWN_CHARACTERS), False)]
    pieces: list[tuple[str, bool]] = []
    for turn in shown_turns(talk["turns"], SHOWN_TURNS):
        if isinstance(turn, int):
            pieces.append((f"[{turn} turns left out]", True))
            continue
        pieces.append((visible(turn["text"], SHOWN_OF_A_TURN), False))
        if turn["answer"]:
            said = visible(turn["answer"], SHOWN_OF_A_TURN)
            pieces.append((f"{visible(called_tools(turn) or talk['environment'], 40)}> {said}", True))
    if talk["ending"] == "failed":
        pieces.append((visible(f"[failed, {talk.get('failure')}]", SHOWN_OF_A_TURN), True))
    return pieces


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class Cell:
    """A part of the output of a notebook's cell, which shows a run's progress or its report.

    Each call replaces the content of the call before.
    """

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/html": ""}, raw=True, display_id=True)

    def show_progress(self, step: int, most: int, line: str) -> None:
        """Show a bar for the steps that are done, and a line of text below."""
        bar = f'<progress value="{step}" max="{most}" style="width: 100%"></progress>'
        self._show(f"{bar}<pre>{html.escape(line)}</pre>")

    def show_page(self, page: str) -> None:
        """Show a whole page of HTML, in a frame of its own."""
        frame = f'width="100%" height="{PAGE_HEIGHT}" style="border: 1px solid #ccc"'
        self._show(f'<iframe srcdoc="{html.escape(page)}" {frame}></iframe>')

    def _show(self, content: str) -> None:
        if self._handle is not None:
            self._handle.update({"text/html": content}, raw=True)
