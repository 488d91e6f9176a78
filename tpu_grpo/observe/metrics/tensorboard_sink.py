"""Logs to TensorBoard: event files under ``run.dir/tensorboard``, which ``tensorboard --logdir`` shows.

The files are written here and now, without tensorboardX's own queue: its thread ends at the first error of the disk,
and whoever puts into the queue then waits for ever.
"""

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_grpo.observe.metrics.console import pick_rows, visible
from tpu_grpo.observe.metrics.lines import is_number, names_in
from tpu_grpo.observe.metrics.run_files import TENSORBOARD_DIR
from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.observe.metrics.values import MetricValue
from tpu_grpo.records.errors import ConfigError

LIBRARY = "tensorboardX"
SHOWN_ROWS = 8
SHOWN_CHARACTERS = 1000


class TensorBoardSink:
    """Logs every metric that is a number as a scalar of its own name, and some samples as a table.

    Args:
        run_dir: the run's.
        start_step: the number of steps already done, 0 for a new run. TensorBoard drops what an earlier part of the
            run has logged beyond it, because those steps are done again.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self._event = Event
        directory = run_dir / TENSORBOARD_DIR
        directory.mkdir(parents=True, exist_ok=True)
        # the library adds the time in seconds, which two parts of a run may share
        self._file = EventsWriter(str(directory / "events"), f".{os.getpid()}.{start_step}")
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=start_step + 1, session_log=start))
        self._file.flush()

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Log one step."""
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if name != "step" and is_number(value)
        ]
        self._log(int(metrics["step"]), Summary(value=values))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log a table of the best row, the worst one, and others drawn by the step."""
        from tensorboardX.summary import text

        if rows:
            self._log(step, text("samples", _table(pick_rows(step, rows, SHOWN_ROWS))))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _log(self, step: int, summary: object) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()


def check_library() -> None:
    """See that the library is there.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise ConfigError(
            f"logging.tensorboard=true needs the package {LIBRARY}, which is not installed; install it with "
            "`uv sync`, or set logging.tensorboard=false"
        )


def _table(rows: Sequence[SampleRow]) -> str:
    """Write rows as a table of Markdown; model text cannot leave its cell."""
    names = names_in(row.rewards for row in rows)
    heads = ["prompt", "completion", *names, "reward", "advantage", "tokens", "ended by"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        rewards = ["" if (value := row.rewards.get(name)) is None else f"{value:.2f}" for name in names]
        figures = [*rewards, f"{row.reward:.2f}", f"{row.advantage:+.2f}", str(row.tokens), row.finish_reason]
        lines.append([_cell(row.prompt), _cell(row.completion), *figures])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Make every character of a text stand for itself in a cell."""
    shown = visible(text, SHOWN_CHARACTERS)
    return "".join(f"&#{ord(c)};" if c in "|<>&*_`[]\\#~$" else c for c in shown)
