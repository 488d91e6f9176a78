"""A job is a run in the form that the launcher sends to workers: command line, environment, secrets."""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.hosts.authentication import VARIABLE
from tpu_grpo.launching.tpus import Slice
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.secrets import LOOKS_SECRET

RUN_SCRIPT = "scripts/run.py"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
"""These variables are always passed on to the workers if they are set here."""
PYTHON = ".venv/bin/python"
LOCAL_DISK = ("/home", "/root", "/tmp", "/var", "/opt", "/usr", "/etc")


@dataclass(frozen=True)
class Job:
    """Describes what every worker is to run.

    Args:
        config: a local file, which is copied to the workers.
        words: the arguments after the config on the command line.
        script: the program in the checkout that is called with config and words.
        environment: variables that may be printed.
        secrets: variables that must not be printed.
        cache: where jax keeps compiled programs, a gs:// address or a directory; None for each worker's own cache.
        libtpu_args: LIBTPU_INIT_ARGS, in place of the generation's default; "" for none.

    Raises:
        ConfigError: a variable's name is invalid, or a secret would be printed.
    """

    config: Path
    words: tuple[str, ...] = ()
    script: str = RUN_SCRIPT
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    cache: str | None = None
    libtpu_args: str | None = None

    def __post_init__(self) -> None:
        for name in [*self.environment, *self.secrets]:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"a variable's name must be letters, digits and underscores, got {name!r}")
        if shown := sorted(name for name in self.environment if LOOKS_SECRET.search(name)):
            raise ConfigError(
                f"--env is printed and kept in logs, got {shown[0]}; set the variable here and use --secret {shown[0]}"
            )
        printed = [*self.words, *self.environment.values()]
        if leaked := sorted(name for name, value in self.secrets.items() if any(value in word for word in printed)):
            raise ConfigError(
                f"the value of {leaked[0]} must not stand in an argument, where it is printed and logged; leave it "
                "out: the run finds it in its environment"
            )

    @cached_property
    def content(self) -> bytes:
        """The content of the config file; read once, so that later starts of this job use the same content."""
        return self.config.read_bytes()

    @property
    def key(self) -> str:
        """A digest of config, words and script, by which the babysitter recognises its run."""
        return hashlib.sha256(repr((self.content, self.words, self.script)).encode()).hexdigest()[:8]

    def command(self, job_id: str, target: Slice | None) -> list[str]:
        """Return the command that a worker of the slice runs in the checkout."""
        variables = {**chip_environment(target, self.cache, self.libtpu_args), **self.environment}
        config = f"../jobs/{job_id}/config.yaml"
        return ["env", *(f"{k}={v}" for k, v in variables.items()), PYTHON, self.script, config, *self.words]


def chip_environment(target: Slice | None, cache: str | None, libtpu_args: str | None) -> dict[str, str]:
    """Return the environment variables for runs on a slice; ``cache`` and ``libtpu_args`` are as in ``Job``.

    If the slice is unknown (None), LIBTPU_INIT_ARGS is set only from ``libtpu_args``.
    """
    variables = {"PYTHONUNBUFFERED": "1"}  # lines appear in the log immediately
    if cache is not None:
        variables |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1"}
    if libtpu_args is None:
        libtpu_args = " ".join(target.generation.libtpu_args) if target else ""
    return variables | ({"LIBTPU_INIT_ARGS": libtpu_args} if libtpu_args else {})


def secrets_here(names: Sequence[str]) -> dict[str, str]:
    """Return the secrets to pass on: those of SECRETS that are set here, those in ``names``, and the secret by which
    hosts authenticate each other, which is generated unless it is set here.

    Raises:
        ConfigError: a variable in ``names`` is not set.
    """
    for name in names:
        if not os.environ.get(name):
            raise ConfigError(
                f"--secret {name} must be set in the environment of this command, got none; export it first"
            )
    found = {name: os.environ[name] for name in dict.fromkeys([*SECRETS, *names]) if os.environ.get(name)}
    return found | {VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex(32)}


def variables_from(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts into a mapping; raises ConfigError for a text without a name."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, equals, _) in zip(texts, pairs, strict=True) if not (name and equals)]:
        raise ConfigError(f"--env must read NAME=VALUE, got {wrong[0]!r}; for example --env JAX_LOG_COMPILES=1")
    return {name: value for name, _, value in pairs}


def checked_config(job: Job, slices: int) -> RunConfig | None:
    """Return the config of a training run, checked before a worker is used; None for other scripts.

    Raises:
        ConfigError: the file is missing, ``load_config`` refuses it, or it is for another number of slices.
    """
    if not job.config.is_file():
        raise ConfigError(f"CONFIG must be a file here, got {job.config}; shipped ones are in configs/")
    settings = [word for word in job.words if not word.startswith("-")]  # without flags such as --dry-run
    if job.script != RUN_SCRIPT:
        return None
    config = load_config(job.config, settings)
    if config.meshes.slices != slices:
        raise ConfigError(
            f"meshes.slices must be {slices} with --slices {slices}, got {config.meshes.slices}; change it, or give "
            "--slices (TPU_SLICES) to every verb"
        )
    return config


def lost_with_the_machine(directory: Path) -> str | None:
    """Return why files in ``directory`` would be lost with the worker's machine; None if they seem safe."""
    if not directory.is_absolute():
        return "lies in the checkout on the worker"
    if any(PurePosixPath(directory).is_relative_to(place) for place in LOCAL_DISK):
        return "lies on the worker's own disk"
    return None


def require_resumable(run_dir: Path, save_every: int, *, survives: bool) -> None:
    """Raise ConfigError for a run that a new machine could not resume. ``survives`` says that run.dir is durable, and
    ``save_every`` is checkpoint.every."""
    why = None if survives else lost_with_the_machine(run_dir)
    if why:
        raise ConfigError(
            f"run.dir must outlive the machine, got {run_dir}, which {why}; give a mounted bucket or share that "
            "--setup-script mounts, such as run.dir=/mnt/runs/mine, or vouch for it with --run-dir-survives"
        )
    if save_every == 0:
        raise ConfigError(
            "checkpoint.every must be >= 1 to go on after a preemption, got 0, which saves at the end only; try 20"
        )
