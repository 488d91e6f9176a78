"""Draws the plots of the report, as SVG that takes its text colour from the page and so fits light and dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from tpu_grpo.metrics.lines import Lines, is_number, number_or_zero, series

COLOURS = ("#3b82c4", "#e07b39", "#2fa37a", "#b05fb8", "#c9a227", "#d1495b", "#6c8ea0", "#8a6d3b")
INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
FIGURE_INCHES = (6.4, 3.3)
EVALUATION_LENGTHS = ("evaluation/tokens/", "evaluation/truncated/")
"""What evaluations measure beside rewards: it is not between 0 and 1, or not better when it is higher."""
LEGEND_CHARACTERS, HANDLE_CHARACTERS = 84, 5
"""How wide the legend is in characters, and how many of them a line and its gap to the next label take."""
MARKED_STEPS = 20
"""Up to this many steps, points are marked: a line through two of them says little."""


@dataclass(frozen=True)
class Plot:
    """Holds a plot that is ready for the page."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class _Spec:
    title: str
    note: str
    draw: Callable[[Figure, Lines], None]
    metrics: Callable[[str], bool]
    """Which metric names it shows; without any of them there is no plot."""


def render_plots(lines: Lines) -> list[Plot]:
    """Draw the plots that these metrics allow, in reading order."""
    names = {name for line in lines for name, value in line.items() if is_number(value)}
    return [Plot(s.title, s.note, _render(s, lines)) for s in _SPECS if any(map(s.metrics, names))]


# --- what each plot shows --------------------------------------------------------------------------------------------


def _draw_reward(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    steps, mean = series(lines, "rewards/mean")
    std_steps, std = series(lines, "rewards/std")
    if np.array_equal(steps, std_steps):
        axes.fill_between(steps, mean - std, mean + std, color=COLOURS[0], alpha=0.18, linewidth=0)
    parts = sorted({n for line in lines for n in line if _is_reward_part(n)})
    _draw_lines(axes, lines, {n: n.removeprefix("rewards/").removesuffix("/mean") for n in parts}, COLOURS[1:], 1.1)
    _draw_lines(axes, lines, {"rewards/mean": "total, ± std"}, COLOURS, 2.0)
    _legend(axes)


def _draw_evaluation(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    names = sorted({n for line in lines for n, v in line.items() if _is_evaluation(n) and is_number(v)})
    _draw_lines(axes, lines, {n: n.removeprefix("evaluation/") for n in names}, COLOURS, marked=True)
    _legend(axes)


def _draw_length(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    _draw_lines(axes, lines, {"completions/mean_tokens": "mean tokens"}, COLOURS)
    _from_zero(axes)


def _draw_fractions(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    names = {
        "completions/truncated_fraction": "completions truncated",
        "groups/zero_variance_fraction": "groups with equal rewards",
    }
    _draw_lines(axes, lines, names, COLOURS)
    axes.set_ylim(-0.03, 1.03)
    _legend(axes)


def _draw_agreement(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    names = {"agreement/logprob_abs_diff_max": "max", "agreement/logprob_abs_diff_mean": "mean"}
    _draw_lines(axes, lines, names, COLOURS)
    _logarithmic(axes, np.concatenate([series(lines, name)[1] for name in names]))
    _legend(axes)


def _draw_stages(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    stages = {name: label for name, label in _STAGES.items() if any(is_number(line.get(name)) for line in lines)}
    steps = np.array([line["step"] for line in lines], np.float64)
    seconds = [np.array([number_or_zero(line.get(name)) for line in lines]) for name in stages]
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    bottom = np.zeros(len(steps))
    for values, label, colour in zip(seconds, stages.values(), cycle(COLOURS), strict=False):
        axes.stairs(bottom + values, edges, baseline=bottom, fill=True, label=label, color=colour, linewidth=0)
        bottom = bottom + values
    _clip_to_usual(axes, steps, bottom)
    axes.set_ylabel("seconds")
    _legend(axes)


def _draw_speed(figure: Figure, lines: Lines) -> None:
    axes = _axes(figure)
    _draw_lines(axes, lines, {"rollout/tokens_per_second": "tokens/s"}, COLOURS)
    _from_zero(axes)


def _draw_update(figure: Figure, lines: Lines) -> None:
    shown = [name for name in _UPDATE if any(is_number(line.get(name)) for line in lines)]
    columns = 2 if len(shown) > 1 else 1
    grid = figure.subplots(-(-len(shown) // columns), columns, squeeze=False).ravel()
    for axes in grid[len(shown) :]:
        axes.remove()
    for axes, name, colour in zip(grid, shown, COLOURS, strict=False):
        _style(axes, size=8)
        _draw_lines(axes, lines, {name: name}, (colour,), 1.2)
        axes.set_title(_UPDATE[name], fontsize=9, color=INK, loc="left")


_STAGES = {
    "rollout/seconds": "rollout",
    "rewards/seconds": "rewards",
    "update/seconds": "update",
    "weights/sync_seconds": "weight sync",
}
_UPDATE = {
    "update/loss": "loss",
    "update/grad_norm": "gradient norm",
    "update/kl": "KL to the reference",
    "update/entropy": "entropy",
}


def _is_reward_part(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean") and name != "rewards/mean"


def _is_evaluation(name: str) -> bool:
    return name.startswith("evaluation/") and not name.startswith(EVALUATION_LENGTHS)


_SPECS = (
    _Spec("Reward", "Mean over the completions of a step.", _draw_reward, {"rewards/mean"}.__contains__),
    _Spec("Evaluation", "On prompts that are not trained on.", _draw_evaluation, _is_evaluation),
    _Spec("Completion length", "Mean tokens per completion.", _draw_length, {"completions/mean_tokens"}.__contains__),
    _Spec(
        "Truncated completions and idle groups",
        "Fractions. A group whose rewards are all equal teaches nothing.",
        _draw_fractions,
        {"completions/truncated_fraction", "groups/zero_variance_fraction"}.__contains__,
    ),
    _Spec(
        "Agreement of engine and trainer",
        "Absolute difference of the log-probabilities of the same tokens under the same weights.",
        _draw_agreement,
        {"agreement/logprob_abs_diff_max", "agreement/logprob_abs_diff_mean"}.__contains__,
    ),
    _Spec("Time per stage", "Seconds of each step, stacked.", _draw_stages, _STAGES.__contains__),
    _Spec("Rollout speed", "Sampled tokens per second.", _draw_speed, {"rollout/tokens_per_second"}.__contains__),
    _Spec("Update", "One value per step.", _draw_update, _UPDATE.__contains__),
)

# --- drawing ---------------------------------------------------------------------------------------------------------


def _axes(figure: Figure) -> Axes:
    axes = figure.subplots()
    _style(axes)
    axes.set_xlabel("step", fontsize=9, color=INK)
    return axes


def _style(axes: Axes, size: float = 9) -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.spines[["left", "bottom"]].set_alpha(0.4)
    axes.tick_params(colors=INK, labelsize=size, length=3, width=0.6)
    axes.yaxis.label.set(color=INK, fontsize=size)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _draw_lines(
    axes: Axes,
    lines: Lines,
    labels: Mapping[str, str],
    colours: Sequence[str],
    width: float = 1.6,
    *,
    marked: bool = False,
) -> None:
    for (name, label), colour in zip(labels.items(), cycle(colours), strict=False):
        steps, values = series(lines, name)
        marker = "o" if marked or len(steps) <= MARKED_STEPS else None
        axes.plot(steps, values, color=colour, linewidth=width, marker=marker, markersize=3.5, label=f"{label} ")


def _legend(axes: Axes) -> None:
    """Put a legend above the plot, where it hides nothing; a single line needs none."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
        columns = min(4, max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + HANDLE_CHARACTERS)))
        axes.legend(
            **place, ncols=columns, fontsize=9, frameon=False, labelcolor=INK, handlelength=1.4, columnspacing=1.2
        )


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, axes.dataLim.ymax * 1.06 or 1.0)


def _logarithmic(axes: Axes, values: Float[np.ndarray, " N"]) -> None:
    """Show whole decades around the positive values; without any the axis stays linear."""
    positive = values[values > 0]
    if len(positive):
        low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_tick_params(which="minor", color=INK, length=2, width=0.4)


def _clip_to_usual(axes: Axes, steps: Float[np.ndarray, " N"], totals: Float[np.ndarray, " N"]) -> None:
    """Keep a step many times the usual (compilation) from flattening the rest, and say how long it took."""
    usual = float(np.median(totals))
    clipped = totals > 4 * usual
    if usual <= 0 or not clipped.any():
        return
    axes.set_ylim(0, 1.25 * float(totals[~clipped].max()))
    worst = int(np.argmax(totals))
    others = f", {int(clipped.sum()) - 1} more" if clipped.sum() > 1 else ""
    text = f"off the scale: step {steps[worst]:.0f} took {totals[worst]:.1f} s{others}"
    axes.annotate(text, (0.99, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=8, color=INK)


def _render(spec: _Spec, lines: Lines) -> str:
    salt = re.sub(r"\W", "", spec.title)  # keeps the ids of several drawings on one page apart, and the same each time
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False}):
        figure = Figure(figsize=FIGURE_INCHES, layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        spec.draw(figure, lines)
        return _inline(figure, salt)


def _inline(figure: Figure, prefix: str) -> str:
    """Return the drawing as an ``<svg>`` element without namespaces, metadata or fixed size, in the page's colour."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    svg = re.sub(r'(<g id=")', rf"\g<1>{prefix}_", svg)
    return svg.replace(INK, "currentColor")
