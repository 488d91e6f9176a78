"""Where points of a chart lie on the page, worked out by hand: x to the right and y down, over 4000 units each."""

import json
import re

import numpy as np
import pytest

from tpu_grpo.report.chart_drawing import (
    Axis,
    Chart,
    Line,
    Scale,
    draw,
    kept,
    moving_mean,
    round_step,
    steps_axis,
    values_axis,
)

# --- drawings ---------------------------------------------------------------------------------------------------------

NAN = float("nan")


def line(values: list[float], steps: list[int] | None = None, label: str = "a", colour: int = 0) -> Line:
    return Line(label, np.array(steps or range(1, len(values) + 1), np.float64), np.array(values), colour)


def paths(svg: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}" style="[^"]*" d="([^"]*)"/>', svg)


def test_a_line_runs_through_its_points() -> None:
    drawing = draw(Chart("t", "n", [line([0.0, 0.25, 1.0], [1, 2, 5])], "share"))
    assert paths(drawing.svg, "line") == ["M0 4000L1000 3000L4000 0"]
    assert paths(drawing.svg, "dots") == ["M0 4000h0M1000 3000h0M4000 0h0"]
    assert drawing.legend == []
    assert [text for _, text in drawing.x_labels] == ["1", "2", "3", "4", "5"]


def test_a_gap_cuts_a_line_and_a_point_alone_is_a_dot() -> None:
    values = [0.0, 1.0, NAN, 0.5, NAN, *([0.0] * 26)]
    drawing = draw(Chart("t", "n", [line(values, list(range(31)))], "share"))  # more than are marked
    first, second = paths(drawing.svg, "line")[0].split("M")[1:]
    assert first == "0 4000L133 0"
    assert second.startswith("667 4000L")
    assert paths(drawing.svg, "dots") == ["M400 2000h0"]


def test_a_band_goes_along_its_upper_edge_and_back_along_the_lower_one() -> None:
    one = line([0.5, 0.5])
    banded = Line("a", one.steps, one.values, 0, np.array([0.25, -3.0]), np.array([0.75, 1.0]))
    drawing = draw(Chart("t", "n", [banded], "share"))
    assert paths(drawing.svg, "band") == ["M0 1000L4000 0L4000 4000L0 3000Z"]  # cut where the chart ends


def test_layers_stand_on_each_other_and_reach_half_a_step_to_either_side() -> None:
    chart = Chart(
        "t", "n", [line([1.0, 2.0], label="a"), line([1.0, NAN], label="b", colour=1)], "share", is_stack=True
    )
    drawing = draw(chart)
    # steps 1 and 2 from 0.5 to 2.5; the upper layer is drawn first, from the ground: 1 + 1, 2 + 0
    assert paths(drawing.svg, "layer") == ["M0 4000V-4000H2000V-4000H4000V4000Z", "M0 4000V0H2000V-4000H4000V4000Z"]
    data = json.loads(drawing.data)
    assert [one["y"] for one in data["lines"]] == [[1, 2], [1, 0]]
    assert [one.get("t", one["y"]) for one in data["lines"]] == [[1, 2], [2, 2]]
    assert data["x"] == [0.5, 2.5]


def test_a_step_beyond_the_scale_is_named_and_flattens_no_other() -> None:
    drawing = draw(Chart("t", "n", [line([30.0, 1.0, 2.0, 1.0, 9.0, 1.0])], "zero", is_stack=True))
    assert drawing.remark == "off the scale: step 1 took 30.0 s, 1 more"
    assert json.loads(drawing.data)["y"] == [0.0, pytest.approx(1.06 * 1.2 * 2.0)]
    assert draw(Chart("t", "n", [line([1.0, 3.9])], "zero", is_stack=True)).remark == ""
    assert draw(Chart("t", "n", [line([0.0, 0.0, 1.0])], "zero", is_stack=True)).remark == ""


def test_what_shows_on_hover_has_four_digits_and_steps_of_its_own_where_they_differ() -> None:
    lines = [line([0.123456, NAN, 12345.678]), line([1.0, 2.0], [0, 3], "b", 9)]
    data = json.loads(draw(Chart("t", "n", lines)).data)
    assert data["steps"] == [1, 2, 3]
    assert data["lines"] == [
        {"l": "a", "c": 0, "y": [0.1235, None, 12350]},
        {"l": "b", "c": 1, "y": [1, 2], "x": [0, 3]},  # there are eight colours
    ]
    assert (data["x"], data["log"]) == ([0, 3], False)


def test_a_long_line_has_its_moving_mean_above_it() -> None:
    assert "trend" not in draw(Chart("t", "n", [line([0.5, 0.7] * 100)])).svg
    svg = draw(Chart("t", "n", [line([0.0, 1.0] * 160)], "share")).svg
    assert svg.index('class="line"') < svg.index('class="trend"')
    heights = [int(point.split()[1]) for point in re.split("[ML]", paths(svg, "trend")[0])[1:]]
    assert set(heights[4:-4]) == {2000}  # windows of 8 steps, half of them 0 and half 1


def test_the_first_line_lies_above_the_others() -> None:
    drawing = draw(Chart("t", "n", [line([0.5]), line([0.5], colour=1)], "share"))
    assert re.findall(r"--c:var\(--c(\d)\)", drawing.svg) == ["1", "0"]
    assert drawing.legend == [(0, "a"), (1, "a")]


def test_a_chart_of_20_000_steps_is_as_small_as_one_of_2_000() -> None:
    sizes = [len(d.svg) + len(d.data) for n in (2_000, 20_000) for d in [draw(Chart("t", "n", [line([0.5, 0.7] * n)]))]]
    assert max(sizes) < 30_000


# --- axes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "values", "low", "high"),
    [
        ("linear", [1.0, 3.0], 0.9, 3.1),  # a twentieth of the range on either side
        ("linear", [2.0, NAN, 2.0], 1.9, 2.1),
        ("linear", [0.0], -0.5, 0.5),
        ("linear", [NAN], 0.0, 1.0),
        ("zero", [5.0, 10.0], 0.0, 10.6),
        ("zero", [0.0], 0.0, 1.0),
        ("zero", [-1.0, 1.0], -1.1, 1.1),  # what is below zero shows
        ("share", [0.2], 0.0, 1.0),
        ("log", [2e-5, 0.0, 3e-3], 1e-5, 1e-2),
        ("log", [1e-4], 1e-4, 1e-3),  # one decade at least
        ("log", [0.0], 0.0, 1.0),
    ],
)
def test_an_axis_spans_its_values(scale: Scale, values: list[float], low: float, high: float) -> None:
    axis = values_axis(np.array(values), scale)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))


def test_places_on_an_axis() -> None:
    np.testing.assert_allclose(Axis(10.0, 20.0).place(np.array([10.0, 12.5, NAN])), [0.0, 0.25, NAN])
    np.testing.assert_allclose(Axis(1e-4, 1.0, is_log=True).place(np.array([1e-3, 0.0, -1.0])), [0.25, NAN, NAN])
    np.testing.assert_allclose(steps_axis(7.0, 7.0).place(np.array([7.0])), [0.5])


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis(0.0, 1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (Axis(-0.04, 0.11), ["0.00", "0.05", "0.10"]),
        (Axis(0.0, 8400.0), ["0", "2,000", "4,000", "6,000", "8,000"]),
        (Axis(-6e-8, 6e-8), ["-5.0e-08", "0", "5.0e-08"]),
        (Axis(1e-7, 1e-3, is_log=True), ["1e-07", "1e-06", "1e-05", "1e-04", "1e-03"]),
        (Axis(1e-12, 1.0, is_log=True), ["1e-12", "1e-09", "1e-06", "1e-03", "1e+00"]),
    ],
)
def test_labels_are_round(axis: Axis, texts: list[str]) -> None:
    labels = axis.labels(5)
    assert [text for _, text in labels] == texts
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in labels)


def test_steps_are_whole() -> None:
    assert [text for _, text in Axis(0.5, 3.5).labels(6, whole=True)] == ["1", "2", "3"]


def test_steps_between_labels_are_1_2_or_5() -> None:
    assert [round_step(least) for least in (0.13, 0.2, 3.0, 10.0, 0.0007)] == pytest.approx(
        [0.2, 0.2, 5.0, 10.0, 0.001]
    )


# --- few of many points -----------------------------------------------------------------------------------------------


def test_few_points_are_all_kept() -> None:
    assert kept(np.array([3.0, 1.0, 2.0]), 2).tolist() == [0, 1, 2]
    assert kept(np.zeros(0), 2).tolist() == []


def test_of_many_the_extremes_of_every_bucket_and_both_ends() -> None:
    values = np.array([1.0, 5.0, 2.0, 3.0, 0.0, 4.0, 9.0, 9.0])
    # buckets of four: lowest 0 and highest 1; lowest 4 and highest 6, the first of equal ones; then the end, 7
    assert kept(values, 2).tolist() == [0, 1, 4, 6, 7]


def test_a_gap_stays_a_gap() -> None:
    values = np.array([1.0, np.nan, np.nan, 2.0, np.nan, np.nan, np.nan, np.nan, 5.0, 4.0, 6.0, 7.0])
    assert kept(values, 3).tolist() == [0, 1, 3, 4, 9, 11]


@pytest.mark.parametrize("count", [801, 2000, 20_011])
def test_a_long_line_loses_no_peak_and_keeps_few_points(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    places = kept(values)
    assert len(places) <= 802
    assert (np.diff(places) > 0).all()
    assert {0, count - 1, int(values.argmax()), int(values.argmin())} <= set(places.tolist())
    for window in np.array_split(np.arange(count), 400):  # every bucket's own peaks, too
        assert int(window[values[window].argmax()]) in places


def test_a_moving_mean_is_over_what_is_known_in_its_window() -> None:
    found = moving_mean(np.array([0.0, 3.0, NAN, 5.0, NAN, NAN, NAN]), 3)
    np.testing.assert_allclose(found, [1.5, 1.5, 4.0, 5.0, 5.0, NAN, NAN])
