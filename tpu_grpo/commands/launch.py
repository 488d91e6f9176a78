"""The command line of ``scripts/launch.py``: parse, call, print, exit."""

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_grpo.errors import ConfigError, TpuGrpoError
from tpu_grpo.launching.babysit import Babysitter, Patience
from tpu_grpo.launching.flags import parse
from tpu_grpo.launching.gcloud import Gcloud
from tpu_grpo.launching.jobs import (
    RUN_SCRIPT,
    Job,
    checked_config,
    lost_with_the_machine,
    require_resumable,
    secrets_here,
    variables_from,
)
from tpu_grpo.launching.launcher import Chips, Equipment, Launcher, status_lines
from tpu_grpo.launching.machine import Condition, Machine
from tpu_grpo.launching.settings import settings_from
from tpu_grpo.launching.workers import WorkerStatus

STOP_SECONDS = 60
"""What babysit gives workers whose run has failed on another one."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0, 2 for bad input, 1 else, and for babysit that of the run."""
    options = parse(arguments)
    gcloud = Gcloud(dry_run=options.dry_run)
    try:
        with tempfile.TemporaryDirectory(prefix="tpu_grpo_launch_") as scratch:
            launcher = Launcher(settings_from(vars(options)), gcloud, Path(scratch))
            return VERBS[options.verb](launcher, gcloud, options)
    except KeyboardInterrupt:
        print("interrupted; what runs on the workers goes on, `status` shows it", file=sys.stderr)
        return 1
    except TpuGrpoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _create(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    launcher.machine.create()
    if not options.no_wait:
        launcher.machine.wait()
    return 0


def _setup(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    launcher.machine.require()
    launcher.setup(_equipment(options))
    return 0


def _run(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    job = _job(options)
    config = checked_config(job)
    machine = launcher.machine.require()
    if config is not None and machine.workers > 1 and (why := lost_with_the_machine(config.run_dir)):
        gcloud.say(
            f"careful: run.dir={config.run_dir} {why}, and workers share none: each would write its part of the "
            "checkpoints to its own; give a directory that all of them mount"
        )
    job_id = launcher.run(job, _chips(options), machine)
    gcloud.say(f"started {job_id}; `logs --follow` shows it, `status` says how it stands")
    return 0


def _status(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    machine = launcher.machine.look()
    workers = launcher.workers.status() if machine.condition == "ready" else {}
    print("\n".join(status_lines(machine, workers)))
    return 0


def _logs(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    if options.follow:
        launcher.workers.follow(options.lines, launcher.machine.require().workers)
    elif text := launcher.logs(options.lines):
        print(text)
    return 0


def _stop(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    after = launcher.stop(options.grace)
    print("\n".join(status_lines(Machine("ready", "stopped"), after)))
    return 0


def _delete(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    launcher.machine.delete()
    return 0


def _babysit(launcher: Launcher, gcloud: Gcloud, options: Namespace) -> int:
    job = _job(options, "checkpoint.resume=auto")
    config = checked_config(job)
    if config is None:
        raise ConfigError(
            f"--script must be {RUN_SCRIPT} for babysit, which relies on its exit codes, got {job.script}"
        )
    require_resumable(config, survives=options.run_dir_survives)
    shared = None if options.run_dir_survives else config.run_dir
    hands = _Hands(launcher, _equipment(options), job, _chips(options), shared)
    if options.dry_run:
        hands.rehearse()
        return 0
    patience = Patience(options.poll, options.restarts)
    return Babysitter(hands, job.key, patience, time.sleep, gcloud.say).run()


class _Hands:
    """The launcher, as the babysitter uses it. ``shared``: a directory that must not be on a worker's own disk."""

    def __init__(self, launcher: Launcher, equipment: Equipment, job: Job, chips: Chips, shared: Path | None):
        self._launcher, self._equipment, self._job, self._chips, self._shared = launcher, equipment, job, chips, shared
        self._machine = Machine("missing", "not looked at yet")

    def look(self) -> tuple[Condition, str, int]:
        self._machine = self._launcher.machine.look()
        return self._machine.condition, self._machine.said, self._machine.workers

    def status(self) -> Mapping[int, WorkerStatus]:
        return self._launcher.workers.status()

    def create(self) -> None:
        self._launcher.machine.create()

    def delete(self) -> None:
        self._launcher.machine.delete()

    def setup(self) -> None:
        self._launcher.setup(self._equipment)
        if self._shared is not None:
            self._launcher.require_shared(self._shared)

    def start(self) -> None:
        self._launcher.run(self._job, self._chips, self._machine)

    def stop(self) -> None:
        self._launcher.stop(STOP_SECONDS)

    def logs(self, lines: int) -> str:
        return self._launcher.logs(lines)

    def rehearse(self) -> None:
        """Every step once, as after a preemption."""
        self.look()
        for step in (self.delete, self.create, self.look, self.setup, self.start, self.status):
            step()


def _job(options: Namespace, *more: str) -> Job:
    words = (*options.words, *more)
    return Job(options.config, words, options.script, variables_from(options.env), secrets_here(options.secret))


def _equipment(options: Namespace) -> Equipment:
    return Equipment(options.code, options.setup_script, tuple(options.requirements))


def _chips(options: Namespace) -> Chips:
    return Chips(options.compilation_cache, options.libtpu_args)


VERBS = {
    "create": _create,
    "setup": _setup,
    "run": _run,
    "status": _status,
    "logs": _logs,
    "stop": _stop,
    "delete": _delete,
    "babysit": _babysit,
}
