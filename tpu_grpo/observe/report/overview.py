"""Sums a run up: a few figures, the settings that matter most, and its evaluations as a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_grpo.observe.metrics.lines import Lines, Record, is_number, number_or_zero, numbers
from tpu_grpo.observe.metrics.summary import EDGE_STEPS
from tpu_grpo.observe.report.charts import STAGES, evaluation_label, evaluation_lines, evaluation_names
from tpu_grpo.observe.report.reading import RunRead
from tpu_grpo.observe.report.tables import Cell, Column, Table, decimal


@dataclass(frozen=True)
class Figure:
    """Holds one of the few figures at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Reward:
    """Says what the reward was at first and at last: means over steps that the two do not share."""

    first: float
    last: float
    steps: int
    """How many steps each is the mean of."""


def reward_of(lines: Lines) -> Reward | None:
    """Average the first and the last steps, five of each where there are ten; None without a reward.

    Shorter runs average half of their steps, so that a change shows from two steps on. One step is first and last.
    """
    if not (values := numbers(lines, "rewards/mean")):
        return None
    count = max(1, min(EDGE_STEPS, len(values) // 2))
    return Reward(sum(values[:count]) / count, sum(values[-count:]) / count, count)


def figures(run: RunRead) -> Iterator[Figure]:
    """List at most five figures."""
    if reward := reward_of(run.lines):
        several = f", each the mean of {reward.steps} steps" if reward.steps > 1 else ""
        if len(numbers(run.lines, "rewards/mean")) > 1:
            change = f"{reward.last - reward.first:+.3f}{several}"
            yield Figure("reward, first → last", f"{reward.first:.3f} → {reward.last:.3f}", change)
        else:
            yield Figure("reward", f"{reward.first:.3f}", "of one step")
    records = evaluation_lines(run)
    if name := best_name(run.config, records):
        first, last = numbers(records, name)[0], numbers(records, name)[-1]
        times = f"{first:.3f} → {last:.3f}" if len(records) > 1 else f"{last:.3f}"
        yield Figure("held out", times, evaluation_label(name))
    if seconds := seconds_per_step(run.lines):
        speeds = numbers(run.lines, "rollout/tokens_per_second")
        sampled = f"{median(speeds):,.0f} tokens/s sampled" if speeds else ""
        yield Figure("seconds per step, median", f"{median(seconds):.3g}", sampled)
    if gaps := numbers(run.lines, "agreement/logprob_abs_diff_max"):
        yield Figure("log-probability gap", f"{max(gaps):.1e}", "largest, engine against trainer")


def best_name(config: Mapping[str, Any], records: Lines) -> str:
    """Return the metric that decides which evaluation is the best; empty without one."""
    names = evaluation_names(records)
    section = config.get("evaluation")
    chosen = section.get("best") if isinstance(section, dict) else None
    return f"evaluation/{chosen}" if f"evaluation/{chosen}" in names else next(iter(names), "")


def seconds_per_step(lines: Lines) -> list[float]:
    """Add up the stages of each step."""
    return [
        sum(number_or_zero(line.get(name)) for name in STAGES)
        for line in lines
        if any(is_number(line.get(name)) for name in STAGES)
    ]


def settings_line(config: Mapping[str, Any]) -> str:
    """Say in a line what a run is: model, data, algorithm, sizes and learning rate, as far as the config has them."""
    prompts, group = _setting(config, "data.prompts_per_step"), _setting(config, "algorithm.group_size")
    rate = _setting(config, "optimizer.learning_rate")
    parts = [
        _setting(config, "model.path"),
        _setting(config, "data.path"),
        _setting(config, "algorithm.name"),
        f"{prompts} prompts × {group} completions a step" if prompts and group else None,
        f"learning rate {rate:g}" if is_number(rate) else None,
    ]
    return " · ".join(dict.fromkeys(str(part) for part in parts if part))


def evaluation_table(run: RunRead) -> Table | None:
    """Show every evaluated reward at first, at its best and at last, with intervals; None without an evaluation."""
    records = evaluation_lines(run)
    if not records:
        return None
    several = len(records) > 1
    heads = ["first", "highest", "last"] if several else [f"step {records[0]['step']:,}"]
    rows = []
    for name in evaluation_names(records):
        known = [record for record in records if is_number(record.get(name))]
        chosen = [known[0], max(known, key=lambda record: record[name]), known[-1]] if several else known
        rows.append([Cell(evaluation_label(name)), *(value_cell(record, name, say_step=several) for record in chosen)])
    columns = [Column("held out"), *(Column(head, is_number=True) for head in heads)]
    return Table("Evaluation", "With 95 % intervals.", columns, rows)


def value_cell(record: Record, name: str, *, say_step: bool, is_best: bool = False) -> Cell:
    """Show an evaluated value, with its interval and its step below."""
    bounds = (record.get("intervals") or {}).get(name.removeprefix("evaluation/")) or ()
    known = [f"{bounds[0]:.3f} to {bounds[1]:.3f}"] if all(map(is_number, bounds[:2])) and len(bounds) > 1 else []
    step = [f"step {record['step']:,}"] if say_step else []
    return Cell(decimal(record[name], ".3f"), ", ".join([*known, *step]), is_best)


def _setting(config: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    found = config.get(section)
    return found.get(key) if isinstance(found, dict) else None


def median(values: Sequence[float]) -> float:
    """Return the middle one of the values, of which there is at least one."""
    return sorted(values)[len(values) // 2]
