"""Sets up the workers of one or several slices, and starts, shows and stops a run on them.

Workers run ``worker.sh``. The output of each worker comes back in a separate file, so that the lines of several
workers are not mixed. The workers' numbers run on from slice to slice, like the numbers of the run's hosts: worker 1 of
node NAME-2 has the number 9 if slices have four workers.
"""

import base64
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tpu_grpo.launching.gcloud import Command, Gcloud, GcloudError
from tpu_grpo.launching.jobs import Job
from tpu_grpo.launching.launch_options import BUCKET, Options
from tpu_grpo.launching.tpu_slice import SliceState, TpuSlice
from tpu_grpo.launching.tpus import parse_slice
from tpu_grpo.records.errors import ConfigError, LaunchError

WORKER_SCRIPT = Path(__file__).with_name("worker.sh")
REMOTE_ROOT = ".tpu_grpo"
"""A directory in the home directory of every worker."""
SHOWN_LINES = 15
ARCHIVE, FILE_LIST = "code.tar.gz", "files.new"
LARGE_BYTES = 100 * 2**20
LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs")


@dataclass(frozen=True)
class WorkerStatus:
    """The state of the newest run on one worker."""

    state: str
    """One of: none, running, ended, or lost (gone without an exit code, as after a reboot)."""
    job: str = ""
    pid: int | None = None
    exit_code: int | None = None
    """The exit code as in a shell: 128 + n stands for signal n."""
    last_line: str = ""
    """The last line of the log."""
    revision: str = ""
    """The revision of the worker's code."""

    @classmethod
    def read(cls, text: str) -> "WorkerStatus":
        """Parse the output of ``worker.sh status``."""
        answer = _answers(text)
        pid, code = (int(answer[name]) if name in answer else None for name in ("pid", "exit_code"))
        job, last, revision = (answer.get(name, "") for name in ("job", "last", "revision"))
        return cls(answer.get("state", "lost"), job, pid, code, last, revision)


class Launcher:
    """Controls the workers of all slices; ``scratch`` is a directory for temporary files."""

    def __init__(self, options: Options, scratch: Path):
        self._options, self._scratch = options, scratch
        self.gcloud = Gcloud(options)
        self.tpu = TpuSlice(options, self.gcloud)
        self._packed: tuple[str, list[Path]] | None = None

    # --- setting up, starting and stopping ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Copy the code to every worker and install its environment there; repeat this for changed code.

        Raises:
            ConfigError: the checkout or the setup script does not exist.
            LaunchError: a worker could not be reached or set up, or a run is active on it.
        """
        if self._packed is None:  # only once: a later setup by this process uses the same code
            self._packed = self._pack()
        revision, files = self._packed
        self._run_on_all(f"mkdir -p -m 700 {REMOTE_ROOT}")  # only the owner can read it
        self._copy([WORKER_SCRIPT])
        self._copy(files)
        self._call("unpack", revision)
        self.gcloud.say("installing the environment on every worker; the first time takes minutes")
        self._call("install", *self._options.requirements)

    def _pack(self) -> tuple[str, list[Path]]:
        checkout, script, scratch = self._options.code, self._options.setup_script, self._scratch
        files = [scratch / ARCHIVE, scratch / FILE_LIST]
        if script is not None:
            if not script.is_file():
                raise ConfigError(f"--setup-script must be a file here, got {script}; correct the path")
            files.append(scratch / "setup_script")
            files[-1].write_bytes(script.read_bytes())
        name = pack(checkout, scratch)
        size = (scratch / ARCHIVE).stat().st_size
        self.gcloud.say(f"code: {checkout} at {name}, {size / 2**20:.1f} MiB")
        if size > LARGE_BYTES:
            self.gcloud.say("that is much for code: have git ignore data and results, and rather use a bucket")
        return name, files

    def start(self, job: Job, state: SliceState) -> str:
        """Start a job on all workers, detached; returns an id of this start.

        Secrets are passed in a file that only its owner can read; ``worker.sh start`` removes it.

        Raises:
            LaunchError: a worker could not be reached, is not set up, or has an active run already.
        """
        job_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{job.key}"
        config, secrets = self._scratch / "config.yaml", self._scratch / "secrets.sh"
        config.write_bytes(job.content)
        if job.secrets:
            self.gcloud.say(f"passing on {', '.join(job.secrets)}, by a file")
        try:
            with open(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.secrets.items()))
            self._copy([config, secrets] if job.secrets else [config])
        finally:
            secrets.unlink(missing_ok=True)
        try:  # the actual type, else --type; an unknown type has no default flags
            target = parse_slice(state.accelerator_type) if state.accelerator_type else self._options.slice
        except ConfigError:
            target = None
        self._call("start", job_id, *job.command(job_id, target))
        return job_id

    def require_durable(self, directory: Path) -> None:
        """Ask the workers for the file system of ``directory``; raise ConfigError if it is on a worker's own disk."""
        for worker, text in self._call("filesystem", str(directory)).items():
            kind = _answers(text).get("filesystem", "")
            if kind in LOCAL_FILESYSTEMS:
                raise ConfigError(
                    f"run.dir must outlive the machine, got {directory}, which is on {kind} of worker {worker}; "
                    "mount a bucket or share there with --setup-script, or vouch for it with --run-dir-survives"
                )

    def stop(self, seconds: int) -> dict[int, WorkerStatus]:
        """Ask all workers to end the run, and kill the run after ``seconds``; returns the workers' status.

        Raises:
            LaunchError: the run is still active on a worker.
        """
        self._call("stop", str(seconds))
        after = self.status()
        if still := [worker for worker, status in after.items() if status.state == "running"]:
            number, worker = divmod(still[0], len(after) // len(self.tpu.nodes))
            look = (
                f"`gcloud compute tpus tpu-vm ssh {self.tpu.nodes[number]} --worker={worker} "
                f"--command='{_remote_line(['status'])}'`"
            )
            raise LaunchError(f"every run must have ended, got one running on worker {still}; look at it with {look}")
        return after

    # --- looking ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[int, WorkerStatus]:
        """Return the newest run on every worker."""
        line = _remote_line(["status"])
        line = f"if [ -e {REMOTE_ROOT}/{WORKER_SCRIPT.name} ]; then {line}; else echo @state none; fi"
        return {worker: WorkerStatus.read(text) for worker, text in self._run_on_all(line, repeated=True).items()}

    def logs(self, lines: int) -> str:
        """Return the end of every worker's log."""
        return merged(self._call("logs", str(lines)))

    def follow(self, lines: int, workers: int) -> None:
        """Print logs as they grow, with the worker's number before every line, until the run has ended everywhere."""
        line = _remote_line(["logs", str(lines), "follow"])
        each = range(workers // len(self.tpu.nodes))
        commands = [self._ssh(node, line, f"--worker={worker}") for node in self.tpu.nodes for worker in each]
        show(self.gcloud, dict(enumerate(commands)))

    def bring(self, names: Sequence[str], run_dir: str, into: Path) -> None:
        """Copy files from a run's directory, on worker 0 of all or in a bucket; missing files are skipped.

        Raises:
            GcloudError: the directory does not exist, or cannot be reached.
        """
        into.mkdir(parents=True, exist_ok=True)
        if run_dir.startswith(BUCKET):
            others = rf"^(?!({'|'.join(map(re.escape, names))})$).*"
            sync = ["gcloud", "storage", "rsync", run_dir, str(into), f"--exclude={others}", "--quiet"]
            self.gcloud.run(sync, repeated=True)
            return
        place = shlex.quote(f"{REMOTE_ROOT}/code/{run_dir}" if not run_dir.startswith("/") else run_dir)
        packed = f"cd {place} && tar -cz {shlex.join(names)} 2>/dev/null | base64"  # ssh passes text
        text = self.gcloud.run(self._ssh(self.tpu.nodes[0], packed, "--worker=0"), repeated=True)
        if not self.gcloud.dry_run:
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:gz") as archive:
                archive.extractall(into, filter="data")

    # --- reaching workers ---------------------------------------------------------------------------------------------

    def _call(self, *words: str) -> dict[int, str]:
        """Run ``worker.sh WORDS`` on every worker; returns each output. Raises GcloudError if a worker failed."""
        return self._run_on_all(_remote_line(words))

    def _run_on_all(self, remote: str, *, repeated: bool = False) -> dict[int, str]:
        outputs = [self._scratch / "workers" / node for node in self.tpu.nodes]
        if not self.gcloud.dry_run:
            shutil.rmtree(self._scratch / "workers", ignore_errors=True)
            for output in outputs:
                output.mkdir(parents=True)
        commands = [self._ssh(to.name, remote, "--worker=all", f"--output-directory={to}") for to in outputs]
        try:
            self._run_together(commands, repeated=repeated)
        except GcloudError as error:
            ends = {worker: "\n".join(text.splitlines()[-SHOWN_LINES:]) for worker, text in _read(outputs).items()}
            if said := merged(ends):
                raise GcloudError(error.command, error.code, error.output, said) from error
            raise
        return _read(outputs)

    def _run_together(self, commands: Sequence[Command], *, repeated: bool = False) -> None:
        """Run a command for every slice at the same time; wait for all, then raise the first slice's error, if any."""
        if len(commands) == 1:  # without a thread, which an interruption would wait for
            self.gcloud.run(commands[0], repeated=repeated)
            return
        for command in commands:  # printed here, so that lines are in order
            self.gcloud.announce(command, repeated=repeated)
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(lambda command: self.gcloud.run(command, repeated=True), commands))

    def _ssh(self, node: str, remote: str, which: str, *more: str) -> Command:
        return self._on_workers("ssh", self._login(node), which, f"--command={remote}", *more)

    def _copy(self, files: Sequence[Path]) -> None:
        """Copy files to every worker, into ``REMOTE_ROOT``."""
        targets = [f"{self._login(node)}:{REMOTE_ROOT}/" for node in self.tpu.nodes]
        self._run_together([self._on_workers("scp", *map(str, files), to, "--worker=all") for to in targets])

    def _login(self, node: str) -> str:
        return f"{self._options.user}@{node}" if self._options.user else node

    def _on_workers(self, *words: str) -> Command:
        track = ["alpha"] if self._options.tunnel_through_iap else []
        flags = self.gcloud.flags("ssh_key_file", "internal_ip", "tunnel_through_iap")
        return ["gcloud", *track, "compute", "tpus", "tpu-vm", *words, *flags]


def show(gcloud: Gcloud, commands: Mapping[int, Command]) -> None:
    """Print what commands for workers print, with the worker's number before every line, until all have ended."""
    for command in commands.values():
        gcloud.announce(command)
    processes = {} if gcloud.dry_run else {worker: gcloud.start(command) for worker, command in commands.items()}
    readers = [threading.Thread(target=_show, args=pair) for pair in processes.items()]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        for process in processes.values():
            process.terminate()  # which does nothing to one that has ended


def status_lines(state: SliceState, workers: Mapping[int, WorkerStatus]) -> list[str]:
    """Return the status of the workers as lines of a table."""
    count = f"{state.workers} worker{'s' * (state.workers != 1)}"
    lines = [f"{state.accelerator_type}, {count}: {state.description}" if state.workers else state.description]
    for worker, status in sorted(workers.items()):
        known = {"pid": status.pid, "exit code": status.exit_code}
        facts = [status.state, *(f"{name} {value}" for name, value in known.items() if value is not None)]
        code = f"(code {status.revision or 'not there'})"
        lines.append(f"[{worker}] {status.job or 'no run yet'}: {', '.join(facts)}  {code}")
        lines += [f"    {status.last_line}"] if status.last_line else []
    return lines


def _remote_line(words: Sequence[str]) -> str:
    """Return the shell command that calls ``worker.sh`` with exactly these words."""
    return shlex.join(["bash", f"{REMOTE_ROOT}/{WORKER_SCRIPT.name}", *words])


def _answers(text: str) -> dict[str, str]:
    """Parse the ``@key value`` lines in a worker's output."""
    return {match[1]: match[2] for match in re.finditer(r"^@(\w+) ?(.*)$", text, re.MULTILINE)}


def merged(texts: Mapping[int, str]) -> str:
    """Concatenate the outputs of workers, with the worker's number before every line."""
    return "\n".join(f"[{worker}] {line}" for worker, text in sorted(texts.items()) for line in text.splitlines())


def _read(outputs: Sequence[Path]) -> dict[int, str]:
    """Read the workers' outputs, in one directory per slice; the keys are the workers' numbers over all slices."""
    found = [(number, path) for number, output in enumerate(outputs) for path in output.glob("*.log")]
    files = sorted((number, int(path.stem), path) for number, path in found if path.stem.isdigit())
    workers = 1 + max((worker for _, worker, _ in files), default=0)
    return {n * workers + worker: path.read_text(encoding="utf-8", errors="replace") for n, worker, path in files}


def _show(worker: int, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{worker}] {line}", end="" if line.endswith("\n") else "\n", flush=True)


# --- the code ---------------------------------------------------------------------------------------------------------


def pack(checkout: Path, into: Path) -> str:
    """Write a checkout, without files that git ignores, as an archive into a directory, with a list of its files.

    Returns the commit, and how many files differ from it: ``6af09c4 and 2 changed files``.

    Raises:
        ConfigError: the directory is not a git work tree.
    """
    names = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    present = sorted({name for name in names if name and (checkout / name).is_file()})
    with tarfile.open(into / ARCHIVE, "w:gz") as archive:
        for name in present:
            archive.add(checkout / name, name, recursive=False)
    with open(into / FILE_LIST, "w", encoding="utf-8") as listing:
        listing.write("".join(f"{name}\0" for name in present))
    commit = _git(checkout, "rev-parse", "--short", "HEAD").strip()
    changed = len(_git(checkout, "status", "--porcelain", "--untracked-files=all").splitlines())
    return commit + (f" and {changed} changed file{'s' if changed > 1 else ''}" if changed else "")


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ConfigError(
            f"--code must be a git work tree with a commit, got {checkout} ({done.stderr.strip()}); "
            "clone the repository"
        )
    return done.stdout
