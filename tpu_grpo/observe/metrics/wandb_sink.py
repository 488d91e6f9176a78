"""Logs to Weights & Biases; a run never waits long for it."""

import netrc
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tpu_grpo.observe.metrics.lines import names_in
from tpu_grpo.observe.metrics.run_files import WANDB_DIR
from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.observe.metrics.values import MetricValue

Mode = Literal["online", "offline"]
DEFAULT_SERVER = "https://api.wandb.ai"


class WandbSink:
    """Logs to a run under ``run_dir/wandb``; a resumed run continues the same one.

    ``online`` without credentials falls to ``offline``, which needs no network and can be uploaded later with
    ``wandb sync``; that is told through ``say``. Steps are the x axis of every plot. An online start waits for the
    server for at most ``timeout_seconds``. Errors are wandb's own.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        project: str,
        mode: Mode,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        timeout_seconds: float = 30.0,
    ) -> None:
        import wandb  # takes a second, and most runs do without

        self._wandb = wandb
        self._say = say
        if mode == "online" and not has_credentials():
            mode = "offline"
            say(
                "logging.wandb=online needs an API key and none was found; logging offline instead. Set WANDB_API_KEY "
                "or run `wandb login`; what was logged can be uploaded with "
                f"`wandb sync {run_dir / WANDB_DIR}/offline-run-*`"
            )
        self._run = self._start(run_dir, name, project, mode, config, timeout_seconds)

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

    def close(self) -> None:
        """Finish the run; what could not be uploaded in time stays under ``run_dir/wandb``."""
        self._run.finish()

    def _start(
        self, run_dir: Path, name: str, project: str, mode: Mode, config: Mapping[str, Any], timeout: float
    ) -> Any:
        settings = self._wandb.Settings(
            init_timeout=timeout, login_timeout=timeout, finish_timeout=timeout, silent=True, console="off"
        )
        (run_dir / WANDB_DIR).mkdir(parents=True, exist_ok=True)  # without it wandb would choose a temporary folder
        run = self._wandb.init(
            dir=str(run_dir.resolve()),
            id=_run_id(run_dir / WANDB_DIR / "run_id"),
            resume="allow",
            name=name,
            project=project,
            mode=mode,
            config=dict(config),
            settings=settings,
        )
        if mode == "online":
            self._say(f"wandb: {run.url}")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def has_credentials() -> bool:
    """Tell whether wandb would find an API key or an identity token without asking, in the environment or netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or DEFAULT_SERVER).hostname or ""
    path = os.environ.get("NETRC")
    candidates = [Path(path).expanduser()] if path else [Path.home() / ".netrc", Path.home() / "_netrc"]
    try:
        return any(netrc.netrc(str(file)).authenticators(host) is not None for file in candidates if file.is_file())
    except (netrc.NetrcParseError, OSError):
        return False


def _run_id(path: Path) -> str:
    """Return the id of this run's earlier part, or make a new one, which is kept for the next part."""
    if path.is_file() and (known := path.read_text().strip()):
        return known
    new = uuid.uuid4().hex[:12]
    path.write_text(new + "\n")
    return new
