"""A job is a run as the launcher hands it to the workers: words, environment, secrets."""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.config.section import LOOKS_SECRET
from tpu_grpo.hosts.authentication import VARIABLE
from tpu_grpo.launching.tpus import Slice
from tpu_grpo.records.errors import ConfigError

RUN_SCRIPT = "scripts/run.py"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
"""These are passed on where they are set here."""
CACHE = "../jax_cache"
"""This is where a worker keeps compiled programs, seen from the checkout."""
PYTHON = ".venv/bin/python"
LOCAL_DISK = ("/home", "/root", "/tmp", "/var", "/opt", "/usr", "/etc")


@dataclass(frozen=True)
class Job:
    """Describes what every worker is to run.

    Args:
        config: a file here, which is copied to the workers.
        words: what follows it on the command line there.
        script: the program of the checkout that is called with them.
        environment: variables that may be seen.
        secrets: variables that may not.
        cache: where compiled programs are kept: a directory of the worker, or gs://.
        libtpu_args: LIBTPU_INIT_ARGS, instead of the generation's; "" for none.

    Raises:
        ConfigError: a variable has no proper name, or a secret would be shown.
    """

    config: Path
    words: tuple[str, ...] = ()
    script: str = RUN_SCRIPT
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    cache: str = CACHE
    libtpu_args: str | None = None

    def __post_init__(self) -> None:
        for name in [*self.environment, *self.secrets]:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"a variable's name must be letters, digits and underscores, got {name!r}")
        if shown := sorted(name for name in self.environment if LOOKS_SECRET.search(name)):
            raise ConfigError(
                f"--env is printed and kept in logs, got {shown[0]}; set the variable here and use --secret {shown[0]}"
            )
        said = [*self.words, *self.environment.values()]
        if leaked := sorted(name for name, value in self.secrets.items() if any(value in word for word in said)):
            raise ConfigError(
                f"the value of {leaked[0]} must not stand in an argument, where it is printed and logged; leave it "
                "out: the run finds it in its environment"
            )

    @cached_property
    def content(self) -> bytes:
        """Read the config file, once: later starts of this job run the same content."""
        return self.config.read_bytes()

    @property
    def key(self) -> str:
        """Return a digest of config, words and script, by which a run is recognised."""
        return hashlib.sha256(repr((self.content, self.words, self.script)).encode()).hexdigest()[:8]

    def command(self, job_id: str, target: Slice | None) -> list[str]:
        """Return the command that a worker of the slice runs in the checkout."""
        variables = {**chip_environment(target, self.cache, self.libtpu_args), **self.environment}
        config = f"../jobs/{job_id}/config.yaml"
        return ["env", *(f"{k}={v}" for k, v in variables.items()), PYTHON, self.script, config, *self.words]


def chip_environment(target: Slice | None, cache: str, libtpu_args: str | None) -> dict[str, str]:
    """Return the variables for runs on a slice; the last two arguments are as in ``Job``.

    Without a slice, LIBTPU_INIT_ARGS is left to ``libtpu_args``.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",  # lines are in the log when they are printed
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    if libtpu_args is None:
        libtpu_args = " ".join(target.generation.libtpu_args) if target else ""
    return variables | ({"LIBTPU_INIT_ARGS": libtpu_args} if libtpu_args else {})


def secrets_here(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets to pass on: those always passed where they are set here, those asked for by name, and the
    hosts' own, by which they know each other: a new one unless it is set here.

    Raises:
        ConfigError: one that was asked for is not set.
    """
    for name in names:
        if not environment.get(name):
            raise ConfigError(
                f"--secret {name} must be set in the environment of this command, got none; export it first"
            )
    found = {name: environment[name] for name in dict.fromkeys([*SECRETS, *names]) if environment.get(name)}
    return found | {VARIABLE: environment.get(VARIABLE) or secrets.token_hex(32)}


def variables_from(texts: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` texts as a mapping. Raises ConfigError for one without a name."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, equals, _) in zip(texts, pairs, strict=True) if not (name and equals)]:
        raise ConfigError(f"--env must read NAME=VALUE, got {wrong[0]!r}; for example --env JAX_LOG_COMPILES=1")
    return {name: value for name, _, value in pairs}


def checked_config(job: Job) -> RunConfig | None:
    """Return the run's config, if it is a training run; mistakes are reported before a worker is used.

    Raises:
        ConfigError: the file is missing, or ``load_config`` refuses it.
    """
    if not job.config.is_file():
        raise ConfigError(f"CONFIG must be a file here, got {job.config}; shipped ones are in configs/")
    settings = [word for word in job.words if not word.startswith("-")]  # beside --dry-run
    return load_config(job.config, settings) if job.script == RUN_SCRIPT else None


def lost_with_the_machine(directory: Path) -> str | None:
    """Return why files in ``directory`` are lost with a worker; None if they do not seem to be."""
    if not directory.is_absolute():
        return "lies in the checkout on the worker"
    if any(PurePosixPath(directory).is_relative_to(place) for place in LOCAL_DISK):
        return "lies on the worker's own disk"
    return None


def require_resumable(config: RunConfig, *, survives: bool) -> None:
    """Refuse to babysit a run that could not be continued. ``survives``: the user guarantees that run.dir survives."""
    why = None if survives else lost_with_the_machine(config.run_dir)
    if why:
        raise ConfigError(
            f"run.dir must outlive the machine, got {config.run_dir}, which {why}; give a mounted bucket or share that "
            "--setup-script mounts, such as run.dir=/mnt/runs/mine, or vouch for it with --run-dir-survives"
        )
    if config.checkpoint.every == 0:
        raise ConfigError(
            "checkpoint.every must be >= 1 to go on after a preemption, got 0, which saves at the end only; try 20"
        )
