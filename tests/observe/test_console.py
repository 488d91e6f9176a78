import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tpu_grpo.observe.console import ConsoleSink
from tpu_grpo.observe.sample_rows import SampleRow, pick_rows, visible, without_marks

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
    line, explanation = file.getvalue().splitlines()
    assert line == "step 1 of 9  reward 0.500  agreement 2.5e-05  tokens/s 1,234  elapsed 0:00:00"  # rounds to even
    assert explanation.startswith("(agreement: the largest difference of the log-probabilities")


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    clock = Clock()
    sink, file = plain(clock)
    for step, seconds in ((1, 0), (2, 2), (3, 3), (4, 4), (5, 4), (9, 0)):
        clock.now += seconds
        sink.write({"step": step, **METRICS})
    assert re.findall(r"step (\d)", file.getvalue()) == ["1", "3", "5", "9"]  # at 0, 5 and 13 s, and the last one
    # 2 steps in 5 s since the first, which compiles, so 6 more take 15 s; then 4 in 13 s, so 4 more take 13
    assert re.findall(r"left (\S+)", file.getvalue()) == ["0:00:15", "0:00:13"]
    assert file.getvalue().count("(agreement: ") == 1


@pytest.mark.parametrize(
    ("every", "step", "following"), [(4, 1, "4"), (4, 4, "8"), (4, 8, "9"), (0, 3, "9"), (None, 3, None), (4, 9, None)]
)
def test_the_next_evaluation_is_named(every: int | None, step: int, following: str | None) -> None:
    file = io.StringIO()
    sink = ConsoleSink(0, 9, evaluation_every=every, console=Console(file=file, width=100))
    sink.write({"step": step, "rewards/mean": 0.25})
    found = re.search(r"  evaluation after step (\d)$", file.getvalue(), re.MULTILINE)
    assert (found and found[1]) == following


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


def test_samples_show_the_prompt_without_template_marks_and_the_right_answer() -> None:
    sink, file = plain()
    marked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    sink.samples(7, [replace(row("four"), prompt=marked, gold="4"), row("5")])
    cells = [[c.strip() for c in re.split("[│┃]", line)[1:-1]] for line in file.getvalue().splitlines()]
    assert ["prompt", "completion", "right answer", "exact", "advantage"] in cells
    assert ["2+2?", "four", "4", "1.00", "+0.25"] in cells
    assert ["2+2?", "5", "", "1.00", "+0.25"] in cells


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("2 + 2 = ", "2 + 2 ="),
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
         "system: Be brief.\nuser: 2 + 2?"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 < 3?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", "2 < 3?"),
        ("<|im_start|>user92+21=<|im_start|>assistant", "92+21="),
        ("<bos><start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n", "2 + 2?"),
        ("<s>[INST] 2 + 2? [/INST]", "2 + 2?"),
        ("<|system|>\nBe brief.<|end|>\n<|user|>\n2 + 2?<|end|>\n<|assistant|>\n", "system: Be brief.\nuser: 2 + 2?"),
    ],
    ids=["none", "qwen", "llama", "builtin", "gemma", "mistral", "phi"],
)  # fmt: skip
def test_marks_of_chat_templates_are_left_out(prompt: str, shown: str) -> None:
    assert without_marks(prompt) == shown


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
