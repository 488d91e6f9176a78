"""Draws a chart as a stretchable SVG with labels in HTML, so that the chart fits any width and texts keep their size.

The SVG is a square of ``SIDE`` units. The page stretches the square to the chart's area, but not the width of strokes.
The values that are shown under the mouse are JSON beside the SVG, which templates/report.js reads. Only some points of
a long line are drawn, so that a page of 20,000 steps stays small.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from markupsafe import Markup

Scale = Literal["linear", "zero", "share", "log"]
"""The value axis. linear: spans the values; zero: from 0 up; share: from 0 to 1; log: logarithmic, in whole decades."""
SIDE = 4000
X_LABELS, Y_LABELS = 6, 5
"""The approximate number of labels of each axis."""
COLOURS = 8
"""The number of colours in the style sheet."""
TREND_FROM, TREND_WINDOWS = 200, 40
"""A line of more than 200 steps also shows its moving mean, over windows of 1/40 of the line."""
MARKED_POINTS = 24
"""A chart marks its points if no line has more points than this."""
BUCKETS = 400
"""A long line is divided into this many buckets of steps; the lowest and the highest point of each bucket are drawn."""


@dataclass(frozen=True)
class Line:
    """A line of a chart, or a layer of a stacked chart, with N values by step. NaN leaves a gap."""

    label: str
    steps: Float[np.ndarray, " N"]
    values: Float[np.ndarray, " N"]
    colour: int = 0
    low: Float[np.ndarray, " N"] | None = None
    """The lower bound of a shaded band around the line; None without a band. ``high`` is the upper bound."""
    high: Float[np.ndarray, " N"] | None = None
    is_strong: bool = False

    def thinned(self) -> "Line":
        """Return the line with only those points that `kept` chooses."""
        places = kept(self.values)
        low, high = (None if band is None else band[places] for band in (self.low, self.high))
        return replace(self, steps=self.steps[places], values=self.values[places], low=low, high=high)


@dataclass(frozen=True)
class Chart:
    """The content of a chart."""

    title: str
    note: str
    lines: Sequence[Line]
    scale: Scale = "linear"
    is_stack: bool = False
    """Whether the lines are layers on top of each other. The value axis then ends below unusual values, such as the
    seconds of a step that compiles."""
    is_wide: bool = False
    """Whether the chart takes the whole width of the page."""
    is_named: bool = False
    """Whether there is a legend even for a single line."""


@dataclass(frozen=True)
class Drawing:
    """A drawn chart for the page."""

    chart: Chart
    legend: Sequence[tuple[int, str]]
    """The (colour, label) of each line; empty for no legend."""
    svg: Markup
    x_labels: Sequence[tuple[float, str]]
    """The (position on the axis, from 0 to 1; text) of each label."""
    y_labels: Sequence[tuple[float, str]]
    data: str
    """The values that report.js shows under the mouse, as JSON."""
    remark: str
    """A text about values that lie beyond the scale; empty if none do."""


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
        bands = [band for line in lines for band in (line.low, line.high) if band is not None]
        remark = ""
        x = steps_axis(steps.min(), steps.max())
        y = values_axis(np.concatenate([values, *bands]), chart.scale)
        marked = max(len(line.steps) for line in lines) <= MARKED_POINTS
        both = reversed(list(zip(lines, chart.lines, strict=True)))  # the first line is drawn last, on top
        paths = (path for line, whole in both for path in [*_line(line, x, y, marked), *_trend(whole, x, y)])
    labels = y.labels(Y_LABELS)
    grid = "".join(f"M0 {SIDE - unit}H{SIDE}" for unit in _units(np.array([place for place, _ in labels])))
    is_named = chart.is_named or len(lines) > 1
    return Drawing(
        chart,
        legend=[(line.colour % COLOURS, line.label) for line in chart.lines] if is_named else [],
        svg=Markup("".join([f'<path class="grid" d="{grid}"/>', *paths])),
        x_labels=x.labels(X_LABELS, whole=True),
        y_labels=labels,
        data=_hover(lines, tops, x, y),
        remark=remark,
    )


# --- lines -----------------------------------------------------------------------------------------------------------


def _line(line: Line, x: "Axis", y: "Axis", marked: bool) -> Iterator[str]:
    at = x.place(line.steps)
    if line.low is not None and line.high is not None:
        low, high = np.clip(y.place(line.low), 0, 1), np.clip(y.place(line.high), 0, 1)
        for run in _runs(low + high):
            there = _points(at[run], high[run])
            back = _points(at[run][::-1], low[run][::-1])
            yield _path("band", line, f"M{'L'.join([*there, *back])}Z")
    places = y.place(line.values)
    runs = _runs(places)
    if strokes := _strokes(at, places):
        yield _path("line strong" if line.is_strong else "line", line, strokes)
    if dots := [place for run in runs if marked or len(run) == 1 for place in run]:
        yield _path("dots", line, "".join(f"M{point}h0" for point in _points(at[dots], places[dots])))


def _trend(line: Line, x: "Axis", y: "Axis") -> Iterator[str]:
    """Draw the moving mean on top of a line of more than ``TREND_FROM`` points."""
    if len(line.steps) > TREND_FROM:
        mean = replace(line, values=moving_mean(line.values, len(line.values) // TREND_WINDOWS), low=None, high=None)
        mean = mean.thinned()
        yield _path("trend", line, _strokes(x.place(mean.steps), y.place(mean.values)))


def _path(kind: str, line: Line, d: str) -> str:
    return f'<path class="{kind}" style="--c:var(--c{line.colour % COLOURS})" d="{d}"/>'


def _strokes(at: Float[np.ndarray, " N"], places: Float[np.ndarray, " N"]) -> str:
    return "".join(f"M{'L'.join(_points(at[run], places[run]))}" for run in _runs(places) if len(run) > 1)


def _runs(values: Float[np.ndarray, " N"]) -> list[np.ndarray]:
    """Return the indices of finite values, as one array for each stretch without a gap."""
    places = np.flatnonzero(np.isfinite(values))
    return [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(run)]


def _points(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> list[str]:
    return [f"{a} {SIDE - b}" for a, b in zip(_units(x), _units(y), strict=True)]


def _units(places: Float[np.ndarray, " N"]) -> list[int]:
    return np.rint(np.clip(places, -1, 2) * SIDE).astype(int).tolist()


# --- stacks, and values beyond the scale -----------------------------------------------------------------------------


def _stacked(layers: Sequence[Line]) -> tuple[list[Line], list[Line], str]:
    """Choose the points of a stacked chart that are drawn, the same for all layers; missing values count as 0.

    Returns the layers with these points, their upper edges, and a remark about values beyond the axis.
    """
    steps, values = layers[0].steps, [np.nan_to_num(layer.values) for layer in layers]
    totals = np.sum(values, axis=0)
    places = kept(totals)
    thin = [Line(layer.label, steps[places], v[places], layer.colour) for layer, v in zip(layers, values, strict=True)]
    sums = np.cumsum([line.values for line in thin], axis=0)
    tops = [replace(line, values=total) for line, total in zip(thin, sums, strict=True)]
    return thin, tops, _beyond(totals, steps)


def _layers(tops: Sequence[Line], x: "Axis", y: "Axis") -> Iterator[str]:
    """Draw each layer as an area from 0 to its upper edge, the top layer first; lower layers are painted over it."""
    steps = tops[0].steps
    middles = (steps[:-1] + steps[1:]) / 2
    edges = _units(x.place(np.concatenate([[x.low], middles, [x.high]])))
    for top in reversed(tops):
        heights = [SIDE - unit for unit in _units(y.place(top.values))]
        across = "".join(f"V{height}H{edge}" for height, edge in zip(heights, edges[1:], strict=True))
        yield _path("layer", top, f"M{edges[0]} {SIDE}{across}V{SIDE}Z")


def _is_beyond(totals: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Mark values above 4 times the median, such as the seconds of a step that compiles.

    An axis that spans these values would flatten all others.
    """
    usual = float(np.median(totals))
    return totals > (4 * usual if usual > 0 else np.inf)


def _usual(totals: Float[np.ndarray, " N"]) -> Float[np.ndarray, " M"]:
    """Return the values that the axis must span.

    They are the values that `_is_beyond` does not mark and, if it marks any, 1.2 times the maximum of these values.
    """
    beyond = _is_beyond(totals)
    return np.append(totals[~beyond], 1.2 * totals[~beyond].max()) if beyond.any() else totals


def _beyond(totals: Float[np.ndarray, " N"], steps: Float[np.ndarray, " N"]) -> str:
    if not (count := int(_is_beyond(totals).sum())):
        return ""
    worst = int(np.argmax(totals))
    others = f", {count - 1} more" if count > 1 else ""
    return f"off the scale: step {steps[worst]:.0f} took {totals[worst]:.1f} s{others}"


# --- hover -----------------------------------------------------------------------------------------------------------


def _hover(lines: Sequence[Line], shown: Sequence[Line], x: "Axis", y: "Axis") -> str:
    """Return JSON for report.js: the axes, the first line's steps, and each line's values.

    A line has its own steps if they differ from the first line's, and in a stack also the heights of its upper edge.
    """
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
    """Convert values to JSON: 4 significant digits, whole numbers as integers, gaps as null."""

    def shown(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")

    return [shown(value) for value in values.tolist()]


# --- axes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A range of values along an axis."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return positions: 0 for ``low``, 1 for ``high``; NaN for values <= 0 on a logarithmic axis."""
        low, high = self._scaled(np.array([self.low, self.high]))
        return (self._scaled(values) - low) / (high - low)

    def labels(self, about: int, *, whole: bool = False) -> list[tuple[float, str]]:
        """Return (position, text) of about ``about`` labels, at round values; with ``whole``, at whole numbers only."""
        if not self.is_log:
            step = round_step(max(whole, (self.high - self.low) / about))
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = [number * step for number in range(first, last + 1)]
            digits = max(0, -math.floor(math.log10(step)))
            if digits > 4 or abs(self.high) >= 1e7:  # tiny or huge
                texts = [f"{value:.1e}" if value else "0" for value in values]
            else:
                texts = [f"{value + 0.0:,.{digits}f}" for value in values]
        else:
            low, high = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, math.ceil((high - low) / about))
            values = [10.0**power for power in range(low, high + 1, every)]
            texts = [f"{value:.0e}" for value in values]
        return list(zip(self.place(np.array(values)).tolist(), texts, strict=True))

    def _scaled(self, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        if not self.is_log:
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(values > 0, np.log10(values), np.nan)


def steps_axis(low: float, high: float) -> Axis:
    """Return the axis of the steps; a single step is in the middle."""
    return Axis(low, high) if high > low else Axis(low - 0.5, high + 0.5)


def values_axis(values: Float[np.ndarray, " N"], scale: Scale) -> Axis:
    """Return an axis with the given scale that spans the values, or from 0 to 1 if there are no values."""
    known = values[np.isfinite(values)]
    if scale == "share":
        return Axis(0.0, 1.0)
    if scale == "log" and (known > 0).any():
        known = known[known > 0]
        low, high = math.floor(math.log10(known.min())), math.ceil(math.log10(known.max()))
        return Axis(10.0**low, 10.0 ** max(high, low + 1), is_log=True)
    if not len(known):
        return Axis(0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if scale in ("zero", "log") and low >= 0:
        return Axis(0.0, 1.06 * high or 1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(low - margin, high + margin)


def round_step(least: float) -> float:
    """Return the smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, ... that is at least ``least``.

    >>> round_step(0.13), round_step(3.0), round_step(10.0)
    (0.2, 5.0, 10.0)
    """
    power = math.floor(math.log10(least))
    return next(f * 10.0**power for f in (1.0, 2.0, 5.0, 10.0) if f * 10.0**power >= least * (1 - 1e-9))


# --- which points are drawn ------------------------------------------------------------------------------------------


def kept(values_N: Float[np.ndarray, " N"], buckets: int = BUCKETS) -> Int[np.ndarray, " K"]:
    """Return the indices of the points to draw, ascending: all of up to ``2 * buckets`` points, otherwise fewer.

    More points are divided into buckets of consecutive points. Drawn are the lowest point, the highest point and the
    first gap (NaN) of each bucket, and the first and the last point of the line.

    >>> kept(np.array([1.0, 5.0, 2.0, 3.0, 0.0, 4.0, 9.0, 9.0]), 2).tolist()
    [0, 1, 4, 6, 7]
    """
    if len(values_N) <= 2 * buckets:
        return np.arange(len(values_N))
    found = {0, len(values_N) - 1}
    gaps_N = np.isnan(values_N)
    low_N, high_N = np.where(gaps_N, np.inf, values_N), np.where(gaps_N, -np.inf, values_N)
    for places in np.array_split(np.arange(len(values_N)), buckets):
        here = slice(places[0], places[-1] + 1)
        if (gaps := gaps_N[here]).any():
            found.add(int(places[gaps.argmax()]))
        if not gaps.all():
            found |= {int(places[low_N[here].argmin()]), int(places[high_N[here].argmax()])}
    return np.array(sorted(found))


def moving_mean(values_N: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Return the mean of a window around each point, ignoring NaNs; NaN if a window has only NaNs.

    Windows are shorter at both ends.

    >>> moving_mean(np.array([0.0, 3.0, np.nan, 5.0]), 3).tolist()
    [1.5, 1.5, 4.0, 5.0]
    """
    known_N, ones = ~np.isnan(values_N), np.ones(window)
    sums_N = np.convolve(np.where(known_N, values_N, 0.0), ones, "same")
    counts_N = np.convolve(known_N, ones, "same")
    return np.where(counts_N > 0.5, sums_N / np.maximum(counts_N, 1.0), np.nan)
