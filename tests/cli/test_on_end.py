"""People hear once how a run ended: by a command or at a URL, whatever ended it, and nothing else changes."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.processes import REPOSITORY
from tpu_grpo.cli.on_end import PeopleTold
from tpu_grpo.cli.train import main
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.hosts import End, Hosts, here
from tpu_grpo.records.errors import ConfigError, Interrupted, LockstepError


class Chat:
    """A server on the loopback interface that keeps what is posted to it."""

    def __init__(self, code: int = 200, waits: float = 0.0) -> None:
        self.posted: list[tuple[str, str | None, Any]] = []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                chat.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
                time.sleep(waits)
                self.send_response(code, "No Luck")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/hook/secret"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def chats() -> Iterator[list[Chat]]:
    made: list[Chat] = []
    yield made
    for chat in made:
        chat.server.shutdown()
        chat.server.server_close()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert here.at_end == {}


def config_of(run_dir: Path, on_end: str) -> RunConfig:
    run = {"name": "r", "dir": str(run_dir), "max_steps": 60}
    return parse_config({"run": run, "logging": {"on_end": on_end}})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://hooks.example.org/s3cret", None),
        ("curl -H s3cret x", None),
        ("$MY_CHAT", "$MY_CHAT"),
        ("${MY_CHAT}",) * 2,
    ],
)
def test_what_may_be_a_secret_is_not_written(tmp_path: Path, given: str, kept: str | None) -> None:
    config = config_of(tmp_path, given)
    assert config.logging.on_end == given
    assert yaml.safe_load(config.to_yaml())["logging"]["on_end"] == kept


def leave_steps(run_dir: Path) -> None:
    run_dir.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "rewards/mean": step / 10}) for step in range(1, 13)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir / "best.json").write_text('{"step": 10, "of": "greedy/a", "value": 0.5, "interval": [0.25, 0.75, 8]}')


def end_by(config: RunConfig, error: BaseException | None, hosts: Hosts | None = None) -> None:
    """A run of which 12 steps were done ends by an error, or by none."""
    with nullcontext() if error is None else pytest.raises(type(error)) as raised, PeopleTold() as told:
        told.begin(config, hosts or Hosts())
        here.step = 12
        if error is not None:
            raise error
    assert raised is None or raised.value is error


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (None, "done", 0, ""),
        (Interrupted("stopped after step 12 as asked"), "stopped", 4, "stopped after step 12 as asked"),
        (LockstepError("hosts differ"), "failed", 3, "LockstepError: hosts differ"),
        (KeyError("a bug"), "failed", 1, "KeyError: 'a bug'"),
        (KeyboardInterrupt(), "stopped", 1, "the run was interrupted at once; its newest checkpoint stays where it is"),
    ],
)
def test_an_address_gets_it_by_post(
    tmp_path: Path,
    chats: list[Chat],
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    status: str,
    code: int,
    message: str,
) -> None:
    chats.append(Chat())
    leave_steps(tmp_path)
    end_by(config_of(tmp_path, chats[0].address), error)
    [(path, kind, told)] = chats[0].posted
    assert (path, kind) == ("/hook/secret", "application/json")
    line = f"r {status} after step 12 of 60, reward 0.300 -> 1.000"  # 0.1 .. 0.5 and 0.8 .. 1.2
    assert told.pop("text") == (f"{line}: {message}" if message else line)
    assert told.pop("host")
    assert told.pop("rewards/first_mean") == pytest.approx(0.3)
    assert told.pop("rewards/last_mean") == pytest.approx(1.0)
    assert told == {
        "status": status,
        "exit_code": code,
        "message": message,
        "run": "r",
        "dir": str(tmp_path),
        "step": 12,
        "max_steps": 60,
        "report": str(tmp_path / "report.html"),
        "evaluation/best": {"step": 10, "of": "greedy/a", "value": 0.5, "interval": [0.25, 0.75, 8]},
    }
    assert capsys.readouterr().err == ""


def test_a_command_gets_it_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    leave_steps(tmp_path)
    command = f"cat > {tmp_path}/told; env | grep ^TPU_GRPO_ | sort > {tmp_path}/environment"
    end_by(config_of(tmp_path, command), LockstepError("hosts differ"))
    told = json.loads((tmp_path / "told").read_text())
    assert (told["status"], told["exit_code"], told["step"]) == ("failed", 3, 12)
    assert (tmp_path / "environment").read_text().splitlines() == [
        "TPU_GRPO_EXIT_CODE=3",
        "TPU_GRPO_MESSAGE=LockstepError: hosts differ",
        "TPU_GRPO_RUN=r",
        f"TPU_GRPO_RUN_DIR={tmp_path}",
        "TPU_GRPO_STATUS=failed",
    ]


def test_an_address_may_come_from_the_environment(
    tmp_path: Path, chats: list[Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats.append(Chat())
    monkeypatch.setenv("MY_CHAT", chats[0].address)
    end_by(config_of(tmp_path, "$MY_CHAT"), None)
    assert len(chats[0].posted) == 1


def test_an_address_that_the_environment_lacks_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_CHAT", raising=False)
    with (
        pytest.raises(ConfigError, match=r"on_end=\$\{MY_CHAT\} needs the variable MY_CHAT, which the environment of"),
        PeopleTold() as told,
    ):
        told.begin(config_of(tmp_path, "${MY_CHAT}"), Hosts())


def test_files_of_another_run_are_not_told(tmp_path: Path, chats: list[Chat]) -> None:
    """Such as those of a run that has the directory, because of which this one is refused."""
    chats.append(Chat())
    leave_steps(tmp_path)
    with PeopleTold() as told:
        told.begin(config_of(tmp_path, chats[0].address), Hosts())
    [(_, _, said)] = chats[0].posted
    assert said["step"] is None
    assert {"report", "rewards/last_mean", "evaluation/best"} & set(said) == set()


def test_other_hosts_and_a_run_that_never_met_them_tell_nobody(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"touch {tmp_path}/told")
    other = Hosts()
    other.index = 1
    end_by(config, None, other)
    with pytest.raises(LockstepError), PeopleTold():
        raise LockstepError("host 1 did not come")
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("answers 500", "http://127.0.0.1 answered 500 No Luck"),
        ("answers late", "http://127.0.0.1 did not answer within 0.5 s"),
        ("http://127.0.0.1:9/hook/secret", "http://127.0.0.1 did not take it: [Errno 111] Connection refused"),
        ("https://[secret", "it must be a URL such as https://example.org/hook, got one that cannot be read"),
        ("exit 7", "its command ended with exit code 7"),
        ("sleep 60", "its command did not end within 0.5 s and was killed"),
        ("no_such_command_anywhere 2>/dev/null", "its command ended with exit code 127"),
    ],
)
def test_who_cannot_be_told_is_one_line(
    tmp_path: Path,
    chats: list[Chat],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    problem: str,
) -> None:
    monkeypatch.setattr("tpu_grpo.cli.on_end.SECONDS", 0.5)
    if where.startswith("answers"):
        chats.append(Chat(500) if where == "answers 500" else Chat(waits=1.0))
        where = chats[0].address
    error = Interrupted("stopped")
    began = time.monotonic()
    end_by(config_of(tmp_path, where), error)  # the error is raised as it was
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err == f"logging.on_end was not told how r ended: {problem}\n"


def test_people_hear_once_also_if_another_thread_ends_the_process_meanwhile(tmp_path: Path, chats: list[Chat]) -> None:
    chats.append(Chat())
    with PeopleTold() as told:
        told.begin(config_of(tmp_path, chats[0].address), Hosts())
        here.at_end["logging.on_end"](End("failed", 3, "LockstepError: lost host 1"))
    assert [said["message"] for _, _, said in chats[0].posted] == ["LockstepError: lost host 1"]


@pytest.mark.parametrize(
    ("ends", "code", "status", "message"),
    [
        ("end_process('lost host 1')", 3, "failed", "LockstepError: lost host 1"),
        ("end_after('OSError: no space', 1, lambda: None)", 1, "failed", "OSError: no space"),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            4,
            "stopped",
            "SIGTERM: the run is ended before its first step",
        ),
    ],
)
def test_a_thread_that_ends_the_process_tells_people_first(
    tmp_path: Path, ends: str, code: int, status: str, message: str
) -> None:
    body = f"""
        import os, signal, sys, threading
        from tpu_grpo.cli.on_end import PeopleTold
        from tpu_grpo.config import parse_config
        from tpu_grpo.hosts import Hosts, SignalledStop
        from tpu_grpo.hosts.ending import end_after, end_process

        run = {{"name": "r", "dir": {str(tmp_path)!r}}}
        config = parse_config({{"run": run, "logging": {{"on_end": "cat > {tmp_path}/told"}}}})
        with SignalledStop(), PeopleTold() as told:
            told.begin(config, Hosts())
            threading.Thread(target=lambda: {ends}, daemon=True).start()
            threading.Event().wait(30)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == code, done.stderr
    told = json.loads((tmp_path / "told").read_text())
    assert (told["status"], told["exit_code"], told["message"]) == (status, code, message)


def test_who_starts_a_run_that_cannot_begin_hears_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"run.dir={tmp_path}/run", "model.path=/no/such/model", f"logging.on_end=cat > {tmp_path}/told"]
    assert main(words) == 2
    told = json.loads((tmp_path / "told").read_text())
    assert (told["status"], told["exit_code"], told["step"]) == ("failed", 2, None)
    assert f"{told['message']}\n" in capsys.readouterr().err
    assert told["text"] == f"run failed before its first step: {told['message']}"
