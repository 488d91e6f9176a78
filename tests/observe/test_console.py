import io
import re

from rich.console import Console

from tpu_grpo.observe.console import ConsoleSink
from tpu_grpo.observe.sample_rows import SampleRow, pick_rows, visible

METRICS = {"rewards/mean": 0.5, "agreement/logprob_abs_diff_max": 2.5e-5, "rollout/tokens_per_second": 1234.5}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row(completion: str, reward: float = 1.0, **rewards: float | None) -> SampleRow:
    return SampleRow("2+2?", completion, rewards or {"exact": reward}, reward, 0.25, 3, "stop")


def plain(clock: Clock | None = None) -> tuple[ConsoleSink, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=100)
    return ConsoleSink(0, 9, console=console, plain_seconds=5.0, clock=clock or Clock()), file


def test_without_a_terminal_a_plain_line() -> None:
    sink, file = plain()
    sink.write({"step": 1, **METRICS})
    sink.close()
    assert file.getvalue() == (
        "step 1 of 9  reward 0.500  agreement 2.5e-05  tokens/s 1,234  elapsed 0:00:00\n"  # 1234.5 rounds to even
    )


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    clock = Clock()
    sink, file = plain(clock)
    for step, seconds in ((1, 0), (2, 2), (3, 3), (4, 4), (5, 4), (9, 0)):
        clock.now += seconds
        sink.write({"step": step, **METRICS})
    assert re.findall(r"step (\d)", file.getvalue()) == ["1", "3", "5", "9"]  # at 0, 5 and 13 s, and the last one


def test_a_metric_that_is_missing_is_left_out() -> None:
    sink, file = plain()
    sink.write({"step": 1, "rewards/mean": 0.25})
    assert file.getvalue() == "step 1 of 9  reward 0.250  elapsed 0:00:00\n"


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140, legacy_windows=False, _environ={"TERM": "xterm"})
    sink = ConsoleSink(4, 9, console=console)
    sink.write({"step": 5, **METRICS})
    sink.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "step 5 of 9" in shown
    assert "reward 0.500  agreement 2.5e-05  tokens/s 1,234" in shown
    assert "\x1b[?25h" in file.getvalue()  # the cursor is given back


def test_markup_and_control_characters_in_model_text_are_shown_not_obeyed() -> None:
    sink, file = plain()
    sink.samples(1, [row("[bold]x[/bold] [/red] :smile: \x1b[31m\a", **{"[b]fmt": None, "exact": 1.0})])
    shown = file.getvalue()
    assert "[bold]x[/bold]" in shown
    assert "[b]fmt" in shown
    assert ":smile:" in shown
    assert r"\x1b[31m\x07" in shown
    assert "\x1b" not in shown


def test_samples_show_rewards_by_name_and_the_advantage() -> None:
    sink, file = plain()
    sink.samples(7, [row("four", exact=0.75, format=None)])
    assert "samples of step 7" in file.getvalue()
    cells = [[c.strip() for c in re.split("[│┃]", line)[1:-1]] for line in file.getvalue().splitlines()]
    assert ["prompt", "completion", "exact", "format", "advantage"] in cells
    assert ["2+2?", "four", "0.75", "", "+0.25"] in cells


def test_best_and_worst_are_among_the_rows_and_a_step_picks_the_same() -> None:
    rows = [row(str(i), reward=float(i % 10)) for i in range(1, 20)]
    picked = pick_rows(3, rows, 4)
    assert picked[0].reward == 9.0
    assert picked[-1].reward == 0.0
    assert len({r.completion for r in picked}) == 4
    assert picked == pick_rows(3, rows, 4)
    assert pick_rows(1, rows[:2], 4) == [rows[1], rows[0]]


def test_long_text_keeps_its_start_and_its_end() -> None:
    assert visible("a" * 60 + "b" * 60, 30) == "a" * 20 + " … " + "b" * 10
    assert visible("tab\tright\u202eleft é中", 80) == r"tab\tright\u202eleft é中"


def test_a_narrow_console_shows_samples_as_lines() -> None:
    file = io.StringIO()
    ConsoleSink(0, 3, console=Console(file=file, width=20)).samples(2, [row("four")])
    assert file.getvalue() == "samples of step 2\n2+2? -> four (exact 1.00; advantage +0.25)\n"
