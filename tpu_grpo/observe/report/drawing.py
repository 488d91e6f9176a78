"""Draws a chart as HTML with a stretched SVG inside, so that it fits any width and its texts keep their size.

Lines are paths over a square of ``SIDE`` units that the page stretches, with strokes that it does not. Labels are texts
of the page. The values that show on hover stand beside the drawing as JSON, which report.js reads; without scripts the
drawing is there all the same.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from markupsafe import Markup

from tpu_grpo.observe.report.axes import X_LABELS, Y_LABELS, Axis, Scale, steps_axis, values_axis
from tpu_grpo.observe.report.thinning import kept, moving_mean

SIDE = 4000
COLOURS = 8
"""The style sheet has so many."""
TREND_FROM, TREND_WINDOWS = 200, 40
"""A line of more steps also gets its moving mean, over a fortieth of its length."""
MARKED_POINTS = 24
"""Where no line has more, points are marked."""


@dataclass(frozen=True)
class Line:
    """A line of a chart, or a layer of a stack: N values by step; NaN is a gap."""

    label: str
    steps: Float[np.ndarray, " N"]
    values: Float[np.ndarray, " N"]
    colour: int = 0
    low: Float[np.ndarray, " N"] | None = None
    """With ``high``: a band around the line."""
    high: Float[np.ndarray, " N"] | None = None
    is_strong: bool = False

    def thinned(self) -> "Line":
        """Keep few points, and all extremes."""
        places = kept(self.values)
        low, high = (None if band is None else band[places] for band in (self.low, self.high))
        return replace(self, steps=self.steps[places], values=self.values[places], low=low, high=high)


@dataclass(frozen=True)
class Chart:
    """What a plot shows."""

    title: str
    note: str
    lines: Sequence[Line]
    scale: Scale = "linear"
    is_stack: bool = False
    is_wide: bool = False
    """Whether it takes the whole width of the page."""
    is_cut: bool = False
    """Whether values many times the usual are cut, as those of a stack are: steps that compile."""
    is_named: bool = False
    """Whether a single line is named, too."""


@dataclass(frozen=True)
class Drawing:
    """A chart that is ready for the page."""

    title: str
    note: str
    is_wide: bool
    legend: Sequence[tuple[int, str]]
    """Colours and labels; empty for a single line."""
    svg: Markup
    x_labels: Sequence[tuple[float, str]]
    """Places from 0 to 1, and texts."""
    y_labels: Sequence[tuple[float, str]]
    data: str
    """JSON for the script."""
    is_cut: bool = False
    remark: str = ""
    """What the drawing leaves out."""

    @property
    def label_width(self) -> int:
        """The characters of the longest label of the values."""
        return max((len(text) for _, text in self.y_labels), default=1)


def draw(chart: Chart) -> Drawing:
    """Draw a chart that has at least one point."""
    if chart.is_stack:
        lines, tops, remark = _stacked(chart.lines)
        x = Axis(lines[0].steps[0] - 0.5, lines[0].steps[-1] + 0.5)
        y = values_axis(_usual(tops[-1].values), chart.scale)
        paths = _layers(tops, x, y)
    else:
        tops = lines = [line.thinned() for line in chart.lines]
        steps, values = (np.concatenate(part) for part in ([ln.steps for ln in lines], [ln.values for ln in lines]))
        remark = _beyond(values, steps) if chart.is_cut else ""
        reach = _usual(values) if chart.is_cut else _reach(lines)
        x, y = steps_axis(steps.min(), steps.max()), values_axis(reach, chart.scale)
        marked = max(len(line.steps) for line in lines) <= MARKED_POINTS
        both = reversed(list(zip(lines, chart.lines, strict=True)))  # the first one above the others
        paths = (path for line, whole in both for path in [*_line(line, x, y, marked), *_trend(whole, x, y)])
    labels = y.labels(Y_LABELS)
    grid = "".join(f"M0 {SIDE - unit}H{SIDE}" for unit in _units(np.array([place for place, _ in labels])))
    return Drawing(
        title=chart.title,
        note=chart.note,
        is_wide=chart.is_wide,
        legend=[(line.colour % COLOURS, line.label) for line in chart.lines]
        if chart.is_named or len(lines) > 1
        else [],
        svg=Markup("".join([f'<path class="grid" d="{grid}"/>', *paths])),
        x_labels=x.labels(X_LABELS, whole=True),
        y_labels=labels,
        data=_hover(lines, tops, x, y),
        is_cut=bool(remark),
        remark=remark,
    )


# --- lines -----------------------------------------------------------------------------------------------------------


def _reach(lines: Sequence[Line]) -> Float[np.ndarray, " M"]:
    """Return every value that must lie in the drawing."""
    parts = [values for line in lines for values in (line.values, line.low, line.high) if values is not None]
    return np.concatenate(parts)


def _line(line: Line, x: Axis, y: Axis, marked: bool) -> Iterator[str]:
    at = x.place(line.steps)
    style = f'style="--c:var(--c{line.colour % COLOURS})"'
    if line.low is not None and line.high is not None:
        low, high = np.clip(y.place(line.low), 0, 1), np.clip(y.place(line.high), 0, 1)
        for run in _runs(low + high):
            there = _points(at[run], high[run])
            back = _points(at[run][::-1], low[run][::-1])
            yield f'<path class="band" {style} d="M{"L".join([*there, *back])}Z"/>'
    places = y.place(line.values)
    runs = _runs(places)
    if d := _strokes(at, places):
        yield f'<path class="line{" strong" if line.is_strong else ""}" {style} d="{d}"/>'
    alone = [run[0] for run in runs if len(run) == 1]
    if dots := [place for run in runs for place in run] if marked else alone:
        d = "".join(f"M{point}h0" for point in _points(at[dots], places[dots]))
        yield f'<path class="dots" {style} d="{d}"/>'


def _trend(line: Line, x: Axis, y: Axis) -> Iterator[str]:
    """Draw the moving mean of a long line above it; the style sheet pales a line before it."""
    if len(line.steps) > TREND_FROM:
        mean = replace(line, values=moving_mean(line.values, len(line.values) // TREND_WINDOWS), low=None, high=None)
        mean = mean.thinned()
        style = f'style="--c:var(--c{line.colour % COLOURS})"'
        yield f'<path class="trend" {style} d="{_strokes(x.place(mean.steps), y.place(mean.values))}"/>'


def _strokes(at: Float[np.ndarray, " N"], places: Float[np.ndarray, " N"]) -> str:
    return "".join(f"M{'L'.join(_points(at[run], places[run]))}" for run in _runs(places) if len(run) > 1)


def _runs(values: Float[np.ndarray, " N"]) -> list[np.ndarray]:
    """List the places of numbers, cut at gaps."""
    places = np.flatnonzero(np.isfinite(values))
    return [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(run)]


def _points(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> list[str]:
    return [f"{a} {SIDE - b}" for a, b in zip(_units(x), _units(y), strict=True)]


def _units(places: Float[np.ndarray, " N"]) -> list[int]:
    return np.rint(np.clip(places, -1, 2) * SIDE).astype(int).tolist()


# --- stacks ----------------------------------------------------------------------------------------------------------


def _stacked(layers: Sequence[Line]) -> tuple[list[Line], list[Line], str]:
    """Thin layers at the same steps, and add them up; returns the layers, their upper edges, and what is off the scale.

    Gaps count as 0.
    """
    steps, values = layers[0].steps, [np.nan_to_num(layer.values) for layer in layers]
    totals = np.sum(values, axis=0)
    places = kept(totals)
    thin = [Line(layer.label, steps[places], v[places], layer.colour) for layer, v in zip(layers, values, strict=True)]
    sums = np.cumsum([line.values for line in thin], axis=0)
    tops = [replace(line, values=total) for line, total in zip(thin, sums, strict=True)]
    return thin, tops, _beyond(totals, steps)


def _layers(tops: Sequence[Line], x: Axis, y: Axis) -> Iterator[str]:
    """Draw layers from the uppermost down, each from zero, so that each shows above those below it."""
    steps = tops[0].steps
    middles = (steps[:-1] + steps[1:]) / 2
    edges = _units(x.place(np.concatenate([[x.low], middles, [x.high]])))
    for top in reversed(tops):
        heights = [SIDE - unit for unit in _units(y.place(top.values))]
        across = "".join(f"V{height}H{edge}" for height, edge in zip(heights, edges[1:], strict=True))
        style = f'style="--c:var(--c{top.colour % COLOURS})"'
        yield f'<path class="layer" {style} d="M{edges[0]} {SIDE}{across}V{SIDE}Z"/>'


def _is_beyond(totals: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Say which steps took many times the usual, as those that compile do; they would flatten the rest."""
    usual = float(np.median(totals))
    return totals > (4 * usual if usual > 0 else np.inf)


def _usual(totals: Float[np.ndarray, " N"]) -> Float[np.ndarray, " M"]:
    """Return what the axis must span: the usual totals, with room above where others are cut."""
    beyond = _is_beyond(totals)
    return np.append(totals[~beyond], 1.2 * totals[~beyond].max()) if beyond.any() else totals


def _beyond(totals: Float[np.ndarray, " N"], steps: Float[np.ndarray, " N"]) -> str:
    if not (count := int(_is_beyond(totals).sum())):
        return ""
    worst = int(np.argmax(totals))
    others = f", {count - 1} more" if count > 1 else ""
    return f"off the scale: step {steps[worst]:.0f} took {totals[worst]:.1f} s{others}"


# --- hover -----------------------------------------------------------------------------------------------------------


def _hover(lines: Sequence[Line], shown: Sequence[Line], x: Axis, y: Axis) -> str:
    """Write what the script needs: the axes, and each line's steps, values, and heights where they differ."""
    first = lines[0].steps
    series: list[dict[str, Any]] = []
    for line, drawn in zip(lines, shown, strict=True):
        one: dict[str, Any] = {"l": line.label, "c": line.colour % COLOURS, "y": _numbers(line.values)}
        if not np.array_equal(line.steps, first):
            one["x"] = _numbers(line.steps)
        if drawn is not line:
            one["t"] = _numbers(drawn.values)
        series.append(one)
    axes = {"x": [x.low, x.high], "y": [y.low, y.high], "log": y.is_log}
    return json.dumps({**axes, "steps": _numbers(first), "lines": series}, separators=(",", ":"), ensure_ascii=False)


def _numbers(values: Float[np.ndarray, " N"]) -> list[float | int | None]:
    """Round to 4 digits, steps to whole numbers; a gap is null."""
    found: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            found.append(None)
        elif value.is_integer() and abs(value) < 2**53:
            found.append(int(value))
        else:
            found.append(float(f"{value:.4g}"))
    return found
