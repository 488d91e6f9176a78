"""Does things on every worker, through ``worker.sh`` there.

What a worker prints comes back in a file of its own, so that nobody has to tell lines of several workers apart.
"""

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_grpo.launching import commands
from tpu_grpo.launching.gcloud import Gcloud, GcloudError
from tpu_grpo.launching.options import Options

WORKER_SCRIPT = Path(__file__).with_name("worker.sh")
REMOTE_ROOT = ".tpu_grpo"
"""This directory lies below the home directory of every worker."""
REMOTE_SCRIPT = f"{REMOTE_ROOT}/{WORKER_SCRIPT.name}"
SHOWN_LINES = 15


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
        self._gcloud.run(commands.scp(self._options, files, REMOTE_ROOT))

    def call(self, *words: str) -> dict[int, str]:
        """Run ``worker.sh words`` on every worker; returns what each printed. Raises GcloudError if one failed."""
        return self._run_on_all(remote_line(words))

    def status(self) -> dict[int, WorkerStatus]:
        """Return the newest run on every worker."""
        line = remote_line(["status"])
        line = f"if [ -e {REMOTE_SCRIPT} ]; then {line}; else echo @state none; fi"
        return {worker: _status(answers(text)) for worker, text in self._run_on_all(line, repeated=True).items()}

    def follow(self, lines: int, workers: int) -> None:
        """Show logs as they grow, with the worker's number before every line, until every run ended."""
        line = remote_line(["logs", str(lines), "follow"])
        follows = [commands.ssh(self._options, line, worker=worker) for worker in range(workers)]
        if self._gcloud.dry_run:
            for command in follows:
                self._gcloud.run(command)
            return
        processes = [self._gcloud.start(command, announce=True) for command in follows]
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
            self._gcloud.run(commands.ssh(self._options, remote, outputs=outputs), repeated=repeated)
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


def _status(answer: Mapping[str, str]) -> WorkerStatus:
    pid, code = (int(answer[name]) if name in answer else None for name in ("pid", "exit_code"))
    job, last, revision = (answer.get(name, "") for name in ("job", "last", "revision"))
    return WorkerStatus(answer.get("state", "lost"), job, pid, code, last, revision)


def _show(worker: int, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{worker}] {line}", end="" if line.endswith("\n") else "\n", flush=True)
