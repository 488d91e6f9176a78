"""Says what each chart shows: of one run, and of several runs over each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpu_grpo.observe.metrics.lines import Lines, Record, is_number, number_or_zero, series
from tpu_grpo.observe.report.axes import Scale
from tpu_grpo.observe.report.drawing import Chart, Line
from tpu_grpo.observe.report.reading import RunRead

EVALUATION_LENGTHS = ("evaluation/tokens/", "evaluation/truncated/", "evaluation/failed/")
"""What evaluations measure beside rewards: it is not between 0 and 1, or not better when it is higher."""
STAGES = {
    "rollout/seconds": "rollout",
    "rewards/seconds": "rewards",
    "update/seconds": "update",
    "weights/sync_seconds": "weight sync",
}


@dataclass(frozen=True)
class _Spec:
    """A chart of metrics by step; a metric that no line has is left out, and a chart without any, too."""

    title: str
    note: str
    labels: dict[str, str]
    """Metric -> its label. A comparison shows the first."""
    scale: Scale = "linear"
    unless_zero: bool = False
    """Leave it out where every value is 0, which means that it is switched off."""


SPECS = (
    _Spec(
        "Completion length",
        "Mean tokens per completion.",
        {"completions/mean_tokens": "mean tokens"},
        "zero",
    ),
    _Spec(
        "Truncated completions and idle groups",
        "Shares. A group whose rewards are all equal teaches nothing.",
        {
            "completions/truncated_fraction": "completions truncated",
            "groups/zero_variance_fraction": "groups with equal rewards",
        },
        "share",
    ),
    _Spec(
        "Turns and calls",
        "Per conversation.",
        {
            "episodes/turns_mean": "turns, mean",
            "episodes/turns_max": "turns, most",
            "episodes/calls_mean": "tool calls, mean",
        },
        "zero",
    ),
    _Spec(
        "Tokens of conversations",
        "Means per conversation, and per turn.",
        {
            "episodes/tokens_mean": "sampled",
            "episodes/observation_tokens_mean": "answered by the environment",
            "turns/tokens_mean": "sampled in a turn",
        },
        "zero",
    ),
    _Spec(
        "How conversations end",
        "Shares.",
        {
            "episodes/ended_answered": "with an answer",
            "episodes/ended_done": "by the environment",
            "episodes/ended_turns": "cut at the most turns",
            "episodes/ended_tokens": "cut at the longest length",
            "episodes/ended_failed": "environment failed",
        },
        "share",
        True,
    ),
    _Spec(
        "Calls that failed",
        "Per turn: calls that could not be read, or raised.",
        {"turns/bad_calls": "calls that failed"},
        "zero",
        True,
    ),
    _Spec(
        "Wait for environments",
        "Seconds of a conversation in which its environment worked.",
        {"episodes/wait_seconds_mean": "mean", "episodes/wait_seconds_max": "longest"},
        "zero",
    ),
    _Spec(
        "Agreement of engine and trainer",
        "Absolute difference of the log-probabilities of the same tokens under the same weights.",
        {"agreement/logprob_abs_diff_max": "largest", "agreement/logprob_abs_diff_mean": "mean"},
        "log",
    ),
    _Spec("Rollout speed", "Sampled tokens per second.", {"rollout/tokens_per_second": "tokens/s"}, "zero"),
    _Spec("Entropy", "Mean over tokens, in nats.", {"update/entropy": "entropy"}, "zero"),
    _Spec("KL to the reference", "Per token.", {"update/kl": "KL"}, unless_zero=True),
    _Spec("Loss", "Of the whole step.", {"update/loss": "loss"}),
    _Spec("Gradient norm", "Before clipping.", {"update/grad_norm": "gradient norm"}, "zero"),
    _Spec("Clipped tokens", "Share of tokens where the clip acted.", {"update/clip_fraction": "clipped"}, "zero", True),
    _Spec(
        "Memory",
        "GiB, at the end of each step; of devices, the fullest one of this host.",
        {
            "memory/device_peak_gib": "device, highest so far",
            "memory/device_gib": "device",
            "memory/host_gib": "host process",
        },
        "zero",
    ),
)
"""The charts below reward, evaluation and stages, in reading order."""


def run_charts(run: RunRead) -> list[Chart]:
    """List the charts that a run's metrics allow, in reading order."""
    found = [_reward(run.lines), _evaluation(run), *(_metrics(spec, run.lines) for spec in SPECS)]
    found.insert(2 + [spec.title for spec in SPECS].index("Rollout speed"), _stages(run.lines))
    return [chart for chart in found if chart is not None]


def comparison_charts(runs: Sequence[tuple[str, RunRead]]) -> list[Chart]:
    """List charts with a line for each run, which is given with its label: its colour is its place."""
    found = [_overlaid(runs, "Reward", "Mean over the completions of a step.", "rewards/mean", is_wide=True)]
    names = dict.fromkeys(name for _, run in runs for name in evaluation_names(evaluation_lines(run)))
    for number, name in enumerate(names):
        title, scale = f"Held out: {evaluation_label(name)}", "linear"
        found.append(_overlaid(runs, title, "With 95 % intervals.", name, scale, _of_evaluations, is_wide=not number))
    if (seconds := _overlaid(runs, "Seconds per step", "All stages.", "", "zero", _of_stages)) is not None:
        found.append(replace(seconds, is_cut=True))
    found += [chart for spec in SPECS for chart in _compared(spec, runs)]
    return [chart for chart in found if chart is not None]


# --- one run ---------------------------------------------------------------------------------------------------------


def _reward(lines: Lines) -> Chart | None:
    if (total := _line("rewards/mean", "total", lines, is_strong=True)) is None:
        return None
    names = {n: _reward_label(n) for n in sorted({n for line in lines for n in line if _is_reward_part(n)})}
    parts = [part for name, label in names.items() if (part := _line(name, label, lines)) is not None]
    same = [part.label for part in parts if np.array_equal(part.values, total.values, equal_nan=True)]
    parts = [replace(part, colour=place) for place, part in enumerate((p for p in parts if p.label not in same), 1)]
    std_steps, std = series(lines, "rewards/std")
    low, high = (total.values - std, total.values + std) if np.array_equal(total.steps, std_steps) else (None, None)
    label = f"total{''.join(f', {name}' for name in same)}{'' if low is None else ' ± standard deviation'}"
    return Chart(
        "Reward",
        "Mean over the completions of a step.",
        [replace(total, label=label, low=low, high=high), *parts],
        is_wide=True,
    )


def _evaluation(run: RunRead) -> Chart | None:
    records = evaluation_lines(run)
    lines = [_of_evaluations(records, name, number) for number, name in enumerate(evaluation_names(records))]
    known = [line for line in lines if line is not None]
    if not known:
        return None
    values = np.concatenate([line.values for line in known])
    inside = bool(((values >= 0) & (values <= 1) | np.isnan(values)).all())
    note = "On prompts that are not trained on, with 95 % intervals."
    return Chart("Evaluation", note, known, "share" if inside else "linear", is_wide=True)


def _stages(lines: Lines) -> Chart | None:
    names = {name: label for name, label in STAGES.items() if any(is_number(line.get(name)) for line in lines)}
    if not names:
        return None
    steps = np.array([line["step"] for line in lines], np.float64)
    layers = [
        Line(label, steps, np.array([number_or_zero(line.get(name)) for line in lines]), number)
        for number, (name, label) in enumerate(names.items())
    ]
    return Chart("Time per stage", "Seconds of each step, stacked.", layers, "zero", is_stack=True)


def _metrics(spec: _Spec, lines: Lines) -> Chart | None:
    if spec.unless_zero and all(_is_zero(name, lines) for name in spec.labels):
        return None
    found = [line for name, label in spec.labels.items() if (line := _line(name, label, lines)) is not None]
    known = [replace(line, colour=number) for number, line in enumerate(found)]
    return Chart(spec.title, spec.note, known, spec.scale, is_named=len(spec.labels) > 1) if known else None


# --- several runs ----------------------------------------------------------------------------------------------------

Take = Callable[[Lines, str, int], Line | None]


def _of_metrics(lines: Lines, name: str, colour: int) -> Line | None:
    return _line(name, name, lines, colour)


def _of_evaluations(records: Lines, name: str, colour: int) -> Line | None:
    """Take the values of evaluations with their intervals, where these are known."""
    if (line := _line(name, evaluation_label(name), records, colour)) is None:
        return None
    bounds = [_interval(record, name) for record in records if name in record]
    low, high = (np.array([bound[end] for bound in bounds]) for end in (0, 1))
    return Line(line.label, line.steps, line.values, colour, low, high)


def _of_stages(lines: Lines, name: str, colour: int) -> Line | None:
    known = [line for line in lines if any(is_number(line.get(stage)) for stage in STAGES)]
    if not known:
        return None
    seconds = [sum(number_or_zero(line.get(stage)) for stage in STAGES) for line in known]
    return Line(name, np.array([line["step"] for line in known], np.float64), np.array(seconds), colour)


def _overlaid(
    runs: Sequence[tuple[str, RunRead]],
    title: str,
    note: str,
    name: str,
    scale: Scale = "linear",
    take: Take = _of_metrics,
    *,
    is_wide: bool = False,
) -> Chart | None:
    found = []
    for number, (label, run) in enumerate(runs):
        lines = evaluation_lines(run) if take is _of_evaluations else run.lines
        if (line := take(lines, name, number)) is not None:
            found.append(Line(label, line.steps, line.values, number, line.low, line.high))
    return Chart(title, note, found, scale, is_wide=is_wide) if found else None


def _compared(spec: _Spec, runs: Sequence[tuple[str, RunRead]]) -> Iterator[Chart | None]:
    """Show the first metric of a chart that is there; of shares, which say different things, each."""
    lines = [line for _, run in runs for line in run.lines]
    known = {name: label for name, label in spec.labels.items() if any(is_number(line.get(name)) for line in lines)}
    for name, label in list(known.items())[: None if spec.scale == "share" else 1]:
        of_several = label.capitalize() if spec.scale == "share" else f"{spec.title}: {label}"
        title = spec.title if len(spec.labels) == 1 else of_several
        if not (spec.unless_zero and _is_zero(name, lines)):
            yield _overlaid(runs, title, spec.note, name, spec.scale)


# --- values ----------------------------------------------------------------------------------------------------------


def evaluation_lines(run: RunRead) -> Lines:
    """Return the evaluations of a run; of runs without their file, what the steps say of them."""
    return run.evaluations or [line for line in run.lines if any(map(_is_evaluation, line))]


def evaluation_names(records: Lines) -> list[str]:
    """List the rewards that were evaluated, by the names of metrics."""
    return list(dict.fromkeys(n for record in records for n, v in record.items() if _is_evaluation(n) and is_number(v)))


def evaluation_label(name: str) -> str:
    """Say ``greedy exact_answer`` for ``evaluation/greedy/exact_answer``."""
    return name.removeprefix("evaluation/").replace("/", " ")


def _interval(record: Record, name: str) -> tuple[float, float]:
    bounds = (record.get("intervals") or {}).get(name.removeprefix("evaluation/")) or ()
    low, high = (bounds[end] if len(bounds) > 1 and is_number(bounds[end]) else np.nan for end in (0, 1))
    return low, high


def _line(name: str, label: str, lines: Lines, colour: int = 0, *, is_strong: bool = False) -> Line | None:
    """Take a metric's values; None where no line has a number."""
    steps, values = series(lines, name)
    return Line(label, steps, values, colour, is_strong=is_strong) if np.isfinite(values).any() else None


def _is_zero(name: str, lines: Lines) -> bool:
    return not any(number_or_zero(line.get(name)) for line in lines)


def _reward_label(name: str) -> str:
    return name.removeprefix("rewards/").removesuffix("/mean")


def _is_reward_part(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean") and name != "rewards/mean"


def _is_evaluation(name: str) -> bool:
    return name.startswith("evaluation/") and not name.startswith(EVALUATION_LENGTHS)
