"""The gcloud commands, as lists of words. Nothing is run here.

``tests/launching/gcloud_syntax.py`` holds the documented syntax that each of them is compared with.
"""

from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.launching.settings import Settings

type Command = list[str]

TPUS = ("compute", "tpus")
ALL = "all"


def create(settings: Settings) -> Command:
    """Ask for the slice: a queued resource with one node, or the node itself. Returns before a queued one is there."""
    runtime = settings.runtime or settings.slice.generation.runtime
    kind = f"--accelerator-type={settings.slice.accelerator_type}"
    if settings.how == "queued":
        command = ["gcloud", *TPUS, "queued-resources", "create", settings.name, f"--node-id={settings.name}"]
        command += [kind, f"--runtime-version={runtime}"]
    else:
        command = ["gcloud", *TPUS, "tpu-vm", "create", settings.name, kind, f"--version={runtime}"]
    valued = {
        "--service-account": settings.service_account,
        "--network": settings.network,
        "--subnetwork": settings.subnetwork,
        "--valid-until-duration": settings.valid_until,
    }
    switches = {"--spot": settings.spot, "--reserved": settings.reserved, "--internal-ips": settings.internal_ips}
    command += [f"{flag}={value}" for flag, value in valued.items() if value is not None]
    return command + [flag for flag, on in switches.items() if on] + _where(settings)


def describe_request(settings: Settings) -> Command:
    """The queued resource, as JSON."""
    return ["gcloud", *TPUS, "queued-resources", "describe", settings.name, *_where(settings), "--format=json"]


def describe_node(settings: Settings) -> Command:
    """The node with its workers, as JSON."""
    return ["gcloud", *TPUS, "tpu-vm", "describe", settings.name, *_where(settings), "--format=json"]


def delete(settings: Settings) -> Command:
    """Give everything back; returns when it is gone."""
    if settings.how == "queued":  # --force: its node too
        return ["gcloud", *TPUS, "queued-resources", "delete", settings.name, "--force", *_where(settings)]
    return ["gcloud", *TPUS, "tpu-vm", "delete", settings.name, *_where(settings)]


def ssh(settings: Settings, remote: str, *, worker: int | str = ALL, outputs: Path | None = None) -> Command:
    """Run a line of shell on workers; what worker i prints goes to ``outputs``/i.log, or to stdout and stderr."""
    logs = [f"--output-directory={outputs}"] if outputs else []
    target = _login(settings)
    return [*_connect(settings), "ssh", target, f"--worker={worker}", f"--command={remote}", *logs, *_ssh(settings)]


def scp(settings: Settings, files: Sequence[Path], directory: str) -> Command:
    """Copy local files into a directory of every worker, relative to the home directory there."""
    target = f"{_login(settings)}:{directory}/"
    return [*_connect(settings), "scp", *map(str, files), target, f"--worker={ALL}", *_ssh(settings)]


def _connect(settings: Settings) -> Command:
    track = ["alpha"] if settings.tunnel_through_iap else []
    return ["gcloud", *track, *TPUS, "tpu-vm"]


def _login(settings: Settings) -> str:
    return f"{settings.user}@{settings.name}" if settings.user else settings.name


def _ssh(settings: Settings) -> Command:
    key = [f"--ssh-key-file={settings.ssh_key_file}"] if settings.ssh_key_file else []
    switches = {"--internal-ip": settings.internal_ip, "--tunnel-through-iap": settings.tunnel_through_iap}
    return key + [flag for flag, on in switches.items() if on] + _where(settings)


def _where(settings: Settings) -> Command:
    places = {"--zone": settings.zone, "--project": settings.project}
    return [*(f"{flag}={value}" for flag, value in places.items() if value is not None), "--quiet"]
