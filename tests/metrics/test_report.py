import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_grpo.errors import DataError
from tpu_grpo.metrics.lines import series
from tpu_grpo.metrics.plots import render_plots
from tpu_grpo.metrics.report import write_report
from tpu_grpo.metrics.sinks import JsonlSink, SampleRow

ALL_PLOTS = [
    "Reward",
    "Evaluation",
    "Completion length",
    "Truncated completions and idle groups",
    "Agreement of engine and trainer",
    "Time per stage",
    "Rollout speed",
    "Update",
]


def metrics(step: int) -> dict[str, float | int | str]:
    return {
        "step": step,
        "rewards/mean": step / 10,
        "rewards/std": 0.1,
        "rewards/exact_answer/mean": step / 20,
        "rewards/$x_1$ <b>/mean": 0.5,
        "rewards/seconds": 0.1,
        "groups/zero_variance_fraction": 0.25,
        "completions/mean_tokens": 20.0,
        "completions/truncated_fraction": 0.5,
        "rollout/seconds": 30.0 if step == 1 else 1.0,
        "rollout/tokens_per_second": 1000.0 * step,
        "agreement/logprob_abs_diff_max": 2e-5,
        "agreement/logprob_abs_diff_mean": 0.0,
        "update/loss": float("nan") if step == 2 else 0.1,
        "update/grad_norm": 1.0,
        "update/seconds": 0.5,
        "weights/sync_seconds": 0.1,
        "compile/count": 42,
        "evaluation/greedy": 0.5,
    }


def leave_run(run_dir: Path, steps: int) -> None:
    sink = JsonlSink(run_dir, 0)
    for step in range(1, steps + 1):
        sink.write(metrics(step))
        rows = [
            SampleRow(f"<b>prompt {step}", f"<script>alert({i})</script>", {"e": i, "f": None}, i, -1.0, 3, "length")
            for i in range(6)
        ]
        sink.samples(step, rows)
    sink.close()


class Page(HTMLParser):
    """Collects the tags of a page, the text outside drawings, and what it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def titles(html: str) -> list[str]:
    return re.findall(r"<figcaption>([^<]*)<span>", html)


def test_a_run_on_one_page(tmp_path: Path) -> None:
    leave_run(tmp_path, 10)
    (tmp_path / "config.yaml").write_text("run:\n  name: my-run\nmodel: <script>\n")
    (tmp_path / "evaluation.jsonl").write_text(
        '{"step": 0, "evaluation/greedy/accuracy": 0.125}\n{"step": 12, "evaluation/greedy/accuracy": 0.875}\n'
    )
    path = write_report(tmp_path)
    html = path.read_text()
    page = Page(html)
    assert path == tmp_path / "report.html"
    assert titles(html) == ALL_PLOTS
    assert page.tags.count("svg") == len(ALL_PLOTS)
    assert page.links == []
    assert "http" not in html
    assert html.count("<h1>my-run</h1>") == 1
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>(.*?) <small>", html))
    assert figures == {
        "first reward": "0.300",  # 0.1 .. 0.5
        "last reward": "0.800",  # 0.6 .. 1.0
        "change of reward": "+0.500",
        "greedy accuracy": "0.125 → 0.875",
        "tokens per second": "6,000",
        "log-probability gap": "2.0e-05",
        "compilations": "42",
    }


def test_changes_of_a_continued_run_are_shown(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    assert "Changed while the run went on" not in write_report(tmp_path).read_text()
    change = {"step": 1, "name": "optimizer.learning_rate", "old": "1e-06", "new": "<b>", "effect": "results"}
    (tmp_path / "changes.jsonl").write_text(json.dumps(change) + "\n")
    page = write_report(tmp_path).read_text()
    assert '<td class="number">1</td><td>optimizer.learning_rate</td><td>1e-06</td><td>&lt;b&gt;</td>' in page


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    leave_run(tmp_path, 3)
    (tmp_path / "config.yaml").write_text("run: {name: '<script>name'}\n")
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "&lt;script&gt;alert(5)&lt;/script&gt;" in html
    assert "&lt;script&gt;name" in html
    assert any("$x_1$ <b>" in text for text in page.text)  # in a legend, and not read as mathematics


def test_samples_of_the_first_and_the_last_step(tmp_path: Path) -> None:
    leave_run(tmp_path, 4)
    html = write_report(tmp_path).read_text()
    assert re.findall(r"<h2>Samples of step (\d)</h2>", html) == ["1", "4"]
    shown = re.findall(r"alert\((\d)\)", html)
    assert shown == ["5", "4", "1", "0"] * 2  # the best two and the worst two of six


def test_a_run_of_two_steps_shows_what_it_has(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, 0)
    for step in (1, 2):
        sink.write({"step": step, "rewards/mean": 0.5, "rollout/seconds": 0.0, "update/kl": float("nan")})
    sink.close()
    html = write_report(tmp_path).read_text()
    assert titles(html) == ["Reward", "Time per stage"]
    assert "Samples" not in html
    assert "Configuration" not in html
    assert f"<h1>{tmp_path.name}</h1>" in html


def test_an_interrupted_run_still_gives_a_report(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')
    assert "<p>2 steps</p>" in write_report(tmp_path).read_text()
    (tmp_path / "metrics.jsonl").write_text("")
    assert titles(write_report(tmp_path).read_text()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.jsonl", "[1]\n{}", "evaluation.jsonl:1 must be one JSON object"),
        ("config.yaml", "a: [", "config.yaml must be YAML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    leave_run(tmp_path, 1)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        write_report(tmp_path)


def test_without_metrics_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl, which is missing"):
        write_report(tmp_path)


def test_series_keep_gaps_as_nan_and_skip_steps_without_the_metric() -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": 5}]
    steps, values = series(lines, "a")
    np.testing.assert_array_equal(steps, [1, 3, 4])
    np.testing.assert_array_equal(values, [2.0, np.nan, 5.0])


def test_a_step_beyond_the_scale_is_named() -> None:
    drawn = {plot.title: plot.svg for plot in render_plots([metrics(step) for step in range(1, 8)])}
    assert "off the scale: step 1 took 30.7 s" in drawn["Time per stage"]
    assert "1e-05" in drawn["Agreement of engine and trainer"]


def test_drawings_share_no_id_and_are_the_same_each_time() -> None:
    lines = [metrics(step) for step in range(1, 4)]
    plots = render_plots(lines)
    ids = [found for plot in plots for found in set(re.findall(r'id="([^"]*)"', plot.svg))]
    assert len(ids) == len(set(ids))
    assert plots == render_plots(lines)
