"""Says how a run stands: going on, done, stopped, failed, or gone without a word."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from tpu_grpo.hosts import End
from tpu_grpo.observe.metrics.jsonl import write_json
from tpu_grpo.observe.metrics.run_files import END_FILE

Outcome = Literal["going", "done", "stopped", "failed", "gone"]


@dataclass(frozen=True)
class Standing:
    """How far a run has come, and whether it goes on."""

    outcome: Outcome
    """``gone``: it neither goes on nor has said how it ended."""
    step: int = 0
    max_steps: int | None = None
    """None where nobody knows."""
    message: str = ""
    exit_code: int | None = None
    at: str = ""
    """When it ended; while it goes on, when this was so. In UTC."""
    seconds_left: float | None = None

    @classmethod
    def after(cls, end: End, step: int, max_steps: int) -> Self:
        """Say how a run stands that has just ended."""
        return cls(end.outcome, step, max_steps, end.message, end.code, now())

    @property
    def sentence(self) -> str:
        """Say it to people."""
        reached = f"step {self.step:,}" + ("" if self.max_steps is None else f" of {self.max_steps:,}")
        match self.outcome:
            case "going":
                left = "" if self.seconds_left is None else f", about {_duration(self.seconds_left)} left"
                return f"The run goes on: {reached}{left}; written {self.at}."
            case "done":
                early = f": {self.message}" if self.message else ""
                return f"The run is done, after {reached}{early}." + (f" It ended {self.at}." if self.at else "")
            case "stopped":
                return f"The run was stopped after {reached}, {self.at}: {self.message}."
            case "failed":
                return f"The run failed after {reached}, {self.at}, with exit code {self.exit_code}."
            case "gone":
                return (
                    f"The run ended after {reached} without saying why: it was killed, or its machine was lost; its "
                    "log may say more."
                )


def now() -> str:
    """Return the time as pages show it."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def write_end(run_dir: Path, standing: Standing) -> None:
    """Leave in the directory how the run ended."""
    fields = {name: value for name, value in asdict(standing).items() if name != "seconds_left"}
    write_json(run_dir / END_FILE, fields)


def standing_of(
    end: Mapping[str, Any], summary: Mapping[str, Any], step: int, max_steps: int | None, *, goes_on: bool
) -> Standing:
    """Say how a run stands by the files that it left.

    Args:
        end: what ``end.json`` holds; empty without one.
        summary: what ``summary.json`` holds; empty without one. Of runs before ``end.json`` it says that they are done.
        step: the last step in ``metrics.jsonl``.
        max_steps: by the config.
        goes_on: whether a process has the directory.
    """
    here = Standing("going", step, max_steps, at=now())
    if goes_on:
        return here
    if end.get("outcome") in ("done", "stopped", "failed"):
        known = {name: end[name] for name in ("outcome", "message", "exit_code", "at") if name in end}
        return replace(here, **known)
    if summary and summary.get("steps") == step:
        return replace(here, outcome="done", message=str(summary.get("ended_early") or ""), at="")
    return replace(here, outcome="gone", at="")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
