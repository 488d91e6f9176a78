"""Selects the content of each chart of a run's page."""

from dataclasses import dataclass, replace

import numpy as np

from tpu_grpo.observe.json_lines import Lines, interval_of, is_number, number_or_zero, series
from tpu_grpo.report.chart_drawing import Chart, Line, Scale
from tpu_grpo.report.run_reader import RunRead, setting_of

EVALUATION_LENGTHS = ("evaluation/tokens/", "evaluation/truncated/", "evaluation/failed/")
"""Prefixes of evaluation metrics that are not rewards: token counts, and shares for which lower is better."""
STAGES = {
    "rollout/seconds": "rollout",
    "rewards/seconds": "rewards",
    "update/seconds": "update",
    "weights/sync_seconds": "weight sync",
}


@dataclass(frozen=True)
class _Spec:
    """Describes a chart of metrics by step. Metrics that a run lacks are left out, and charts without any metric."""

    title: str
    note: str
    labels: dict[str, str]
    """Metric -> label."""
    scale: Scale = "linear"
    unless_zero: bool = False
    """Whether the chart is left out if every value is 0, which means that its feature is switched off."""

    def is_off(self, lines: Lines) -> bool:
        """Return whether the chart is left out because its feature is switched off."""
        return self.unless_zero and not any(number_or_zero(line.get(name)) for line in lines for name in self.labels)


SPECS = (
    _Spec("Completion length", "Mean tokens per completion.", {"completions/mean_tokens": "mean tokens"}, "zero"),
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
"""All charts but those of reward, evaluation and stages, in reading order."""


def run_charts(run: RunRead) -> list[Chart]:
    """Return the charts that a run's metrics allow, in reading order."""
    found = [_reward(run.lines), _evaluation(run), *_teachers(run.lines)]
    for spec in SPECS:
        if spec.title == "Rollout speed":
            found.append(_stages(run))
        known = [line for name, label in spec.labels.items() if (line := _line(name, label, run.lines)) is not None]
        if known and not spec.is_off(run.lines):
            known = [replace(line, colour=number) for number, line in enumerate(known)]
            found.append(Chart(spec.title, spec.note, known, spec.scale, is_named=len(spec.labels) > 1))
    return [chart for chart in found if chart is not None]


def _reward(lines: Lines) -> Chart | None:
    if (total := _line("rewards/mean", "total", lines)) is None:
        return None
    names = sorted({n for line in lines for n in line if n.startswith("rewards/") and n.endswith("/mean")})
    labels = {n: n.removeprefix("rewards/").removesuffix("/mean") for n in names if n != "rewards/mean"}
    parts = [part for name, label in labels.items() if (part := _line(name, label, lines)) is not None]
    same = [part.label for part in parts if np.array_equal(part.values, total.values, equal_nan=True)]
    parts = [replace(part, colour=place) for place, part in enumerate((p for p in parts if p.label not in same), 1)]
    std_steps, std = series(lines, "rewards/std")
    low, high = (total.values - std, total.values + std) if np.array_equal(total.steps, std_steps) else (None, None)
    label = f"total{''.join(f', {name}' for name in same)}{'' if low is None else ' ± standard deviation'}"
    total = replace(total, label=label, low=low, high=high, is_strong=True)
    return Chart("Reward", "Mean over the completions of a step.", [total, *parts], is_wide=True)


def _teachers(lines: Lines) -> list[Chart]:
    """Make a chart of the distance to each teacher, for all tokens and for each quarter of the longest completion."""
    ends, found = ("/kl", *(f"/kl_quarter_{quarter}" for quarter in range(1, 5))), list[Chart]()
    labels = ("all tokens", "first quarter", "second quarter", "third quarter", "last quarter")
    known = {n.removesuffix("/kl") for line in lines for n in line if n.startswith("teachers/") and n.endswith("/kl")}
    for prefix in sorted(known):
        of_each = [_line(prefix + end, label, lines) for end, label in zip(ends, labels, strict=True)]
        shown = [replace(line, colour=place) for place, line in enumerate(line for line in of_each if line is not None)]
        note = "KL(policy || teacher) in nats per sampled token, by the token's place in the longest completion."
        found.append(Chart(f"Distance to the teacher {prefix.removeprefix('teachers/')}", note, shown, "zero"))
    return found


def _evaluation(run: RunRead) -> Chart | None:
    records = evaluation_lines(run)
    lines = [_evaluated(name, records) for name in evaluation_names(records)]
    known = [replace(line, colour=number) for number, line in enumerate(lines) if line is not None]
    if not known:
        return None
    values = np.concatenate([line.values for line in known])
    inside = bool(((values >= 0) & (values <= 1) | np.isnan(values)).all())
    note = "On prompts that are not trained on, with 95 % intervals."
    return Chart("Evaluation", note, known, "share" if inside else "linear", is_wide=True)


def _stages(run: RunRead) -> Chart | None:
    lines = run.lines
    names = {name: label for name, label in STAGES.items() if any(is_number(line.get(name)) for line in lines)}
    if not names:
        return None
    steps = np.array([line["step"] for line in lines], np.float64)
    layers = [
        Line(label, steps, np.array([number_or_zero(line.get(name)) for line in lines]), number)
        for number, (name, label) in enumerate(names.items())
    ]
    if setting_of(run.config, "algorithm", "staleness"):
        note = "Seconds; from step 2 on, a rollout takes place during the update of the step before."
        return Chart("Time per stage", note, layers, "log")
    return Chart("Time per stage", "Seconds of each step, stacked.", layers, "zero", is_stack=True)


# --- values ----------------------------------------------------------------------------------------------------------


def evaluation_lines(run: RunRead) -> Lines:
    """Return a run's evaluations: the lines of evaluation.jsonl, or if it has none, those of metrics.jsonl."""
    return run.evaluations or [line for line in run.lines if any(map(_is_evaluation, line))]


def evaluation_names(records: Lines) -> list[str]:
    """Return the metric names of all evaluated rewards, such as ``evaluation/greedy/exact_answer``."""
    return list(dict.fromkeys(n for record in records for n, v in record.items() if _is_evaluation(n) and is_number(v)))


def evaluation_label(name: str) -> str:
    """Return ``greedy exact_answer`` for ``evaluation/greedy/exact_answer``."""
    return name.removeprefix("evaluation/").replace("/", " ")


def _line(name: str, label: str, lines: Lines) -> Line | None:
    """Make the line of a metric's values; None if no value is a number."""
    steps, values = series(lines, name)
    return Line(label, steps, values) if np.isfinite(values).any() else None


def _evaluated(name: str, records: Lines) -> Line | None:
    """Make the line of an evaluated metric, with its intervals as the band; None if no value is a number."""
    if (line := _line(name, evaluation_label(name), records)) is None:
        return None
    low, high = np.array([interval_of(record, name) for record in records if name in record]).T
    return replace(line, low=low, high=high)


def _is_evaluation(name: str) -> bool:
    return name.startswith("evaluation/") and not name.startswith(EVALUATION_LENGTHS)
