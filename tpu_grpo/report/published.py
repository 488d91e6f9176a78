"""Compares a run with published results of the same recipe, only at the points that were published.

    published = read_published("qwen3_1p7b_gsm8k")       # configs/reference/qwen3_1p7b_gsm8k.json; or a path
    published.sentences(lines, config)                   # at the end of the run

A point has a value, a range or both, and the first and last step over which the run's metric is averaged. With
steps [100, 100] the metric at step 100 is compared, once step 100 is done.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from tpu_grpo.config import SHIPPED_CONFIGS, load_config
from tpu_grpo.config.section import PositiveInt, Section
from tpu_grpo.config.setting_names import effect_of
from tpu_grpo.observe.json_lines import Lines, numbers
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.untrusted_input import parse_json, read_file
from tpu_grpo.report.run_reader import ABSENT, differences

REFERENCES = SHIPPED_CONFIGS / "reference"
"""The directory with the points of each published run, NAME.json, beside its config, NAME.yaml."""
SHOWN_SETTINGS = 6


class Point(Section):
    """A result that was published for some steps."""

    by: str
    """Who measured the result, and with which software."""
    steps: tuple[PositiveInt, PositiveInt]
    """The first and the last step over which the run's metric is averaged."""
    value: float | None = None
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if (self.low is None) != (self.high is None) or (self.value is None and self.low is None):
            raise ValueError("must have a value, or low and high, or all three")
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"must have steps in order, got {list(self.steps)}")
        return self

    @property
    def when(self) -> str:
        """The steps, as text."""
        first, last = self.steps
        return f"step {last}" if first == last else f"steps {first} to {last}"

    @property
    def what(self) -> str:
        """The value and the range, as text."""
        between = "" if self.low is None else f"{self.low:g} to {self.high:g}"
        return between if self.value is None else f"{self.value:g}{between and f' ({between})'}"

    def verdict(self, own: float) -> str:
        """Say whether the run's value ``own`` is in the published range; without a range, how much ``own`` differs."""
        if self.low is None or self.high is None:
            return f"differs by {own - (self.value or 0.0):+.4f}"
        beyond = own - min(max(own, self.low), self.high)
        return f"outside, by {beyond:+.4f}" if beyond else "inside"


class Published(Section):
    """The published results of a run."""

    path: Path
    source: str
    metric: str
    """The name of the metric that is compared."""
    doubt: str = ""
    """What is not certain about source, recipe or metric."""
    points: tuple[Point, ...] = Field(min_length=1)

    def own(self, point: Point, lines: Lines) -> float | None:
        """Average the run's metric over the steps of a point; None if the run has not done the last of these steps, or
        if the metric has no value in any of them."""
        first, last = point.steps
        values = numbers((line for line in lines if first <= line["step"] <= last), self.metric)
        return fmean(values) if values and lines[-1]["step"] >= last else None

    def sentences(self, lines: Lines, config: Mapping[str, Any]) -> list[str]:
        """Compare the run with the points that it has come to, in one sentence each. If the run is outside all ranges
        of the last step, another sentence says which settings or metrics to look at first."""
        owns = [(point, self.own(point, lines)) for point in self.points]
        known = [(point, own) for point, own in owns if own is not None]
        said = [
            f"{point.when}: {self.metric} {own:.4f}; {point.by}: {point.what}; {point.verdict(own)}"
            for point, own in known
        ]
        last = max((point.steps[1] for point, _ in known if point.low is not None), default=0)
        at_last = [point.verdict(own) for point, own in known if point.steps[1] == last and point.low is not None]
        if at_last and "inside" not in at_last:
            said.append(f"the run is outside of what was published: {self._where_to_look(lines, config)}")
        return said

    def _where_to_look(self, lines: Lines, config: Mapping[str, Any]) -> str:
        """Name settings that affect results and differ from the reference's; if none do, metrics to look at first."""
        reference = self.path.with_suffix(".yaml")
        if reference.is_file() and (changed := list(_other_settings(reference, config))):
            more = f", and {len(changed) - SHOWN_SETTINGS} more" if len(changed) > SHOWN_SETTINGS else ""
            return (
                f"look first at the settings that are not the reference's: {'; '.join(changed[:SHOWN_SETTINGS])}{more}"
            )
        names = ("agreement/logprob_abs_diff_mean", "completions/truncated_fraction")
        figures = [f"{name} ({values[-1]:.3g})" for name in names if (values := numbers(lines, name))]
        same = "its settings are the reference's, so " if reference.is_file() else ""
        return f"{same}look first at {', '.join([*figures, 'samples.jsonl'])}, then try another run.seed"


def _other_settings(reference: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that affect results and differ from the reference's config."""
    theirs = load_config(reference)
    ends = theirs.optimizer.ends_with_run
    for name, (their, own) in differences([theirs.model_dump(mode="json"), config]).items():
        if their != ABSENT and effect_of(name, rate_ends_with_run=ends) == "results":
            yield f"{name}: {own} for {their}"


def read_published(name: str) -> Published:
    """Read the published results of a reference run, by the run's name or from a file.

    Raises:
        ConfigError: there is no such run, or the file is malformed.
    """
    path = Path(name) if name.endswith(".json") else REFERENCES / f"{name}.json"
    try:
        found = parse_json(read_file(path))
        return Published.model_validate({**found, "path": path})
    except FileNotFoundError:
        known = ", ".join(sorted(each.stem for each in REFERENCES.glob("*.json")))
        raise ConfigError(
            f"logging.against must be one of {known}, or a file NAME.json, got {name}; correct it"
        ) from None
    except (OSError, ValueError, TypeError) as error:  # a ValidationError and an error of JSON are ValueErrors
        raise ConfigError(f"{path} must hold points as configs/reference has them ({error}); mend it") from error
