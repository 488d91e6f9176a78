"""Gives commands input with random faults: they must end with exit code 0 or 2, in bounded time and memory.

    uv run python -m tests.several.fuzz --inputs 10000

Configs, data, models, tokenizers, chat templates, completions and the directories of runs are changed: single bytes,
values of JSON and YAML that are replaced by harmful ones, whole files that become pipes, links or directories. Each
input goes to a command in a forked child; ``--processes N`` starts N of the commands as users do. The output of failed
commands is kept in ``--keep``.

Messages between hosts, and from workers, are changed in the same ways and given to the functions that read them: a
broken message may raise the error that is meant for it, and nothing else.
"""

import argparse
import json
import os
import random
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from tests.several.runs import REPOSITORY, settings, write_files

SECONDS = 60.0
"""The seconds after which a command counts as hung."""
GIBIBYTES = 12
"""The limit on a command's address space."""
DEEP, DIGITS = "[" * 50_000, "9" * 10_000
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, 1e308, -1e-308, 0.5, "", " ", "x", "\ud800", "\x00",
    "\x1b[2J", "'x' * 99999999999", "{{ 'x' * 99999999999 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{question:>99999999999}", "{0}", "{", "../..", "/dev/zero", "a" * 100_000, "builtin:none", "hf:x", "x:y",
    [], {}, [[]], [None], {"": {}}, {"a": 1}, [1, "a", None], "é\u202e", "1e999", "NaN",
)  # fmt: skip
TOKENS = (
    DEEP, DIGITS, "{", "}", "[", "]", '"', ":", ",", "\n", "&a", "*a", "<<: *a", "!!python/object:os.system", "\\ud800",
    "\x00", "\xff", "null", "NaN", "-", "'", "{% raw %}", "{{ 1/0 }}", "---", "...", "%", "\t",
)  # fmt: skip
RUN = (
    "config.yaml", "metrics.jsonl", "history.jsonl", "samples.jsonl", "evaluation.jsonl", "summary.json",
    "sources.json", "data.json", "best.json", "end.json", "run.lock", "run_id", "changes.jsonl",
)  # fmt: skip
KINDS = {
    "config": ["c.yaml"],
    "data": ["data.jsonl", "held.jsonl"],
    "model": ["model/config.json", "model/model.safetensors"],
    "tokenizer": ["model/tokenizer.json", "model/tokenizer_config.json", "model/special_tokens_map.json"],
    "template": ["model/chat_template.jinja"],
    "run": [f"run/{name}" for name in RUN],
    "completions": ["completions.jsonl"],
    "messages": [
        "caller.json", "host_0.json", "batch.jsonl", "conversation.jsonl", "stream", "exchange", "exchange.json",
        "told.json",
    ],
}  # fmt: skip
COMMANDS = {
    "config": [["run", "c.yaml", "--dry-run"], ["run", "c.yaml", "--print-config"]],
    "data": [["run", "c.yaml", "--dry-run"], ["data", "c.yaml"]],
    "model": [["run", "c.yaml", "--dry-run"]],
    "tokenizer": [["data", "c.yaml"], ["run", "c.yaml", "--dry-run"]],
    "template": [["data", "c.yaml"]],
    "run": [["run", "c.yaml", "--dry-run"], ["report", "run"]],
    "completions": [["rewards", "c.yaml", "--completions", "completions.jsonl"]],
}


@dataclass(frozen=True)
class Message:
    """A message from one process to another, and the function that reads it."""

    sound: bytes
    read: Callable[[bytes], object]
    refused_by: tuple[type[Exception], ...] = ()
    """The errors that a broken message may raise."""


def messages() -> dict[str, Message]:
    """Return a correct message of each kind, by file name, with the function that reads it in a run."""
    from tpu_grpo.engine.exchange import decode_completions, encode_completions
    from tpu_grpo.environments.actions import Answered, Ended
    from tpu_grpo.hosts import meeting
    from tpu_grpo.hosts.authentication import session_key, signature
    from tpu_grpo.hosts.host_agreement import read_told
    from tpu_grpo.records.episode import Branch, Episode, Failure, KeptEnvironment, Turn
    from tpu_grpo.records.errors import ConfigError, LockstepError
    from tpu_grpo.records.stages import Completion
    from tpu_grpo.rewards.reward_call import Answer, Problem
    from tpu_grpo.workers.channel import BrokenChannelError, WorkerChannel, encode
    from tpu_grpo.workers.messages import Ready, SetupFailed, WentOn

    me = meeting.Caller("run", 1, 2)
    key = session_key(b"", ["first", me.nonce])
    come = {"come": True, "nonces": ["first", me.nonce], "proof": signature(key, b"come").hex()}

    def host_0(data: bytes) -> bytes:
        """Call `meeting.arrive` at a server that answers with ``data``."""
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer() -> None:
                with suppress(OSError):  # the client may close the connection early
                    while True:
                        guest, _ = server.accept()
                        with guest, suppress(OSError):
                            guest.recv(2**16)
                            guest.sendall(data)

            threading.Thread(target=answer, daemon=True).start()
            try:
                return meeting.arrive(f"127.0.0.1:{server.getsockname()[1]}", me, 0.1)
            finally:
                server.shutdown(socket.SHUT_RDWR)

    def from_worker(types: tuple[type, ...], is_framed: bool) -> Callable[[bytes], object]:
        def read(data: bytes) -> object:
            ours, theirs = socket.socketpair()
            channel = WorkerChannel(ours, types, 2**16)
            try:
                theirs.setblocking(False)
                with suppress(BlockingIOError):
                    theirs.sendall(data if is_framed else struct.pack("!I", len(data)) + data)
                theirs.close()
                return channel.receive()
            finally:
                channel.close()

        return read

    branch = Branch((1, 2), 0, 2, np.zeros((3, 1, 1), np.uint8))
    said, kept = ({"role": "user", "content": "7"},), KeptEnvironment("game.py:Game", b"state")
    episode = Episode("p", (branch,), (Turn(0, 2, "a"),), "failed", said, "game", 0.5, Failure("raised", "why"), kept)
    tokens, logprobs = np.arange(2, dtype=np.int32), np.zeros(2, np.float32)
    completions = {
        0: Completion(tokens, logprobs, "stop", 0, episode=episode),
        2: Completion(tokens, logprobs, "length", 1),
    }
    reward = (Ready, SetupFailed, WentOn, Answer)
    answer = encode(3, Answer([1.0, float("nan")], [Problem("raised", "why", 1, trace="t")], {"length": [2.0]}))
    played = encode(0, Ended(0.5, (0.5, 1.0), kept))
    exchanged = encode_completions(completions)
    end = 8 + int.from_bytes(exchanged[:8], "little")
    foreign = (BrokenChannelError,)
    return {
        "caller.json": Message(me.to_line(), meeting.caller_of),
        "host_0.json": Message(json.dumps(come).encode() + b"\n", host_0, (ConfigError, LockstepError)),
        "batch.jsonl": Message(answer, from_worker(reward, False), foreign),
        "conversation.jsonl": Message(played, from_worker((Answered, Ended, Failure), False), foreign),
        "stream": Message(struct.pack("!I", len(answer)) + answer, from_worker(reward, True), foreign),
        "exchange": Message(exchanged, decode_completions, (LockstepError,)),
        "exchange.json": Message(
            exchanged[8:end],
            lambda text: decode_completions(len(text).to_bytes(8, "little") + text + exchanged[end:]),
            (LockstepError,),
        ),
        "told.json": Message(b'["a", 17]', lambda told: read_told(told, list[str | int], "x"), (LockstepError,)),
    }


def prepare(directory: Path) -> None:
    """Write correct input files, and run twice, so that the directory of a run has all its files."""
    write_files(directory)
    (directory / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tree = settings(Path("run"), run={"max_steps": 3}, checkpoint={"every": 1}, evaluation={"path": "held.jsonl"})
    tree["data"]["retire"] = {"at": 0.9}
    (directory / "c.yaml").write_text(yaml.safe_dump(tree))
    lines = [{"completion": str(n), "prompt": "1+1=", "answer": "2"} for n in range(4)]
    (directory / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["run.max_steps=2"], ["rollout.prefill_tokens=128"]):
        subprocess.run([sys.executable, REPOSITORY / "scripts/run.py", "c.yaml", *words], cwd=directory, check=True)
    (directory / "run" / "summary.json").write_text('{"steps": 2}')


def mutate(path: Path, draw: random.Random) -> str:
    """Damage a file, and return the kind of damage."""
    how = draw.choice(("bytes", "bytes", "token", "token", "cut", "value", "value", "value", "value", "place", "line"))
    if how == "place" or not path.exists():
        what = draw.choice(("pipe", "zeros", "directory", "missing", "empty", "loop"))
        path.unlink(missing_ok=True)
        match what:
            case "pipe":
                os.mkfifo(path)
            case "zeros":
                path.symlink_to("/dev/zero")
            case "directory":
                path.mkdir()
            case "empty":
                path.touch()
            case "loop":
                path.symlink_to(path.name)
            case _:
                pass
        return what
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content) + 1)
    if how == "value" and (changed := with_other_value(content.decode(errors="replace"), path, draw)) is not None:
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(content[:place])
    elif how == "token":
        path.write_bytes(content[:place] + draw.choice(TOKENS).encode() + content[place:])
    elif how == "line":
        lines = bytes(content).splitlines(keepends=True) or [b""]
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
        del lines[draw.randrange(len(lines))]
        path.write_bytes(b"".join(lines))
    else:
        for _ in range(draw.choice((1, 1, 3, 20))):
            if content:
                content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    return how


def with_other_value(text: str, path: Path, draw: random.Random) -> bytes | None:
    """Replace one value of a JSON or YAML text, and return the new content; None if the text is neither."""
    if path.suffix == ".jinja":
        return str(draw.choice(NASTY)).encode(errors="surrogatepass")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(len(lines)) if lines else 0
    try:
        tree = yaml.safe_load(lines[number]) if path.suffix == ".yaml" else json.loads(lines[number])
    except (ValueError, IndexError, yaml.YAMLError):
        return None
    places: list[tuple[Any, Any]] = []
    seen: list[Any] = [tree]
    while seen:
        part = seen.pop()
        keys = list(part) if isinstance(part, dict) else range(min(len(part), 50)) if isinstance(part, list) else []
        places += [(part, key) for key in keys]
        seen += [part[key] for key in keys]
    if not places:
        return None
    part, key = draw.choice(places)
    if isinstance(part, dict) and draw.random() < 0.3:
        value = part.pop(key)
        if draw.random() < 0.5:
            part[str(draw.choice(NASTY))[:50]] = value
    else:
        part[key] = draw.choice(NASTY)
    lines[number] = json.dumps(tree)
    return "\n".join(lines).encode(errors="surrogatepass")


def in_reader(message: Message, file: Path, said: Path) -> int:
    """Give the message in ``file`` to its reader; returns 0 if it is read, 2 if it is refused, 1 for another error."""
    code, text = 0, ""
    try:
        message.read(file.read_bytes() if file.is_file() else b"")
    except message.refused_by:
        code = 2
    except BaseException:  # any other error is a fault that this program looks for
        code, text = 1, traceback.format_exc()
    said.write_text(text, errors="replace")
    return code


def in_child(words: Sequence[str], directory: Path, said: Path) -> int:
    """Run a command in a forked child; returns its exit code, 1 for an exception, -9 if it hung and was killed."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.chdir(directory)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES * 2**30, GIBIBYTES * 2**30))
            code = import_module("tpu_grpo.cli.main").main(words)
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
        except BaseException:  # any other error is a fault that this program looks for
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=200, help="so many of them are started as users do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--keep", type=Path, default=Path("fuzz_failures"))
    options = parser.parse_args(arguments)
    for module in ("train", "data", "report", "rewards", "dry_run"):
        import_module(f"tpu_grpo.cli.{module}")
    for module in ("transformers", "jax", "tpu_grpo.run.inputs", "tpu_grpo.learner", "jinja2"):
        import_module(module)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_fuzz_") as scratch:
        sound, broken, said = Path(scratch, "sound"), Path(scratch, "broken"), Path(scratch, "said")
        prepare(sound)
        readers = messages()
        for name, message in readers.items():
            (sound / name).write_bytes(message.sound)
        every = max(1, options.inputs // max(1, options.processes))
        for number in range(options.inputs):
            draw = random.Random(options.seed * 10**9 + number)
            kind = draw.choice(options.kinds)
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(sound, broken, symlinks=True)
            name = draw.choice(KINDS[kind])
            how = mutate(broken / name, draw)
            words = draw.choice(COMMANDS.get(kind, [[kind]]))
            if kind == "messages":
                with patch.multiple(
                    "tpu_grpo.hosts.meeting", RETRY_SECONDS=0.01, GRACE_SECONDS=0.1, PATIENCE_SECONDS=0
                ):
                    code = in_reader(readers[name], broken / name, said)
            elif options.processes and number % every == 0:
                code = in_process(words, broken, said)
            else:
                code = in_child(words, broken, said)
            counts[f"{kind} {code}"] += 1
            if code not in (0, 2) or "Traceback" in said.read_text(errors="replace"):
                kept = options.keep / f"{options.seed}_{number}"
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(said, kept / "said")
                last = said.read_text(errors="replace").strip().rpartition("\n")[2][:150]
                print(f"{number}: {name} {how}, {' '.join(words)}: {code}: {last}", flush=True)
    print(dict(sorted(counts.items())))
    if bad := sum(count for name, count in counts.items() if name.rpartition(" ")[2] not in ("0", "2")):
        raise SystemExit(f"{bad} of {options.inputs} inputs ended by another code than 0 and 2")


def in_process(words: Sequence[str], directory: Path, said: Path) -> int:
    """Run a command in a new process, as users do; returns its exit code, or -9 if it hung."""
    with said.open("wb") as out:
        command = [sys.executable, "-m", "tpu_grpo", *words]
        where = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        try:
            return subprocess.run(
                command, cwd=directory, stdout=out, stderr=out, env=where, timeout=SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return -9


if __name__ == "__main__":
    main()
