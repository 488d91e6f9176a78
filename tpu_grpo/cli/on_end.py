"""Notifies people of the end of a run (``logging.on_end``): a command gets a JSON object on stdin, a URL by POST.

The run's report is written first. If the command or URL fails, one line on stderr says so; the exit code is unchanged.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Self
from urllib.parse import urlsplit

from tpu_grpo.config import RunConfig
from tpu_grpo.config.sections import VARIABLE, RunSection
from tpu_grpo.hosts import End, Hosts, here
from tpu_grpo.observe.run_files import BEST_FILE, METRICS_FILE, REPORT_FILE
from tpu_grpo.records.errors import ConfigError, DataError

SECONDS = 10.0
"""The time limit of a command or a URL."""
NAME = "logging.on_end"


class PeopleTold:
    """Sends one notification, from host 0, of how the run in a ``with`` block ended, if ``begin`` was called in it.

        with PeopleTold() as told, joined_hosts(config) as (hosts, watch):
            told.begin(config, hosts)
            ...

    If another thread ends the process, the notification is sent, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: tuple[RunConfig, str] | None = None
        """The run whose end is to be reported, and the command or URL."""

    def begin(self, config: RunConfig, hosts: Hosts) -> None:
        """Report the end of the run from now on. Raises as `receiver` does."""
        if hosts.is_first and (where := receiver(config.logging.on_end)) is not None:
            self._due = config, where
            here.at_end[NAME] = self.tell

    def tell(self, end: End) -> None:
        """Send the notification, unless that was done or begun before."""
        with self._lock:
            due, self._due = self._due, None
        if due is None:
            return
        config, where = due
        told = description(config, end)
        data = json.dumps(told, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
        problem = _post(where, data) if where.startswith(("http://", "https://")) else _run(where, data, told)
        if problem:
            print(f"{NAME} was not told how {config.run.name} ended: {problem}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        here.step = None
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.tell(End.by(error))
        here.at_end.pop(NAME, None)


def description(config: RunConfig, end: End) -> dict[str, Any]:
    """Return the content of the notification: ``text`` is one line for chats, the other fields have the details."""
    from tpu_grpo.observe.json_lines import jsonable, numbers, read_records  # imports numpy, which takes a moment
    from tpu_grpo.observe.summary import edge_means

    directory, steps = config.run_dir.resolve(), here.step
    known: dict[str, Any] = {}
    if steps is not None:  # the run has its directory, so the files are its own
        known["report"] = str(directory / REPORT_FILE)
        with suppress(DataError, OSError):
            if rewards := numbers(read_records(directory / METRICS_FILE, missing_ok=True), "rewards/mean"):
                known["rewards/first_mean"], known["rewards/last_mean"] = edge_means(rewards)
        with suppress(ValueError, OSError):
            known["evaluation/best"] = json.loads((directory / BEST_FILE).read_bytes())
    told = {
        "text": _line(config.run, end, steps, known),
        "status": end.outcome,
        "exit_code": end.code,
        "message": end.message,
        "run": config.run.name,
        "dir": str(directory),
        "step": steps,
        "max_steps": config.run.max_steps,
        "host": socket.gethostname(),
        **known,
    }
    return jsonable(told)


def _line(run: RunSection, end: End, steps: int | None, known: dict[str, Any]) -> str:
    line = f"{run.name} {end.outcome} "
    line += "before its first step" if not steps else f"after step {steps} of {run.max_steps}"
    if "rewards/last_mean" in known:
        line += f", reward {known['rewards/first_mean']:.3f} -> {known['rewards/last_mean']:.3f}"
    return f"{line}: {end.message}" if end.message else line


def receiver(setting: str | None) -> str | None:
    """Return the command or URL of ``logging.on_end``; None if it is unset. For ``$NAME`` it is the value of that
    environment variable. Raises ConfigError if the environment lacks the variable."""
    if setting is None or not (named := VARIABLE.fullmatch(setting.strip())):
        return setting and setting.strip()
    name = named[1].strip("{}")
    if not (found := os.environ.get(name, "").strip()):
        raise ConfigError(
            f"{NAME}={setting} needs the variable {name}, which the environment of host 0 does not have; set it to a "
            "URL or a command, or leave the setting out"
        )
    return found


def _post(address: str, data: bytes) -> str:
    """Post the data; return an error text or "". The text omits the URL's path, which is often secret."""
    try:
        shown = f"{urlsplit(address).scheme}://{urlsplit(address).hostname}"
    except ValueError:
        return "it must be a URL such as https://example.org/hook, got one that cannot be read"
    answer: list[str] = []

    def post() -> None:
        try:
            request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method="POST")
            with urllib.request.urlopen(request, timeout=SECONDS):
                answer.append("")
        except urllib.error.HTTPError as error:
            answer.append(f"{shown} answered {error.code} {error.reason}")
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None)
            if not isinstance(reason or error, TimeoutError):  # a timeout counts as no answer, below
                answer.append(f"{shown} did not take it: {reason or type(error).__name__}")

    thread = threading.Thread(target=post, daemon=True)  # urlopen does not time out if an answer comes byte by byte
    thread.start()
    thread.join(SECONDS)
    return answer[0] if answer else f"{shown} did not answer within {SECONDS:g} s"


def _run(command: str, data: bytes, told: dict[str, Any]) -> str:
    """Run a shell command with its output on stderr; return an error text or ""."""
    names = {"STATUS": "status", "EXIT_CODE": "exit_code", "MESSAGE": "message", "RUN": "run", "RUN_DIR": "dir"}
    environment = os.environ | {f"TPU_GRPO_{name}": str(told[key]) for name, key in names.items()}
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stdout=2, env=environment, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"its command cannot be started: {error}"
    try:
        process.communicate(data, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"its command did not end within {SECONDS:g} s and was killed"
    return f"its command ended with exit code {process.returncode}" if process.returncode else ""
