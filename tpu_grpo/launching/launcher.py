"""Sets up, starts, shows and stops runs on a slice; the code that workers run is packed here."""

import os
import shlex
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path

from tpu_grpo.launching.gcloud import Gcloud
from tpu_grpo.launching.jobs import Job
from tpu_grpo.launching.launch_options import Options
from tpu_grpo.launching.tpu_slice import SliceState, TpuSlice, Workers, WorkerStatus, answers, merged, remote_line
from tpu_grpo.launching.tpus import Slice, parse_slice
from tpu_grpo.records.errors import ConfigError, LaunchError

ARCHIVE, FILE_LIST = "code.tar.gz", "files.new"
LARGE_BYTES = 100 * 2**20
LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs")


class Launcher:
    """Controls one slice and what runs on it; ``scratch`` is a directory of this process for files on their way."""

    def __init__(self, options: Options, scratch: Path):
        self._options = options
        self.gcloud = Gcloud(dry_run=options.dry_run)
        self.tpu = TpuSlice(options, self.gcloud)
        self.workers = Workers(options, self.gcloud, scratch)
        self._packed: tuple[str, list[Path]] | None = None

    def setup(self) -> None:
        """Copy the code to every worker and install its environment there; again for changed code.

        Raises:
            ConfigError: there is no such checkout or script here.
            LaunchError: a worker could not be reached or set up, or runs something.
        """
        if self._packed is None:  # once: a run that is set up again later goes on with the same code
            self._packed = self._pack()
        revision, files = self._packed
        self.workers.prepare()
        self.workers.copy(files)
        self.workers.call("unpack", revision)
        self.gcloud.say("installing the environment on every worker; the first time takes minutes")
        self.workers.call("install", *self._options.requirements)

    def _pack(self) -> tuple[str, list[Path]]:
        checkout, script, scratch = self._options.code, self._options.setup_script, self.workers.scratch
        files = [scratch / ARCHIVE, scratch / FILE_LIST]
        if script is not None:
            if not script.is_file():
                raise ConfigError(f"--setup-script must be a file here, got {script}; correct the path")
            files.append(scratch / "setup_script")
            files[-1].write_bytes(script.read_bytes())
        revision = pack(checkout, scratch)
        size = (scratch / ARCHIVE).stat().st_size
        self.gcloud.say(f"code: {checkout} at {revision}, {size / 2**20:.1f} MiB")
        if size > LARGE_BYTES:
            self.gcloud.say("that is much for code: have git ignore data and results, and rather use a bucket")
        return revision, files

    def start(self, job: Job, state: SliceState) -> str:
        """Start a job on all workers, detached; returns the name of this start.

        Raises:
            LaunchError: a worker could not be reached, is not set up, or runs something already.
        """
        job_id = job.new_id(datetime.now(UTC))
        self._send(job)
        self.workers.call("start", job_id, *job.command(job_id, self._known_slice(state)))
        return job_id

    def _send(self, job: Job) -> None:
        """Copy config and secrets; the latter in a file that only its owner reads, and that ``start`` removes."""
        config, secrets = self.workers.scratch / "config.yaml", self.workers.scratch / "secrets.sh"
        config.write_bytes(job.content)
        if not job.secrets:
            self.workers.copy([config])
            return
        self.gcloud.say(f"passing on {', '.join(job.secrets)}, by a file")
        try:
            with open(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.secrets.items()))
            self.workers.copy([config, secrets])
        finally:
            secrets.unlink(missing_ok=True)

    def _known_slice(self, state: SliceState) -> Slice | None:
        """Return the slice of what is there, else of --type; None for a generation without defaults."""
        try:
            return parse_slice(state.accelerator_type) if state.accelerator_type else self._options.slice
        except ConfigError:
            return None

    def require_durable(self, directory: Path) -> None:
        """Raise ConfigError if ``directory`` lies on a worker's own disk, by what the workers say."""
        for worker, text in self.workers.call("filesystem", str(directory)).items():
            kind = answers(text).get("filesystem", "")
            if kind in LOCAL_FILESYSTEMS:
                raise ConfigError(
                    f"run.dir must outlive the machine, got {directory}, which is on {kind} of worker {worker}; "
                    "mount a bucket or share there with --setup-script, or vouch for it with --run-dir-survives"
                )

    def logs(self, lines: int) -> str:
        """Return the end of every worker's log."""
        return merged(self.workers.call("logs", str(lines)))

    def stop(self, seconds: int) -> dict[int, WorkerStatus]:
        """Ask all workers to end the run, and make them after ``seconds``.

        Raises:
            LaunchError: something still runs.
        """
        self.workers.call("stop", str(seconds))
        after = self.workers.status()
        if still := [worker for worker, status in after.items() if status.state == "running"]:
            look = f"`gcloud compute tpus tpu-vm ssh NAME --worker=N --command='{remote_line(['status'])}'`"
            raise LaunchError(f"every run must have ended, got one running on worker {still}; look at it with {look}")
        return after


def status_lines(state: SliceState, workers: dict[int, WorkerStatus]) -> list[str]:
    """Return the lines of a table for people."""
    count = f"{state.workers} worker{'s' * (state.workers != 1)}"
    lines = [f"{state.accelerator_type}, {count}: {state.description}" if state.workers else state.description]
    for worker, status in sorted(workers.items()):
        known = {"pid": status.pid, "exit code": status.exit_code}
        facts = [status.state, *(f"{name} {value}" for name, value in known.items() if value is not None)]
        code = f"(code {status.revision or 'not there'})"
        lines.append(f"[{worker}] {status.job or 'no run yet'}: {', '.join(facts)}  {code}")
        lines += [f"    {status.last_line}"] if status.last_line else []
    return lines


# --- the code ---------------------------------------------------------------------------------------------------------


def pack(checkout: Path, into: Path) -> str:
    """Write this checkout as it is, without what git ignores, into an archive with a list of its files.

    Returns the ``revision``.

    Raises:
        ConfigError: the directory is no git work tree.
    """
    names = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    present = sorted({name for name in names if name and (checkout / name).is_file()})
    with tarfile.open(into / ARCHIVE, "w:gz") as archive:
        for name in present:
            archive.add(checkout / name, name, recursive=False)
    with open(into / FILE_LIST, "w", encoding="utf-8") as listing:
        listing.write("".join(f"{name}\0" for name in present))
    return revision(checkout)


def revision(checkout: Path) -> str:
    """Name the commit, and how many files differ from it: ``6af09c4 and 2 changed files``."""
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
