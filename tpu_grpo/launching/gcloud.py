"""Runs gcloud's commands, given as lists of words, and explains their failures.

Every command is printed first. Tests compare each command with gcloud's documented syntax, which is in
``tests/launching/gcloud_syntax.py``.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import IO, Any

from tpu_grpo.launching.launch_options import Options
from tpu_grpo.records.errors import ConfigError, LaunchError
from tpu_grpo.records.untrusted_input import parse_json

type Command = list[str]

SHOWN_LINES = 20
UNKNOWN = "unknown", "look at what gcloud printed above; `gcloud info --show-log` has the details"
WORKER = "worker", "see what the workers said; mend that, then give the command again"
"""(kind, remedy) if gcloud itself worked, but the command that it ran on a worker failed."""
EXPLANATIONS = (
    (
        "login",
        r"do not currently have an active account|Reauthentication|invalid_grant|refreshing your current auth tokens",
        "log in with `gcloud auth login`",
    ),
    (
        "project",
        r"required property \[(core/)?project\]|project.{0,40}could not be found|\[project\] is not",
        "give --project, or `gcloud config set project PROJECT`",
    ),
    (
        "api",
        r"SERVICE_DISABLED|API has not been used|API \[.*\] not enabled",
        "enable it with `gcloud services enable tpu.googleapis.com`, and wait a few minutes",
    ),
    (
        "zone",
        r"required property \[compute/zone\]|Failed to find attribute \[zone\]|Error parsing \[(tpu|queued_resource)\]"
        r"|Permission denied on 'locations/|Location .{0,40} (is|was) not found",
        "give --zone (or `gcloud config set compute/zone ZONE`), one that `gcloud compute tpus locations list` shows",
    ),
    (
        "type",
        r"invalid AcceleratorType|accelerator.?type.{0,80}(not found|invalid|not available|not supported)",
        "the zone has no such slice: `gcloud compute tpus accelerator-types list --zone=ZONE` shows what it has",
    ),
    (
        "quota",
        r"quota (limit|exceeded)|Quota '|QuotaFailure|exceeded.{0,40}quota",
        "the project may not use so many chips of this kind there: use a zone and a kind (--spot or not) that you have "
        "quota for, delete what you no longer use, or ask for more on the console's quota page",
    ),
    (
        "capacity",
        r"no more capacity|Insufficient (reserved )?capacity|stockout|RESOURCE_POOL_EXHAUSTED|\"?code\"?: 13\b",
        "there are none free in this zone now: wait in the queue (--how queued), try another zone or a smaller slice",
    ),
    (
        "agent",
        r"not present in the SSH agent",
        "load the key first: `ssh-add ~/.ssh/google_compute_engine` (start an agent with `eval $(ssh-agent)`); several "
        "workers cannot be reached at once without",
    ),
    (
        "gone",
        r"terminal state|while in state PREEMPTED|is in state \"?(PREEMPTED|TERMINATED)",
        "it was preempted: delete it and create it anew, or let `babysit` do so",
    ),
    (
        "maintenance",
        r"maintenance event|cannot be currently connected to",
        "wait until `status` shows READY and HEALTHY",
    ),
    ("exists", r"ALREADY_EXISTS|already exists", "use it, delete it first, or take another --name"),
    (
        "missing",
        r"NOT_FOUND|was not found|not found: |could not be found",
        "check --name, --zone, --project and --how (`gcloud compute tpus tpu-vm list --zone=ZONE` shows what there is)",
    ),
    (
        "ssh",
        r"return code \[?255|status 255|Connection (timed out|refused|closed|reset)|Permission denied \(publickey"
        r"|Network is unreachable|kex_exchange_identification|IAP tunneling",
        "a worker does not answer: wait a minute after its creation, load the key with `ssh-add`, allow port 22 in the "
        "network's firewall, or, without external addresses, use --internal-ip or --tunnel-through-iap",
    ),
    (
        "permission",
        r"PERMISSION_DENIED|does not have permission|Required '.*' permission|Permission '.*' denied|\b403\b",
        "your account needs the role TPU Admin (roles/tpu.admin), and Service Account User for --service-account",
    ),
    (
        "passing",
        r"UNAVAILABLE|DEADLINE_EXCEEDED|\bINTERNAL\b(?!-)|50[0234]\b|Unable to find the server|Max retries exceeded",
        "a passing fault of the service or the network: try again in a minute",
    ),
)
"""Kinds of failure: (kind, pattern, remedy). Patterns are searched in gcloud's output, ignoring case. The first pattern
found decides, so specific patterns come before general patterns."""
RETRIABLE = ["unknown", "worker", "quota", "capacity", "gone", "maintenance", "exists", "missing", "ssh", "passing"]
"""Kinds of failure after which ``babysit`` repeats the command, because it may succeed later."""


class GcloudError(LaunchError):
    """gcloud failed.

    Args:
        command: the command that was run.
        code: its exit code.
        output: everything that gcloud printed.
        workers: the output of the workers.
    """

    explanations: tuple[tuple[str, str, str], ...] = EXPLANATIONS
    unknown = UNKNOWN

    def __init__(self, command: Sequence[str], code: int, output: str, workers: str = ""):
        self.command, self.code, self.output = command, code, output
        explained = (
            (kind, remedy) for kind, pattern, remedy in self.explanations if re.search(pattern, output, re.I | re.S)
        )
        self.kind, remedy = next(explained, WORKER if workers else self.unknown)
        self.is_retriable = self.kind in RETRIABLE
        *first, last = (word for word in command if not word.startswith("-"))
        what = " ".join([*first[:6], last])  # the name of the TPU is last
        lines = [f"`{what}` failed ({self.kind}, exit code {code})"]
        lines += [f"  {line}" for line in output.strip().splitlines()[-SHOWN_LINES:]]
        lines += ["what the workers said:", *(f"  {line}" for line in workers.splitlines())] if workers else []
        super().__init__("\n".join([*lines, remedy]))


class Gcloud:
    """Runs gcloud and prints every command to stderr.

    In a dry run, commands are only printed, and succeed with empty output.
    """

    error: type[GcloudError] = GcloudError
    common: tuple[str, ...] = ("zone", "project")
    """The options that every command has as flags."""
    always: tuple[str, ...] = ("--quiet",)
    absent = "gcloud must be on the PATH, got no such program; install the Google Cloud CLI, then `gcloud init`"

    def __init__(self, options: Options):
        self._options, self.dry_run = options, options.dry_run
        self._printed: set[str] = set()

    def flags(self, *names: str) -> Command:
        """Return the program's flags for the named options and those in ``common``, as far as they were given."""
        given = {name: getattr(self._options, name) for name in (*names, *self.common)}
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in given.items()
            if value is not None and value is not False
        ]
        return [*flags, *self.always]

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print(text, file=sys.stderr, flush=True)

    def announce(self, command: Sequence[str], *, repeated: bool = False) -> None:
        """Print a command; a ``repeated`` command is printed only the first time."""
        line = f"$ {shlex.join(command)}"
        if not (repeated and line in self._printed):
            self.say(line)
        self._printed.add(line)

    def run(self, command: Sequence[str], *, show: bool = False, repeated: bool = False) -> str:
        """Run a command to its end and return its stdout.

        Args:
            command: the words of the command, the first is gcloud.
            show: whether to print its stderr while it runs.
            repeated: whether the command is run regularly, and thus printed only the first time.

        Raises:
            ConfigError: gcloud is not installed.
            GcloudError: the command failed; the message explains the error.
        """
        self.announce(command, repeated=repeated)
        if self.dry_run:
            return ""
        stderr: list[str] = []
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as stdout:
            with self.start(command, stdout) as process:
                for line in process.stderr or ():
                    stderr.append(line)
                    if show:
                        self.say(f"  {line.rstrip()}")
            stdout.seek(0)
            text = stdout.read()
        if process.returncode:
            raise self.error(command, process.returncode, text + "".join(stderr))
        return text

    def read(self, command: Sequence[str]) -> Any:
        """Run a command regularly, and return its output as JSON; None if it prints nothing, or in a dry run."""
        text = self.run(command, repeated=True)
        try:
            return parse_json(text) if text.strip() else None
        except json.JSONDecodeError as error:
            problem = f"`{shlex.join(command)}` must print JSON, got {text[:200]!r}; update {command[0]}"
            raise LaunchError(problem) from error

    def describe(self, *words: str) -> Any:
        """Return the parsed output of ``gcloud compute tpus WORDS``; None if the resource does not exist, or in a dry
        run."""
        try:
            return self.read(["gcloud", "compute", "tpus", *words, *self.flags(), "--format=json"])
        except GcloudError as error:
            if error.kind != "missing":
                raise
            return None

    def start(self, command: Sequence[str], stdout: IO[str] | int = subprocess.PIPE) -> "subprocess.Popen[str]":
        """Start a command with stderr as a pipe, and without stdin, so that it cannot wait for input."""
        pipe, no_input = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                command, stdin=no_input, stdout=stdout, stderr=pipe, text=True, encoding="utf-8", errors="replace"
            )
        except FileNotFoundError:
            raise ConfigError(self.absent) from None
