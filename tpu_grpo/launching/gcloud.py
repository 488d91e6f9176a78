"""Runs gcloud: every command is printed first, and what goes wrong is explained."""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from tpu_grpo.launching.explanations import UNKNOWN, WORKER, Explanation, explain
from tpu_grpo.records.errors import ConfigError, LaunchError

SHOWN_LINES = 20


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
        found = explain(output)
        self.explanation: Explanation = WORKER if found is UNKNOWN and workers else found
        what = " ".join(word for word in command[:6] if not word.startswith("-"))
        lines = [f"`{what}` failed ({self.explanation.kind}, exit code {code})"]
        lines += [f"  {line}" for line in output.strip().splitlines()[-SHOWN_LINES:]]
        lines += ["what the workers said:", *(f"  {line}" for line in workers.splitlines())] if workers else []
        super().__init__("\n".join([*lines, self.explanation.remedy]))


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
        self._announce(command, repeated)
        if self.dry_run:
            return ""
        with self.start(command) as process:
            assert process.stdout is not None
            stderr: list[str] = []
            reader = threading.Thread(target=self._read, args=(process.stderr, stderr, show))
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

    def start(self, command: Sequence[str], *, announce: bool = False) -> subprocess.Popen[str]:
        """Start a command, its stdout and stderr as pipes. It gets no input, so that it cannot wait for an answer."""
        if announce:
            self._announce(command, repeated=False)
        pipe, no_input = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(
                command, stdin=no_input, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", errors="replace"
            )
        except FileNotFoundError:
            raise ConfigError(
                "gcloud must be on the PATH, got no such program; install the Google Cloud CLI, then `gcloud init`"
            ) from None

    def _announce(self, command: Sequence[str], repeated: bool) -> None:
        line = f"$ {shlex.join(command)}"
        if not repeated or line not in self._printed:
            self.say(line)
        self._printed.add(line)

    def _read(self, stream: TextIO, kept: list[str], show: bool) -> None:
        for line in stream:
            kept.append(line)
            if show:
                self.say(f"  {line.rstrip()}")
