"""What stands on the page of a run."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.goldens import compare_whole
from tests.report.runs import CHARTS, Page, leave_evaluation, leave_run, leave_talks, metrics
from tpu_grpo.observe.run_log import JsonlSink
from tpu_grpo.records.errors import DataError
from tpu_grpo.report.run_page import write_report


def written(run_dir: Path, *, goes_on: bool = False) -> str:
    return write_report(run_dir, goes_on=goes_on).read_text()


def figures(html: str) -> dict[str, tuple[str, str]]:
    return {a: (b, c) for a, b, c in re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)(?:<small>([^<]*)</small>)?</dd>", html)}


def test_a_run_on_one_page(tmp_path: Path) -> None:
    leave_run(tmp_path, 10, data={"prompts_per_step": 4}, algorithm={"name": "grpo", "group_size": 8})
    for step, values in ((0, [0.0] * 7 + [1.0]), (10, [1.0] * 7 + [0.0])):
        leave_evaluation(tmp_path, step, values)
    path = write_report(tmp_path)
    html = path.read_text()
    page = Page(html)
    assert path == tmp_path / "report.html"
    assert list(page.charts) == CHARTS
    assert html.count("<h1>my-run</h1>") == 1
    assert "grpo · 4 prompts × 8 completions a step" in page.text
    assert figures(html) == {
        "reward, first → last": ("0.300 → 0.800", "+0.500, each the mean of 5 steps"),  # 0.1 .. 0.5 and 0.6 .. 1.0
        "held out": ("0.125 → 0.875", "greedy exact_answer"),
        "seconds per step, median": ("1.7", "6,000 tokens/s sampled"),
        "log-probability gap": ("2.0e-05", "largest, engine against trainer"),
    }
    wide = re.findall(r'<figure class="wide"><figcaption>([^<]*)<', html)
    assert wide == ["Reward", "Evaluation"]
    assert html.index("</dl>") < html.index("Reward<span>") < html.index("<table>")


def test_stages_that_overlap_are_not_added(tmp_path: Path) -> None:
    """With algorithm.staleness, a rollout of 1 s and an update of 0.5 s may be over after 1.1 s."""
    leave_run(tmp_path, 0, algorithm={"staleness": 1})
    with closing(JsonlSink(tmp_path, 0)) as sink:
        for step in (1, 2, 3):
            sink.write({**metrics(step), "step/seconds": 1.1})
    html = written(tmp_path)
    assert figures(html)["seconds per step, median"][0] == "1.1"
    assert "a rollout takes place during the update" in html
    assert [line["y"][-1] for line in Page(html).charts["Time per stage"]["lines"]] == [1.0, 0.1, 0.5, 0.1]
    assert all("t" not in line for line in Page(html).charts["Time per stage"]["lines"])


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    leave_run(tmp_path, 3)
    page = Page(written(tmp_path))
    assert page.links == []
    assert "http" not in written(tmp_path)
    assert {"link", "img", "iframe", "form"} & set(page.tags) == set()
    assert page.tags.count("script") == 1


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, {"reward": ("0.100", "of one step")}),
        (2, {"reward, first → last": ("0.100 → 0.200", "+0.100")}),
        (3, {"reward, first → last": ("0.100 → 0.300", "+0.200")}),
        (4, {"reward, first → last": ("0.150 → 0.350", "+0.200, each the mean of 2 steps")}),
        (12, {"reward, first → last": ("0.300 → 1.000", "+0.700, each the mean of 5 steps")}),
    ],
)
def test_a_short_run_shows_a_change_of_reward(tmp_path: Path, steps: int, expected: dict[str, tuple[str, str]]) -> None:
    leave_run(tmp_path, steps)
    found = figures(written(tmp_path))
    assert {label: value for label, value in found.items() if label.startswith("reward")} == expected
    assert len(found) <= 5


def test_a_reward_that_is_the_total_is_drawn_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    for step in (1, 2):
        sink.write({"step": step, "rewards/mean": step, "rewards/a/mean": step, "rewards/b/mean": 0.0})
    sink.close()
    chart = Page(written(tmp_path)).charts["Reward"]
    assert [line["l"] for line in chart["lines"]] == ["total, a", "b"]


def test_changes_of_a_continued_run_are_shown(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    assert "Changed while the run went on" not in written(tmp_path)
    change = {"step": 1, "name": "optimizer.learning_rate", "old": "1e-06", "new": "<b>", "effect": "results"}
    (tmp_path / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert ["1", "optimizer.learning_rate", "1e-06", "<b>"] in Page(written(tmp_path)).tables[-1]


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    leave_run(tmp_path, 3, name="<script>name")
    leave_evaluation(tmp_path, 3, [1.0])
    (tmp_path / "end.json").write_text('{"outcome": "failed", "message": "<b>no</b>", "exit_code": 1, "at": "now"}')
    html = written(tmp_path)
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "alert(" not in html.partition("<script>\n")[2].replace("&lt;script&gt;alert(", "")
    assert page.tags.count("b") == 0
    assert "&lt;script&gt;alert(5)&lt;/script&gt;" in html
    assert [line["l"] for line in page.charts["Reward"]["lines"]][1:] == ["$x_1$ <b>", "exact_answer"]


def evaluated_run(run_dir: Path) -> None:
    """Leave a run of nine steps with evaluations before, in the middle and at the end.

    Of eight held-out prompts two got right (3, 4), one got wrong (6), one stayed wrong (7), and of the four that stayed
    right two are shown (0, 1). Samples are of steps 1, 5 and 9, the best two and the worst two of six completions.
    """
    leave_run(run_dir, 9)
    before = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    for step, values in ((0, before), (5, [1.0] * 8), (9, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])):
        leave_evaluation(run_dir, step, values)


@pytest.mark.parametrize("leave", [evaluated_run, leave_talks])
def test_the_whole_page(tmp_path: Path, leave: Callable[[Path], object]) -> None:
    """But for its script, its style, and drawings, whose data is there."""
    leave(tmp_path / "run")
    html = re.sub(r"<(script|style|svg)\b.*?</\1>", r"<\1/>", written(tmp_path / "run"), flags=re.DOTALL)
    lines = re.sub(r"(?<!\n)(?=<(figure|table|tr|td|th|details|div|dt|li|h2)\b)", "\n", html).replace("&#34;", '"')
    compare_whole(Path(__file__).with_name("pages") / f"{leave.__name__}.html", lines)


def test_equal_completions_of_a_prompt_show_once(tmp_path: Path) -> None:
    leave_run(tmp_path, 1)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    (tmp_path / "samples.jsonl").write_text("\n".join([lines[5]] * 4 + lines[:5]) + "\n")
    assert [row[5] for row in Page(written(tmp_path)).tables[1][1:]] == ["5.00", "4.00", "1.00", "0.00"]


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    leave_run(tmp_path, 1)
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text().replace("<b>prompt 1", "x" * 10_000))
    html = written(tmp_path)
    assert "… 8,100 characters left out …" in html
    assert "x" * 1401 not in html


def test_a_run_of_two_steps_shows_what_it_has(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    for step in (1, 2):
        sink.write({"step": step, "rewards/mean": 0.5, "rollout/seconds": 0.0, "update/kl": float("nan")})
    sink.close()
    html = written(tmp_path)
    assert list(Page(html).charts) == ["Reward", "Time per stage"]
    assert "Samples" not in html
    assert "Configuration" not in html
    assert f"<h1>{tmp_path.name}</h1>" in html


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: new, max_steps: 7}\n")
    page = Page(written(tmp_path, goes_on=True))
    assert page.charts == {}
    assert "The run goes on: step 0 of 7" in page.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.jsonl", "[1]\n{}", "evaluation.jsonl:1 must be one JSON object"),
        ("config.yaml", "a: [", "config.yaml must be YAML"),
        ("samples.jsonl", "[1]\n[2]\n", "samples.jsonl must hold a JSON object with a step on every line"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    leave_run(tmp_path, 1)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        write_report(tmp_path)


@pytest.mark.full
def test_a_page_of_2_000_steps_is_below_2_mb(tmp_path: Path) -> None:
    leave_run(tmp_path, 2_000, samples_every=500)
    assert write_report(tmp_path).stat().st_size < 2e6
