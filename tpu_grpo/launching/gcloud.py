"""gcloud: its commands as lists of words, running them, and what is wrong when one fails.

Every command is printed first. ``tests/launching/gcloud_syntax.py`` holds the documented syntax that each is compared
with.
"""

import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_grpo.launching.launch_options import Options
from tpu_grpo.records.errors import ConfigError, LaunchError

type Command = list[str]

TPU_VM = ("compute", "tpus", "tpu-vm")
QUEUED_RESOURCES = ("compute", "tpus", "queued-resources")
CREATION_FLAGS = (
    *("service_account", "network", "subnetwork", "valid_until_duration"),
    *("spot", "reserved", "internal_ips"),
)
WORKER_FLAGS = ("ssh_key_file", "internal_ip", "tunnel_through_iap")
SHOWN_LINES = 20

# --- commands --------------------------------------------------------------------------------------------------------


def create_command(options: Options) -> Command:
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


def describe_request_command(options: Options) -> Command:
    """Print the queued resource as JSON."""
    return ["gcloud", *QUEUED_RESOURCES, "describe", options.name, *_flags(options), "--format=json"]


def describe_node_command(options: Options) -> Command:
    """Print the node with its workers as JSON."""
    return ["gcloud", *TPU_VM, "describe", options.name, *_flags(options), "--format=json"]


def delete_command(options: Options) -> Command:
    """Give everything back; returns when it is gone."""
    if options.how == "queued":  # --force: its node too
        return ["gcloud", *QUEUED_RESOURCES, "delete", options.name, "--force", *_flags(options)]
    return ["gcloud", *TPU_VM, "delete", options.name, *_flags(options)]


def ssh_command(options: Options, remote: str, *, worker: int | str = "all", outputs: Path | None = None) -> Command:
    """Run a line of shell on workers; what worker i prints goes to ``outputs``/i.log, or to stdout and stderr."""
    logs = [f"--output-directory={outputs}"] if outputs else []
    words = [_login(options), f"--worker={worker}", f"--command={remote}", *logs]
    return [*_on_workers(options), "ssh", *words, *_flags(options, *WORKER_FLAGS)]


def scp_command(options: Options, files: Sequence[Path], directory: str) -> Command:
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


# --- what is wrong ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Describes a kind of failure, which is recognised by a pattern in what gcloud printed, whatever the case."""

    kind: str
    pattern: str
    remedy: str
    retriable: bool = False
    """``babysit`` gives the same command again: it may succeed later."""


UNKNOWN = Explanation(
    "unknown", "", "look at what gcloud printed above; `gcloud info --show-log` has the details", retriable=True
)
WORKER = Explanation("worker", "", "see what the workers said; mend that, then give the command again", retriable=True)
"""gcloud did its part, and a worker failed."""

EXPLANATIONS = (  # the first pattern that is found decides, so the particular stand before the general
    Explanation(
        "login",
        r"do not currently have an active account|Reauthentication|invalid_grant|refreshing your current auth tokens",
        "log in with `gcloud auth login`",
    ),
    Explanation(
        "project",
        r"required property \[(core/)?project\]|project.{0,40}could not be found|\[project\] is not",
        "give --project, or `gcloud config set project PROJECT`",
    ),
    Explanation(
        "api",
        r"SERVICE_DISABLED|API has not been used|API \[.*\] not enabled",
        "enable it with `gcloud services enable tpu.googleapis.com`, and wait a few minutes",
    ),
    Explanation(
        "zone",
        r"required property \[compute/zone\]|Failed to find attribute \[zone\]|Error parsing \[(tpu|queued_resource)\]"
        r"|Permission denied on 'locations/|Location .{0,40} (is|was) not found",
        "give --zone (or `gcloud config set compute/zone ZONE`), one that `gcloud compute tpus locations list` shows",
    ),
    Explanation(
        "type",
        r"invalid AcceleratorType|accelerator.?type.{0,80}(not found|invalid|not available|not supported)",
        "the zone has no such slice: `gcloud compute tpus accelerator-types list --zone=ZONE` shows what it has",
    ),
    Explanation(
        "quota",
        r"quota (limit|exceeded)|Quota '|QuotaFailure|exceeded.{0,40}quota",
        "the project may not use so many chips of this kind there: use a zone and a kind (--spot or not) that you have "
        "quota for, delete what you no longer use, or ask for more on the console's quota page",
        retriable=True,
    ),
    Explanation(
        "capacity",
        r"no more capacity|Insufficient (reserved )?capacity|stockout|RESOURCE_POOL_EXHAUSTED|\"?code\"?: 13\b",
        "there are none free in this zone now: wait in the queue (--how queued), or try another zone or a smaller "
        "slice",
        retriable=True,
    ),
    Explanation(
        "agent",
        r"not present in the SSH agent",
        "load the key first: `ssh-add ~/.ssh/google_compute_engine` (start an agent with `eval $(ssh-agent)`); several "
        "workers cannot be reached at once without",
    ),
    Explanation(
        "gone",
        r"terminal state|while in state PREEMPTED|is in state \"?(PREEMPTED|TERMINATED)",
        "it was preempted: delete it and create it anew, or let `babysit` do so",
        retriable=True,
    ),
    Explanation(
        "maintenance",
        r"maintenance event|cannot be currently connected to",
        "wait until `status` shows READY and HEALTHY",
        retriable=True,
    ),
    Explanation(
        "exists",
        r"ALREADY_EXISTS|already exists",
        "use it, delete it first, or take another --name",
        retriable=True,
    ),
    Explanation(
        "missing",
        r"NOT_FOUND|was not found|not found: |could not be found",
        "check --name, --zone, --project and --how (`gcloud compute tpus tpu-vm list --zone=ZONE` shows what there is)",
        retriable=True,
    ),
    Explanation(
        "ssh",
        r"return code \[?255|status 255|Connection (timed out|refused|closed|reset)|Permission denied \(publickey"
        r"|Network is unreachable|kex_exchange_identification|IAP tunneling",
        "a worker does not answer: wait a minute after its creation, load the key with `ssh-add`, allow port 22 in the "
        "network's firewall, or, without external addresses, use --internal-ip or --tunnel-through-iap",
        retriable=True,
    ),
    Explanation(
        "permission",
        r"PERMISSION_DENIED|does not have permission|Required '.*' permission|Permission '.*' denied|\b403\b",
        "your account needs the role TPU Admin (roles/tpu.admin), and Service Account User for --service-account",
    ),
    Explanation(
        "passing",
        r"UNAVAILABLE|DEADLINE_EXCEEDED|\bINTERNAL\b(?!-)|50[0234]\b|Unable to find the server|Max retries exceeded",
        "a passing fault of the service or the network: try again in a minute",
        retriable=True,
    ),
)


class GcloudError(LaunchError):
    """gcloud ended with an error.

    Args:
        command: the words that were run.
        code: their exit code.
        output: everything that gcloud printed.
        workers: what workers said meanwhile.
    """

    def __init__(self, command: Sequence[str], code: int, output: str, workers: str = ""):
        self.command, self.code, self.output = command, code, output
        matching = (e for e in EXPLANATIONS if re.search(e.pattern, output, re.IGNORECASE | re.DOTALL))
        self.explanation = next(matching, WORKER if workers else UNKNOWN)
        what = " ".join(word for word in command[:6] if not word.startswith("-"))
        lines = [f"`{what}` failed ({self.explanation.kind}, exit code {code})"]
        lines += [f"  {line}" for line in output.strip().splitlines()[-SHOWN_LINES:]]
        lines += ["what the workers said:", *(f"  {line}" for line in workers.splitlines())] if workers else []
        super().__init__("\n".join([*lines, self.explanation.remedy]))


# --- running ---------------------------------------------------------------------------------------------------------


class Gcloud:
    """Runs gcloud and prints every command to stderr.

    In a dry run commands are printed only; each succeeds and says nothing.
    """

    def __init__(self, *, dry_run: bool = False):
        self.dry_run = dry_run
        self._printed: set[str] = set()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print(text, file=sys.stderr, flush=True)

    def announce(self, command: Sequence[str], *, repeated: bool = False) -> None:
        """Print a command; one that is ``repeated``, only the first time."""
        line = f"$ {shlex.join(command)}"
        if not (repeated and line in self._printed):
            self.say(line)
        self._printed.add(line)

    def run(self, command: Sequence[str], *, show: bool = False, repeated: bool = False) -> str:
        """Run a command to its end and return its stdout.

        Args:
            command: words, beginning with gcloud.
            show: whether what it says on stderr is passed on while it runs.
            repeated: whether it is run again and again, and printed the first time only.

        Raises:
            ConfigError: there is no gcloud.
            GcloudError: the command ended with an error, explained.
        """
        self.announce(command, repeated=repeated)
        if self.dry_run:
            return ""
        with self.start(command) as process:
            assert process.stdout is not None
            stderr: list[str] = []

            def read() -> None:
                for line in process.stderr or ():
                    stderr.append(line)
                    if show:
                        self.say(f"  {line.rstrip()}")

            reader = threading.Thread(target=read)
            reader.start()
            stdout = process.stdout.read()
            reader.join()
        if process.returncode:
            raise GcloudError(command, process.returncode, stdout + "".join(stderr))
        return stdout

    def json(self, command: Sequence[str]) -> Any:
        """Return what a command prints as JSON; None in a dry run."""
        text = self.run(command, repeated=True)
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise LaunchError(f"`{shlex.join(command)}` must print JSON, got {text[:200]!r}; update gcloud") from error

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command, its stdout and stderr as pipes. It gets no input, so that it cannot wait for an answer."""
        pipe, no_input = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                command, stdin=no_input, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", errors="replace"
            )
        except FileNotFoundError:
            raise ConfigError(
                "gcloud must be on the PATH, got no such program; install the Google Cloud CLI, then `gcloud init`"
            ) from None
