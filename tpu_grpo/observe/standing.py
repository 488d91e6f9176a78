"""How a run stands: going on, done, stopped, failed or gone; and the file that says how it ended."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from tpu_grpo.hosts import End
from tpu_grpo.observe.run_files import END_FILE
from tpu_grpo.records.json_files import write_json


@dataclass(frozen=True)
class Standing:
    """The state of a run: its steps so far, and whether it goes on."""

    outcome: Literal["going", "done", "stopped", "failed", "gone"]
    """``gone`` means that the run neither goes on nor recorded how it ended."""
    step: int = 0
    max_steps: int | None = None
    """The setting run.max_steps; None if it is not known."""
    message: str = ""
    exit_code: int | None = None
    at: str = ""
    """The time (UTC) when the run ended; for a run that goes on, the time of this state."""
    seconds_left: float | None = None

    @classmethod
    def after(cls, end: End, step: int, max_steps: int) -> Self:
        """Return the state of a run that has just ended."""
        return cls(end.outcome, step, max_steps, end.message, end.code, now())

    @property
    def sentence(self) -> str:
        """Describe the state in words."""
        reached = f"step {self.step:,}" + ("" if self.max_steps is None else f" of {self.max_steps:,}")
        match self.outcome:
            case "going":
                left = ""
                if self.seconds_left is not None:
                    minutes = round(self.seconds_left / 60)
                    hours = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
                    left = f", about {f'{self.seconds_left:.0f} s' if minutes < 2 else hours} left"
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
    """Write how the run ended to ``end.json``."""
    fields = {name: value for name, value in asdict(standing).items() if name != "seconds_left"}
    write_json(run_dir / END_FILE, fields)
