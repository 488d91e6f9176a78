"""The verbs of ``scripts/launch.py`` and their flags."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_grpo.launching.babysit import Patience
from tpu_grpo.launching.jobs import CACHE, RUN_SCRIPT, SECRETS
from tpu_grpo.launching.settings import VARIABLES

PROGRAM = "python scripts/launch.py"
ABOUT = f"""Runs training on a Cloud TPU slice with gcloud: every command is printed before it is run.

  {PROGRAM} create  --name grpo --type v5e-16 --zone us-west4-a --spot    ask for a slice, wait until it is ready
  {PROGRAM} setup   --name grpo --zone us-west4-a                         code and environment on every worker
  {PROGRAM} run     --name grpo --zone us-west4-a CONFIG [section.key=value ...]    start on all workers, detached
  {PROGRAM} status | logs | stop | delete  --name grpo --zone us-west4-a
  {PROGRAM} babysit --name grpo --type v5e-16 --zone us-west4-a --spot CONFIG ...    all of it, again after preemptions

--name, --zone, --project and --type may come from {", ".join(VARIABLES.values())}; zone and project also from
`gcloud config`. --dry-run prints the commands and runs none. What follows -- goes to the run as it is.
docs/launching.md tells the whole way, and what to do when something goes wrong."""

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEFAULT_PATIENCE = Patience()

type Add = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
    """One command."""

    about: str
    flags: tuple[Add, ...] = ()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags by name, with the ``verb``; argparse ends the process for help and mistakes."""
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
    options = _verb_parser(verb).parse_intermixed_args(before[1:])
    if after:
        if not hasattr(options, "words"):
            top.error(f"{verb} takes no words after --, got {after}")
        options.words = [*options.words, *after]
    options.verb = verb
    return options


def _verb_parser(name: str) -> argparse.ArgumentParser:
    words = " CONFIG [section.key=value ...]" if _job in VERBS[name].flags else ""
    usage = f"{PROGRAM} {name} [FLAGS]{words}"
    parser = argparse.ArgumentParser(usage=usage, description=VERBS[name].about, allow_abbrev=False)
    for add in (_target, *VERBS[name].flags):
        add(parser)
    return parser


def _target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which TPU").add_argument
    add("--name", help=f"of the TPU ({VARIABLES['name']})")
    add("--zone", help=f"({VARIABLES['zone']}, else gcloud's compute/zone)")
    add("--project", help=f"({VARIABLES['project']}, else gcloud's core/project)")
    add(
        "--how",
        choices=("queued", "vm"),
        default="queued",
        help="a queued resource, or a TPU VM at once (default: queued)",
    )
    add("--dry-run", action="store_true", help="print the commands, run none")
    add = parser.add_argument_group("how workers are reached").add_argument
    add("--user", help="log in as this user (default: gcloud's choice)")
    add("--internal-ip", action="store_true", help="by the internal address, from a machine in the same network")
    add("--tunnel-through-iap", action="store_true", help="through Identity-Aware Proxy, with gcloud's alpha commands")
    add("--ssh-key-file", help="instead of gcloud's own key")


def _slice(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to create").add_argument
    add("--type", help=f"v5e-16, v6e-8, v5p-8, v4-32 ... ({VARIABLES['type']})")
    add("--spot", action="store_true", help="cheaper, and may be taken away at any time")
    add("--reserved", action="store_true", help="from the project's reservation")
    add("--runtime", help="software version of the machines (default: the one for JAX on this kind of TPU)")
    add("--service-account", help="what the machines act as; it needs access to your buckets")
    add("--network", help="default: the project's network named default")
    add("--subnetwork", help="default: the network's")
    add("--internal-ips", action="store_true", help="machines without external addresses")
    add("--valid-until", metavar="DURATION", help="give up waiting in the queue after, for example, 6h")


def _waiting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="return once it is asked for")


def _equipment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what workers get").add_argument
    add("--code", type=Path, default=REPOSITORY, help="the checkout to copy, as it is (default: this one)")
    more = "a package to install beside the pinned ones, such as gcsfs"
    add("--with", dest="requirements", action="append", default=[], metavar="PACKAGE", help=more)
    add(
        "--setup-script",
        type=Path,
        metavar="FILE",
        help="a bash script that runs on every worker afterwards: mounts, ...",
    )


def _job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to run").add_argument
    add("config", metavar="CONFIG", type=Path, help="a config file here; it is copied to the workers")
    add("words", metavar="section.key=value", nargs="*", help="passed to the run as they are")
    add(
        "--script",
        default=RUN_SCRIPT,
        help=f"of the checkout, called with the config and the words (default: {RUN_SCRIPT})",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the run; printed and logged",
    )
    secrets = " and ".join(SECRETS)
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help=f"pass on a variable unseen; always done for {secrets}",
    )
    add(
        "--compilation-cache",
        default=CACHE,
        help="where compiled programs are kept: a directory, or gs:// (default: %(default)s)",
    )
    add("--libtpu-args", help="LIBTPU_INIT_ARGS, instead of those for this kind of TPU; '' for none")


def _patience(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how long to go on").add_argument
    default = DEFAULT_PATIENCE
    add(
        "--poll",
        type=float,
        default=default.poll_seconds,
        metavar="SECONDS",
        help="between looks (default: %(default)s)",
    )
    add(
        "--restarts",
        type=int,
        default=default.restarts,
        help="of a run that ended early on its machine (default: %(default)s)",
    )
    add("--run-dir-survives", action="store_true", help="run.dir outlives the machine, though it does not look so")


def _lines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lines", type=int, default=50, help="of every worker's log, from its end (default: %(default)s)"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the runs end; Ctrl-C ends the looking only")


def _grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=int,
        default=300,
        metavar="SECONDS",
        help="to save a checkpoint in, then it is killed (default: %(default)s)",
    )


VERBS = {
    "create": Verb("ask for a slice, and wait until it is ready", (_slice, _waiting)),
    "setup": Verb("copy the code to every worker and install its environment with uv", (_equipment,)),
    "run": Verb("start a run on all workers, detached: it goes on when this machine is off", (_slice, _job)),
    "status": Verb("the slice's state, and on every worker the run's: process, exit code, last line"),
    "logs": Verb("what the run printed on every worker", (_lines,)),
    "stop": Verb("end the run on every worker; it saves a checkpoint first and ends with exit code 4", (_grace,)),
    "delete": Verb("give the slice back; what is on its disks is lost"),
    "babysit": Verb(
        "create, set up, run, and all of it again after a preemption, until the run has ended",
        (_slice, _equipment, _job, _patience),
    ),
}
