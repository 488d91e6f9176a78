"""A slice and its workers: it is created, looked at, awaited and deleted; they run ``worker.sh``.

What a worker prints comes back in a file of its own, so that nobody has to tell lines of several workers apart.
"""

import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpu_grpo.launching.gcloud import (
    Command,
    Gcloud,
    GcloudError,
    create_command,
    delete_command,
    describe_node_command,
    describe_request_command,
    scp_command,
    ssh_command,
)
from tpu_grpo.launching.launch_options import Options
from tpu_grpo.records.errors import LaunchError

type Condition = Literal["missing", "waiting", "ready", "gone"]

REQUEST_GONE = ("FAILED", "SUSPENDING", "SUSPENDED")
NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "HIDING", "HIDDEN")
POLL_SECONDS = 20.0
WORKER_SCRIPT = Path(__file__).with_name("worker.sh")
REMOTE_ROOT = ".tpu_grpo"
"""This directory lies below the home directory of every worker."""
REMOTE_SCRIPT = f"{REMOTE_ROOT}/{WORKER_SCRIPT.name}"
SHOWN_LINES = 15


@dataclass(frozen=True)
class SliceState:
    """Describes a slice as gcloud sees it."""

    condition: Condition
    """A missing slice does not exist, a waiting one is not usable yet, and one that is gone never will be again."""
    description: str
    """These are the states behind the condition, in the API's words."""
    workers: int = 0
    accelerator_type: str = ""


class TpuSlice:
    """Controls the slice that the options name."""

    def __init__(self, options: Options, gcloud: Gcloud, sleep: Callable[[float], None] = time.sleep):
        self._options, self._gcloud, self._sleep = options, gcloud, sleep

    def look(self) -> SliceState:
        """Return its state; in a dry run it is ready."""
        seen = []
        if self._options.how == "queued":
            request: dict[str, Any] | None = self._describe(describe_request_command(self._options))
            if self._gcloud.dry_run:
                request = dict[str, Any](state={"state": "ACTIVE"})
            if request is None:
                return SliceState("missing", "there is no such queued resource (--how vm looks for a TPU VM)")
            state = request.get("state", {}).get("state", "STATE_UNSPECIFIED")
            seen = [f"queued resource {state}"]
            if state in REQUEST_GONE:
                message = request["state"].get("failedData", {}).get("error", {}).get("message", "")
                return SliceState("gone", seen[0] + (f": {message}" if message else ""))
            if state != "ACTIVE":
                return SliceState("waiting", seen[0])
        node = self._describe(describe_node_command(self._options))
        if self._gcloud.dry_run:
            kind = self._options.slice
            return SliceState("ready", "dry run", kind.hosts if kind else 1, kind.accelerator_type if kind else "")
        if node is None:  # a request that was fulfilled, and whose node was taken away
            return (
                SliceState("gone", f"{seen[0]}, no node") if seen else SliceState("missing", "there is no such TPU VM")
            )
        state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
        description = ", ".join([*seen, f"node {state}" + (f" ({health})" if health else "")])
        condition: Condition = "waiting"
        if state in NODE_GONE:
            condition = "gone"
        elif state == "READY" and health != "UNHEALTHY_MAINTENANCE":  # comes back by itself
            condition = "ready"
        workers, kind = len(node.get("networkEndpoints", [])), node.get("acceleratorType", "")
        return SliceState(condition, description, workers, kind)

    def create(self) -> None:
        """Ask for it."""
        self._gcloud.run(create_command(self._options), show=True)

    def delete(self) -> None:
        """Give it back; nothing happens if it is not there."""
        try:
            self._gcloud.run(delete_command(self._options), show=True)
        except GcloudError as error:
            if error.explanation.kind != "missing":
                raise
            self._gcloud.say(f"{self._options.name} does not exist; was it created with the other --how?")

    def wait(self) -> SliceState:
        """Wait until it is ready.

        Raises:
            LaunchError: it never will be.
        """
        before = ""
        while True:
            state = self.look()
            if state.description != before:
                self._gcloud.say(f"{self._options.name}: {state.description}")
                before = state.description
            if state.condition == "ready":
                return state
            if state.condition != "waiting":
                raise LaunchError(
                    f"{self._options.name} must become ready, got: {state.description}; delete it, create it anew"
                )
            self._sleep(POLL_SECONDS)

    def require_ready(self) -> SliceState:
        """Return its state. Raises LaunchError unless it is ready."""
        state = self.look()
        if state.condition != "ready":
            remedy = "wait, `status` shows its state" if state.condition == "waiting" else "`create` it first"
            raise LaunchError(f"{self._options.name} must be ready, got: {state.description}; {remedy}")
        return state

    def _describe(self, command: Command) -> dict[str, Any] | None:
        try:
            return self._gcloud.json(command)
        except GcloudError as error:
            if error.explanation.kind != "missing":
                raise
            return None


# --- its workers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStatus:
    """Describes the newest run on one worker."""

    state: str
    """It is none, running, ended, or lost: gone without an exit code, as after a reboot."""
    job: str = ""
    pid: int | None = None
    exit_code: int | None = None
    """It is a shell's: 128 + n stands for signal n."""
    last_line: str = ""
    """The log ends with this line."""
    revision: str = ""
    """The worker's code has this revision."""


class Workers:
    """Reaches all workers of a slice.

    Args:
        options: where the workers are and how they are reached.
        gcloud: what reaches them.
        scratch: a directory of this process for files on their way.
    """

    def __init__(self, options: Options, gcloud: Gcloud, scratch: Path):
        self._options, self._gcloud, self.scratch = options, gcloud, scratch

    def prepare(self) -> None:
        """Make the directory on every worker, readable for its owner only, and put ``worker.sh`` there."""
        self._run_on_all(f"mkdir -p -m 700 {REMOTE_ROOT}")
        self.copy([WORKER_SCRIPT])

    def copy(self, files: Sequence[Path]) -> None:
        """Copy files to every worker, into ``REMOTE_ROOT``."""
        self._gcloud.run(scp_command(self._options, files, REMOTE_ROOT))

    def call(self, *words: str) -> dict[int, str]:
        """Run ``worker.sh words`` on every worker; returns what each printed. Raises GcloudError if one failed."""
        return self._run_on_all(remote_line(words))

    def status(self) -> dict[int, WorkerStatus]:
        """Return the newest run on every worker."""
        line = remote_line(["status"])
        line = f"if [ -e {REMOTE_SCRIPT} ]; then {line}; else echo @state none; fi"
        return {worker: _status(text) for worker, text in self._run_on_all(line, repeated=True).items()}

    def follow(self, lines: int, workers: int) -> None:
        """Show logs as they grow, with the worker's number before every line, until every run ended."""
        line = remote_line(["logs", str(lines), "follow"])
        commands = [ssh_command(self._options, line, worker=worker) for worker in range(workers)]
        for command in commands:
            self._gcloud.announce(command)
        if self._gcloud.dry_run:
            return
        processes = [self._gcloud.start(command) for command in commands]
        readers = [threading.Thread(target=_show, args=pair) for pair in enumerate(processes)]
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()

    def _run_on_all(self, remote: str, repeated: bool = False) -> dict[int, str]:
        outputs = self.scratch / "workers"
        if not self._gcloud.dry_run:
            shutil.rmtree(outputs, ignore_errors=True)
            outputs.mkdir(parents=True)
        try:
            self._gcloud.run(ssh_command(self._options, remote, outputs=outputs), repeated=repeated)
        except GcloudError as error:
            ends = {worker: "\n".join(text.splitlines()[-SHOWN_LINES:]) for worker, text in _read(outputs).items()}
            if said := merged(ends):
                raise GcloudError(error.command, error.code, error.output, said) from error
            raise
        return _read(outputs)


def remote_line(words: Sequence[str]) -> str:
    """Return the line of shell that calls ``worker.sh`` with exactly these words."""
    return shlex.join(["bash", REMOTE_SCRIPT, *words])


def answers(text: str) -> dict[str, str]:
    """Return the ``@key value`` lines of a worker's output."""
    return {match[1]: match[2] for match in re.finditer(r"^@(\w+) ?(.*)$", text, re.MULTILINE)}


def merged(texts: Mapping[int, str]) -> str:
    """Join outputs of workers one after the other, the worker's number before every line."""
    return "\n".join(f"[{worker}] {line}" for worker, text in sorted(texts.items()) for line in text.splitlines())


def _read(outputs: Path) -> dict[int, str]:
    files = {int(path.stem): path for path in outputs.glob("*.log") if path.stem.isdigit()}
    return {worker: files[worker].read_text(encoding="utf-8", errors="replace") for worker in sorted(files)}


def _status(text: str) -> WorkerStatus:
    answer = answers(text)
    pid, code = (int(answer[name]) if name in answer else None for name in ("pid", "exit_code"))
    job, last, revision = (answer.get(name, "") for name in ("job", "last", "revision"))
    return WorkerStatus(answer.get("state", "lost"), job, pid, code, last, revision)


def _show(worker: int, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{worker}] {line}", end="" if line.endswith("\n") else "\n", flush=True)
