"""The launcher's verbs beyond the machine itself: setup, run, status, logs, stop."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tpu_grpo.errors import ConfigError, LaunchError
from tpu_grpo.launching.code import ARCHIVE, FILE_LIST, pack
from tpu_grpo.launching.gcloud import Gcloud
from tpu_grpo.launching.jobs import CACHE, Job
from tpu_grpo.launching.machine import Machine, MachineRoom
from tpu_grpo.launching.settings import Settings
from tpu_grpo.launching.tpus import Slice, parse_slice
from tpu_grpo.launching.workers import Workers, WorkerStatus, answers, merged, remote_line

LARGE_BYTES = 100 * 2**20
OWN_DISK = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs")


@dataclass(frozen=True)
class Equipment:
    """What workers are set up with."""

    checkout: Path
    """Whose files they get."""
    script: Path | None = None
    """Run on each of them afterwards, in the checkout; mounts a bucket, for example."""
    requirements: tuple[str, ...] = ()
    """Packages beside those that the checkout pins, as pip takes them."""


@dataclass(frozen=True)
class Chips:
    """How the chips are used by a run."""

    cache: str = CACHE
    """Where compiled programs are kept: a directory of the worker, or gs://."""
    libtpu_args: str | None = None
    """LIBTPU_INIT_ARGS; those for the kind of slice when None."""


class Launcher:
    """One slice and what runs on it."""

    def __init__(
        self,
        settings: Settings,
        gcloud: Gcloud,
        scratch: Path,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._settings, self._gcloud, self._now = settings, gcloud, now
        self.machine = MachineRoom(settings, gcloud)
        self.workers = Workers(settings, gcloud, scratch)
        self._packed: tuple[str, list[Path]] | None = None

    def setup(self, equipment: Equipment) -> None:
        """Copy the code to every worker and install its environment there; again for changed code.

        Raises:
            ConfigError: there is no such checkout or script here.
            LaunchError: a worker could not be reached or set up, or runs something.
        """
        if self._packed is None:  # once: a run that is set up again later goes on with the same code
            self._packed = self._pack(equipment)
        revision, files = self._packed
        self.workers.prepare()
        self.workers.copy(files)
        self.workers.call("unpack", revision)
        self._gcloud.say("installing the environment on every worker; the first time takes minutes")
        self.workers.call("install", *equipment.requirements)

    def _pack(self, equipment: Equipment) -> tuple[str, list[Path]]:
        scratch = self.workers.scratch
        files = [scratch / ARCHIVE, scratch / FILE_LIST]
        if equipment.script is not None:
            if not equipment.script.is_file():
                raise ConfigError(f"--setup-script must be a file here, got {equipment.script}; correct the path")
            files.append(scratch / "setup_script")
            files[-1].write_bytes(equipment.script.read_bytes())
        revision = pack(equipment.checkout, scratch)
        size = (scratch / ARCHIVE).stat().st_size
        self._gcloud.say(f"code: {equipment.checkout} at {revision}, {size / 2**20:.1f} MiB")
        if size > LARGE_BYTES:
            self._gcloud.say("that is much for code: have git ignore data and results, and rather use a bucket")
        return revision, files

    def run(self, job: Job, chips: Chips, machine: Machine) -> str:
        """Start a job on all workers of ``machine``, detached; returns the name of this start.

        Raises:
            LaunchError: a worker could not be reached, is not set up, or runs something already.
        """
        job_id = job.new_id(self._now())
        self._send(job)
        words = job.command(job_id, _slice_of(machine, self._settings), chips.cache, chips.libtpu_args)
        self.workers.call("start", job_id, *words)
        return job_id

    def _send(self, job: Job) -> None:
        """Copy config and secrets; the latter in a file that only its owner reads, and that ``start`` removes."""
        config, secrets = self.workers.scratch / "config.yaml", self.workers.scratch / "secrets.sh"
        config.write_bytes(job.content)
        if not job.secrets:
            self.workers.copy([config])
            return
        self._gcloud.say(f"passing on {', '.join(job.secrets)}, by a file")
        try:
            with open(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(job.secrets_file())
            self.workers.copy([config, secrets])
        finally:
            secrets.unlink(missing_ok=True)

    def require_shared(self, directory: Path) -> None:
        """Raise ConfigError if ``directory`` lies on a worker's own disk, by what the workers say."""
        for worker, text in self.workers.call("filesystem", str(directory)).items():
            kind = answers(text).get("filesystem", "")
            if kind in OWN_DISK:
                raise ConfigError(
                    f"run.dir must outlive the machine, got {directory}, which is on {kind} of worker {worker}; "
                    "mount a bucket or share there with --setup-script, or vouch for it with --run-dir-survives"
                )

    def logs(self, lines: int) -> str:
        """The end of every worker's log."""
        return merged(self.workers.call("logs", str(lines)))

    def stop(self, seconds: int) -> dict[int, WorkerStatus]:
        """Ask all workers to end the run, and make them after ``seconds``.

        Raises:
            LaunchError: something still runs.
        """
        self.workers.call("stop", str(seconds))
        after = self.workers.status()
        if still := [worker for worker, status in after.items() if status.state == "running"]:
            raise LaunchError(
                f"every run must have ended, got one running on worker {still}; look at it with {_by_hand()}"
            )
        return after


def status_lines(machine: Machine, workers: dict[int, WorkerStatus]) -> list[str]:
    """A table for people."""
    kind = (
        f"{machine.accelerator_type}, {machine.workers} worker{'s' * (machine.workers != 1)}: "
        if machine.workers
        else ""
    )
    lines = [f"{kind}{machine.said}"]
    for worker, status in sorted(workers.items()):
        known = {"pid": status.pid, "exit code": status.exit_code}
        facts = [status.state, *(f"{name} {value}" for name, value in known.items() if value is not None)]
        lines.append(
            f"[{worker}] {status.job or 'no run yet'}: {', '.join(facts)}  (code {status.revision or 'not there'})"
        )
        lines += [f"    {status.last}"] if status.last else []
    return lines


def _slice_of(machine: Machine, settings: Settings) -> Slice | None:
    """None for a generation without defaults."""
    try:
        return parse_slice(machine.accelerator_type) if machine.accelerator_type else settings.type
    except ConfigError:
        return None


def _by_hand() -> str:
    return f"`gcloud compute tpus tpu-vm ssh NAME --worker=N --command='{remote_line(['status'])}'`"
