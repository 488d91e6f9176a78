"""Writes the gcloud commands as lists of words; nothing is run here.

``tests/launching/gcloud_syntax.py`` holds the documented syntax that each of them is compared with.
"""

from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.launching.options import Options
from tpu_grpo.records.errors import ConfigError

type Command = list[str]

TPU_VM = ("compute", "tpus", "tpu-vm")
QUEUED_RESOURCES = ("compute", "tpus", "queued-resources")
CREATION_FLAGS = (
    *("service_account", "network", "subnetwork", "valid_until_duration"),
    *("spot", "reserved", "internal_ips"),
)
WORKER_FLAGS = ("ssh_key_file", "internal_ip", "tunnel_through_iap")


def create(options: Options) -> Command:
    """Ask for the slice: a queued resource with one node, or the node itself. Returns before a queued one is there.

    Raises:
        ConfigError: no type of slice was given.
    """
    if options.slice is None:
        raise ConfigError("--type must say which slice to create, got none; for example --type v5e-16")
    runtime = options.runtime or options.slice.generation.runtime
    kind = f"--accelerator-type={options.slice.accelerator_type}"
    if options.how == "queued":
        command = ["gcloud", *QUEUED_RESOURCES, "create", options.name, f"--node-id={options.name}"]
        command += [kind, f"--runtime-version={runtime}"]
    else:
        command = ["gcloud", *TPU_VM, "create", options.name, kind, f"--version={runtime}"]
    return command + _flags(options, *CREATION_FLAGS)


def describe_request(options: Options) -> Command:
    """Print the queued resource as JSON."""
    return ["gcloud", *QUEUED_RESOURCES, "describe", options.name, *_flags(options), "--format=json"]


def describe_node(options: Options) -> Command:
    """Print the node with its workers as JSON."""
    return ["gcloud", *TPU_VM, "describe", options.name, *_flags(options), "--format=json"]


def delete(options: Options) -> Command:
    """Give everything back; returns when it is gone."""
    if options.how == "queued":  # --force: its node too
        return ["gcloud", *QUEUED_RESOURCES, "delete", options.name, "--force", *_flags(options)]
    return ["gcloud", *TPU_VM, "delete", options.name, *_flags(options)]


def ssh(options: Options, remote: str, *, worker: int | str = "all", outputs: Path | None = None) -> Command:
    """Run a line of shell on workers; what worker i prints goes to ``outputs``/i.log, or to stdout and stderr."""
    logs = [f"--output-directory={outputs}"] if outputs else []
    words = [_login(options), f"--worker={worker}", f"--command={remote}", *logs]
    return [*_on_workers(options), "ssh", *words, *_flags(options, *WORKER_FLAGS)]


def scp(options: Options, files: Sequence[Path], directory: str) -> Command:
    """Copy local files into a directory of every worker, relative to the home directory there."""
    words = [*map(str, files), f"{_login(options)}:{directory}/", "--worker=all"]
    return [*_on_workers(options), "scp", *words, *_flags(options, *WORKER_FLAGS)]


def _on_workers(options: Options) -> Command:
    return ["gcloud", *(["alpha"] if options.tunnel_through_iap else []), *TPU_VM]


def _login(options: Options) -> str:
    return f"{options.user}@{options.name}" if options.user else options.name


def _flags(options: Options, *names: str) -> Command:
    """Return the named options that were given, as gcloud's flags of the same names, and where the TPU is."""
    given = {name: getattr(options, name) for name in (*names, "zone", "project")}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given.items()
        if value is not None and value is not False
    ]
    return [*flags, "--quiet"]
