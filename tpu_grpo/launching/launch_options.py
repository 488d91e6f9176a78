"""Parses the verbs of ``scripts/launch.py`` and their flags, and checks them."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tpu_grpo.launching.jobs import RUN_SCRIPT, SECRETS
from tpu_grpo.launching.tpus import Slice, parse_slice
from tpu_grpo.records.errors import ConfigError

PROGRAM = "python scripts/launch.py"
VARIABLES = {name: f"TPU_{name.upper()}" for name in ("name", "zone", "project", "type", "slices", "image")}
"""Flag -> environment variable that is read if the flag is missing. Without either, gcloud's settings give zone
and project."""
ABOUT = f"""Runs training on a Cloud TPU slice with gcloud: every command is printed before it is run.

  {PROGRAM} create  --name grpo --type v5e-16 --zone us-west4-a --spot    ask for a slice, wait until it is ready
  {PROGRAM} setup   --name grpo --zone us-west4-a                         code and environment on every worker
  {PROGRAM} run     --name grpo --zone us-west4-a CONFIG [section.key=value ...]    start on all workers, detached
  {PROGRAM} status | logs | stop | delete  --name grpo --zone us-west4-a
  {PROGRAM} watch   --name grpo --zone us-west4-a RUN_DIR                 metrics and report of a run, here
  {PROGRAM} babysit --name grpo --type v5e-16 --zone us-west4-a --spot CONFIG ...    all of it, again after preemptions

--name, --zone, --project, --type, --slices and --image may come from {", ".join(VARIABLES.values())};
zone and project also from `gcloud config`. --on gke runs on Kubernetes Engine instead; `VERB --on gke --help` shows its
flags. --dry-run prints the commands and runs none. What follows -- goes to the run as it is.
docs/launching.md tells the whole way, and what to do when something goes wrong."""
BUCKET = "gs://"
REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Options(argparse.Namespace):
    """The parsed flags, which their help texts describe. A flag that the verb does not have is no attribute."""

    verb: str
    on: Literal["gcloud", "gke"]
    name: str
    zone: str | None
    project: str | None
    slice: Slice | None
    """The slice that --type names; None without --type. Only creating a slice needs it."""
    slices: int
    how: Literal["queued", "vm"] = "queued"
    dry_run: bool
    user: str | None
    internal_ip: bool
    tunnel_through_iap: bool
    ssh_key_file: str | None

    type: str | None
    spot: bool
    reserved: bool
    runtime: str | None
    service_account: str | None
    network: str | None
    subnetwork: str | None
    internal_ips: bool
    valid_until_duration: str | None
    no_wait: bool

    code: Path
    requirements: list[str]
    setup_script: Path | None

    config: Path
    words: list[str]
    script: str
    env: list[str]
    secret: list[str]
    compilation_cache: str | None
    libtpu_args: str | None

    poll: float
    restarts: int
    run_dir_survives: bool
    lines: int
    follow: bool
    grace: int

    run_dir: str
    to: Path | None

    context: str | None
    namespace: str | None
    image: str | None
    bucket: str | None
    queue: str | None
    priority: str | None
    privileged: bool


ON = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
WHERE = "TPU VMs, or pods of Kubernetes Engine (default: gcloud)"
ON.add_argument("--on", choices=("gcloud", "gke"), default="gcloud", help=WHERE)


class Verb(NamedTuple):
    """One verb: its help, and its flags in addition to the common ones."""

    about: str
    flags: tuple[Callable[[argparse.ArgumentParser], None], ...] = ()


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line; argparse ends the process after printing help, and for errors of syntax.

    Raises:
        ConfigError: flags have impossible values, or exclude each other.
    """
    before, after = list(arguments), []
    if "--" in before:
        at = before.index("--")
        before, after = before[:at], before[at + 1 :]
    top = argparse.ArgumentParser(
        usage=f"{PROGRAM} VERB [FLAGS] [CONFIG [section.key=value ...]]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n" + "\n".join(f"  {name:<8} {verb.about}" for name, verb in VERBS.items()),
    )
    top.add_argument("verb", choices=VERBS, metavar="VERB", help="below; `VERB --help` shows its flags")
    verb = top.parse_args(before[:1]).verb
    on = ON.parse_known_args(before[1:])[0].on
    if verb not in VERBS_ON[on]:
        raise ConfigError(
            f"{verb} needs --on gcloud, got gke, where `run` is enough: node pools are made before, pods run an image, "
            "and the JobSet restarts them"
        )
    options = _verb_parser(verb, on).parse_intermixed_args(before[1:], Options(verb=verb))
    if after:
        if not hasattr(options, "words"):
            top.error(f"{verb} takes no words after --, got {after}")
        options.words = [*options.words, *after]
    _check(options)
    options.slice = parse_slice(options.type) if options.type is not None else None
    return options


def _check(options: Options) -> None:
    given = str(options.slices)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(
            f"--slices must be a whole number >= 1, got {given}; leave it and {VARIABLES['slices']} out for one slice"
        )
    options.slices = int(given)
    if not 0 <= (poll := getattr(options, "poll", 0.0)) < float("inf"):
        raise ConfigError(f"--poll must be a number of seconds >= 0, got {poll:g}; leave it out for the usual one")
    if options.verb == "watch" and options.run_dir.startswith(BUCKET):
        return  # a bucket needs no TPU
    if options.name is None:
        raise ConfigError(f"--name must say which TPU, got none; give it, or set {VARIABLES['name']}")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", options.name):
        raise ConfigError(
            f"--name must be lower-case letters, digits and dashes, beginning with a letter, got {options.name!r}"
        )
    if options.on == "gke":
        if options.verb == "watch":
            raise ConfigError(f"RUN_DIR must be in the bucket on GKE, {BUCKET}NAME/DIR, got {options.run_dir}")
        return
    if options.how == "vm" and options.slices > 1:
        raise ConfigError(
            f"--slices must be 1 with --how vm, got {options.slices}; leave out --how vm: only queued resources make "
            "several slices"
        )
    if options.internal_ip and options.tunnel_through_iap:
        raise ConfigError("--internal-ip and --tunnel-through-iap exclude each other, got both; leave one out")
    if _slice_flags not in VERBS[options.verb].flags:
        return
    if options.spot and options.reserved:
        raise ConfigError("--spot and --reserved exclude each other, got both; leave one out")
    if options.how == "vm" and (limit := options.valid_until_duration):
        raise ConfigError(f"--valid-until needs --how queued, got {limit}; a TPU VM does not wait")


def _verb_parser(name: str, on: str) -> argparse.ArgumentParser:
    verb = VERBS_ON[on][name]
    words = " CONFIG [section.key=value ...]" if _job_flags in verb.flags else ""
    usage = f"{PROGRAM} {name} [FLAGS]{words}"
    parser = argparse.ArgumentParser(usage=usage, description=verb.about, allow_abbrev=False, parents=[ON])
    for add_flags in (_common_flags, _gke_flags if on == "gke" else _gcloud_flags, *verb.flags):
        add_flags(parser)
    defaults = {name: os.environ.get(variable) or parser.get_default(name) for name, variable in VARIABLES.items()}
    parser.set_defaults(**defaults)
    return parser


def _gke_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how the cluster is reached").add_argument
    add("--context", help="kubectl's, which names the cluster (default: kubectl's current one)")
    add("--namespace", help="of the JobSet (default: the context's)")


def _jobset_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what pods are").add_argument
    add("--type", help=f"v7x-8, v5e-16, v6e-8, v5p-8 ... ({VARIABLES['type']})")
    add("--image", help=f"made of our Dockerfile ({VARIABLES['image']})")
    add("--bucket", metavar="NAME", help="a bucket, which pods have as /mnt/run")
    add("--service-account", help="of Kubernetes, with Workload Identity; it needs access to the bucket")
    add("--spot", action="store_true", help="on spot nodes: cheaper, and may be taken away at any time")
    add("--queue", help="the local queue of Kueue in which the JobSet waits")
    add("--priority", help="a priority class, of Kueue if --queue is given")
    add("--privileged", action="store_true", help="run as root with all rights, where nodes limit locked memory")
    add("--restarts", type=int, default=10, help="of all pods, after which the run has failed (default: %(default)s)")
    _stop_flags(parser)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which TPU").add_argument
    add("--name", help=f"of the TPU, or of the JobSet ({VARIABLES['name']})")
    slices = f"how many, joined by the data-centre network ({VARIABLES['slices']}, default: 1)"
    add("--slices", default="1", metavar="N", help=slices)
    add("--dry-run", action="store_true", help="print the commands, run none")


def _gcloud_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how workers are reached").add_argument
    add("--zone", help=f"({VARIABLES['zone']}, else gcloud's compute/zone)")
    add("--project", help=f"({VARIABLES['project']}, else gcloud's core/project)")
    how = "a queued resource, or a TPU VM at once (default: queued)"
    add("--how", choices=("queued", "vm"), default="queued", help=how)
    add("--user", help="log in as this user (default: gcloud's choice)")
    add("--internal-ip", action="store_true", help="by the internal address, from a machine in the same network")
    add("--tunnel-through-iap", action="store_true", help="through Identity-Aware Proxy, with gcloud's alpha commands")
    add("--ssh-key-file", help="instead of gcloud's own key")


def _slice_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to create").add_argument
    add("--type", help=f"v5e-16, v6e-8, v5p-8, v4-32 ... ({VARIABLES['type']})")
    add("--spot", action="store_true", help="cheaper, and may be taken away at any time")
    add("--reserved", action="store_true", help="from the project's reservation")
    add("--runtime", help="software version of the machines (default: the one for JAX on this kind of TPU)")
    add("--service-account", help="what the machines act as; it needs access to your buckets")
    add("--network", help="default: the project's network named default")
    add("--subnetwork", help="default: the network's")
    add("--internal-ips", action="store_true", help="machines without external addresses")
    patience = "give up waiting in the queue after, for example, 6h"
    add("--valid-until", dest="valid_until_duration", metavar="DURATION", help=patience)


def _wait_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="return once it is asked for")


def _setup_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what workers get").add_argument
    add("--code", type=Path, default=REPOSITORY, help="the checkout to copy, as it is (default: this one)")
    more = "a package to install beside the pinned ones, such as gcsfs"
    add("--with", dest="requirements", action="append", default=[], metavar="PACKAGE", help=more)
    script = "a bash script that runs on every worker afterwards: mounts, ..."
    add("--setup-script", type=Path, metavar="FILE", help=script)


def _job_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to run").add_argument
    add("config", metavar="CONFIG", type=Path, help="a config file here; it is copied to the workers")
    add("words", metavar="section.key=value", nargs="*", help="passed to the run as they are")
    script = "of the checkout, called with the config and the words (default: %(default)s)"
    add("--script", default=RUN_SCRIPT, help=script)
    variable = "set a variable for the run; printed and logged"
    add("--env", action="append", default=[], metavar="NAME=VALUE", help=variable)
    secret = f"pass on a variable unseen; always done for {' and '.join(SECRETS)}"
    add("--secret", action="append", default=[], metavar="NAME", help=secret)
    cache = "where host 0 keeps compiled programs for all: gs://... (default: every worker keeps its own)"
    add("--compilation-cache", metavar="DIR", help=cache)
    add("--libtpu-args", help="LIBTPU_INIT_ARGS, instead of those for this kind of TPU; '' for none")


def _retry_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how long to go on").add_argument
    add("--poll", type=float, default=60.0, metavar="SECONDS", help="between looks (default: %(default)s)")
    add("--restarts", type=int, default=10, help="of a run that ended early on its machine (default: %(default)s)")
    add("--run-dir-survives", action="store_true", help="run.dir outlives the machine, though it does not look so")


def _log_flags(parser: argparse.ArgumentParser) -> None:
    lines = "of every worker's log, from its end (default: %(default)s)"
    parser.add_argument("--lines", type=int, default=50, help=lines)
    parser.add_argument("--follow", action="store_true", help="go on until the runs end; Ctrl-C ends the looking only")


def _watch_flags(parser: argparse.ArgumentParser) -> None:
    run_dir = f"run.dir as the run has it, on worker 0, or where that is in a bucket, {BUCKET}..."
    parser.add_argument("run_dir", metavar="RUN_DIR", help=run_dir)
    parser.add_argument("--to", type=Path, metavar="DIR", help="a directory here (default: watched/NAME)")
    again = "between looks (default: %(default)s)"
    parser.add_argument("--poll", type=float, default=20.0, metavar="SECONDS", help=again)


def _stop_flags(parser: argparse.ArgumentParser) -> None:
    grace = "to save a checkpoint in, then it is killed (default: %(default)s)"
    parser.add_argument("--grace", type=int, default=300, metavar="SECONDS", help=grace)


VERBS = {
    "create": Verb("ask for a slice, and wait until it is ready", (_slice_flags, _wait_flags)),
    "setup": Verb("copy the code to every worker and install its environment with uv", (_setup_flags,)),
    "run": Verb(
        "start a run on all workers, detached: it goes on when this machine is off", (_slice_flags, _job_flags)
    ),
    "status": Verb("the slice's state, and on every worker the run's: process, exit code, last line"),
    "logs": Verb("what the run printed on every worker", (_log_flags,)),
    "watch": Verb("bring metrics and report of a run here, again and again until it has ended", (_watch_flags,)),
    "stop": Verb("end the run on every worker; it saves a checkpoint first and ends with exit code 4", (_stop_flags,)),
    "delete": Verb("give the slice back; what is on its disks is lost"),
    "babysit": Verb(
        "create, set up, run, and all of it again after a preemption, until the run has ended",
        (_slice_flags, _setup_flags, _job_flags, _retry_flags),
    ),
}
GKE_VERBS = {name: VERBS[name] for name in ("status", "logs", "watch", "stop", "delete")}
GKE_VERBS["run"] = Verb(
    "start a JobSet, which restarts the run: it goes on when this machine is off", (_jobset_flags, _job_flags)
)
VERBS_ON = {"gcloud": VERBS, "gke": GKE_VERBS}
