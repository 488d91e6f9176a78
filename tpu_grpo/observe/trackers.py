"""Experiment trackers: Weights & Biases, and TensorBoard.

TensorBoard's event files are written synchronously, without tensorboardX's queue. The queue's thread ends at the first
error of the disk, and callers that add to the queue then wait for ever.
"""

import importlib.util
import netrc
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tpu_grpo.config.sections import LoggingSection
from tpu_grpo.observe.json_lines import is_number, names_in
from tpu_grpo.observe.run_files import TENSORBOARD_DIR, WANDB_DIR
from tpu_grpo.observe.sample_rows import SampleRow, pick_rows, visible
from tpu_grpo.observe.step_metrics import MetricValue
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Histogram

DEFAULT_SERVER = "https://api.wandb.ai"
SERVER_SECONDS = 30.0
"""The longest wait for the server of Weights & Biases, at the start and at the end of a run."""
TENSORBOARD_LIBRARY = "tensorboardX"
SHOWN_ROWS = 8
SHOWN_CHARACTERS = 1000


class WandbSink:
    """Logs to Weights & Biases, with files under ``run_dir/wandb``; a resumed training run continues the same W&B run.

    Without credentials the mode online becomes offline, and ``say`` tells the user. Offline logs need no network, and
    can be uploaded later with ``wandb sync``. Steps are the x axis of every plot. Errors of wandb are not caught.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        section: LoggingSection,
        mode: Literal["online", "offline"],
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        import wandb  # takes a second, and most runs do without

        self._wandb = wandb
        if mode == "online" and not has_credentials():
            mode = "offline"
            say(
                "logging.wandb=online needs an API key and none was found; logging offline instead. Set WANDB_API_KEY "
                "or run `wandb login`; what was logged can be uploaded with "
                f"`wandb sync {run_dir / WANDB_DIR}/offline-run-*`"
            )
        (run_dir / WANDB_DIR).mkdir(parents=True, exist_ok=True)  # without it wandb would choose a temporary folder
        id_file = run_dir / WANDB_DIR / "run_id"
        if not (run_id := id_file.read_text().strip() if id_file.is_file() else ""):
            run_id = uuid.uuid4().hex[:12]
            id_file.write_text(run_id + "\n")
        self._run = wandb.init(
            dir=str(run_dir.resolve()),
            id=run_id,
            resume="allow",
            name=name,
            project=section.wandb_project,
            entity=section.wandb_entity,
            group=section.wandb_group,
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(
                init_timeout=SERVER_SECONDS,
                login_timeout=SERVER_SECONDS,
                finish_timeout=SERVER_SECONDS,
                silent=True,
                console="off",
            ),
        )
        if mode == "online":
            say(f"wandb: {self._run.url}")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Log one step."""
        self._run.log(dict(metrics))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log a table of the rows."""
        if not rows:
            return
        names = names_in(row.rewards for row in rows)
        columns: list[Any] = ["prompt", "completion", *names, "reward", "advantage", "tokens", "finish_reason"]
        data: list[Any] = [
            [r.prompt, r.completion, *map(r.rewards.get, names), r.reward, r.advantage, r.tokens, r.finish_reason]
            for r in rows
        ]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=data)})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms."""
        made = {name: self._wandb.Histogram(np_histogram=(h.counts, h.edges)) for name, h in histograms.items()}
        self._run.log({"step": step, **made})

    def close(self) -> None:
        """Finish the run; what could not be uploaded in time stays under ``run_dir/wandb``."""
        self._run.finish()


def has_credentials() -> bool:
    """Whether wandb would find an API key or an identity token in the environment or netrc, without asking the user."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or DEFAULT_SERVER).hostname or ""
    path = os.environ.get("NETRC")
    candidates = [Path(path).expanduser()] if path else [Path.home() / ".netrc", Path.home() / "_netrc"]
    try:
        return any(netrc.netrc(str(file)).authenticators(host) is not None for file in candidates if file.is_file())
    except (netrc.NetrcParseError, OSError):
        return False


class TensorBoardSink:
    """Logs every metric that is a number as a scalar of the same name, and some samples as a table.

    Event files lie under ``run.dir/tensorboard``, which ``tensorboard --logdir`` shows. ``start_step`` is the number of
    completed steps. TensorBoard drops what an earlier part of the run logged after step ``start_step``.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        directory = run_dir / TENSORBOARD_DIR
        directory.mkdir(parents=True, exist_ok=True)
        # the file's name has the time in whole seconds, which may be the same for two parts of a run
        self._file = EventsWriter(str(directory / "events"), f".{os.getpid()}.{start_step}")
        session = event_pb2.SessionLog  # pyrefly: ignore[missing-attribute]  # made as it is imported
        self._log(step=start_step + 1, session_log=session(status=session.START))

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Log one step."""
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if name != "step" and is_number(value)
        ]
        self._log(step=int(metrics["step"]), summary=self._summaries.Summary(value=values))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log a table of the best completion, the worst, and some others, which are drawn with the step as seed."""
        from tensorboardX.summary import text

        if rows:
            self._log(step=step, summary=text("samples", _markdown(pick_rows(step, rows, SHOWN_ROWS))))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms."""
        proto = self._summaries
        values = []
        for name, found in histograms.items():
            counted = proto.HistogramProto(
                min=found.edges[0],
                max=found.edges[-1],
                num=found.counts.sum(),
                sum=float(found.total),
                sum_squares=float(found.squares),
                bucket_limit=found.edges[1:],
                bucket=found.counts,
            )
            values.append(proto.Summary.Value(tag=name, histo=counted))
        self._log(step=step, summary=proto.Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _log(self, **fields: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), **fields))
        self._file.flush()


def check_trackers(section: LoggingSection) -> None:
    """Check that the libraries of the configured trackers are installed; raises ConfigError if one is not."""
    if section.tensorboard and importlib.util.find_spec(TENSORBOARD_LIBRARY) is None:
        raise ConfigError(
            f"logging.tensorboard=true needs the package {TENSORBOARD_LIBRARY}, which is not installed; install it "
            "with `uv sync`, or set logging.tensorboard=false"
        )


def _markdown(rows: Sequence[SampleRow]) -> str:
    """Write rows as a table of Markdown, in which the texts are escaped."""
    names = names_in(row.rewards for row in rows)
    heads = ["prompt", "completion", *names, "reward", "advantage", "tokens", "ended by"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        shown = [visible(text, SHOWN_CHARACTERS) for text in (row.prompt, row.completion)]
        texts = ["".join(f"&#{ord(c)};" if c in "|<>&*_`[]\\#~$" else c for c in text) for text in shown]
        values = [*map(row.rewards.get, names), row.reward]
        rewards = ["" if value is None else f"{value:.2f}" for value in values]
        lines.append([*texts, *rewards, f"{row.advantage:+.2f}", str(row.tokens), row.finish_reason])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
