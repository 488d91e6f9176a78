"""Whole runs of several processes on a small random model; a test may add a fault on one host (faulty_host.py)."""

import atexit
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests import quick_programs
from tests.models.random_checkpoint import edit_config, write_random
from tests.several.fork_server import SERVERS
from tpu_grpo.config import RunConfig
from tpu_grpo.models.tokenizers import build_byte_tokenizer

REPOSITORY = Path(__file__).parents[2]
FAULTY_HOST = Path(__file__).with_name("faulty_host.py")
FORK_SERVER = Path(__file__).with_name("fork_server.py")
BEFORE_IMPORTS = "variable:", "version:"
"""Faults of what modules read when they are imported."""
REWARD = """
import sys

def ascii_share(prompts, completions):
    return [sum(c.isascii() for c in text) / max(1, len(text)) for text in completions]

def any_digit(completions):
    return [float(any(c.isdigit() for c in text)) for text in completions]

def odd_on_host_1(completions):
    return [len(text) + (1e-9 if "hosts.index=1" in sys.argv else 0.0) for text in completions]
"""


SOON = {"hosts": {"lost_timeout_seconds": 12, "start_timeout_seconds": 300}}
"""Settings with which a lost host is noticed within seconds."""


def write_files(directory: Path, kv_heads: int = 4, model_type: str = "qwen3", **options: Any) -> Path:
    """Write a model, data and a reward. Paths in the config are relative, so that a host can be given other files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_byte_tokenizer()
    sizes: dict[str, Any] = {"vocab": len(tokenizer), "kv_heads": kv_heads, "scale": 0.3}
    model = write_random(model_type, directory / "model", **(sizes | options))
    tokenizer.save_pretrained(str(model))
    edit_config(model, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    (directory / "rewards.py").write_text(REWARD)
    for name, start, count in (("data.jsonl", 0, 8), ("held.jsonl", 50, 20)):  # two steps of 4 prompts are an epoch
        lines = [f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(start, start + count)]
        (directory / name).write_text("".join(lines))
    return directory


def settings(run_dir: Path, **sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "max_steps": 2, "seed": 5},
        "model": {"path": "model"},
        "data": {"path": "data.jsonl", "prompts_per_step": 4, "max_prompt_tokens": 12},
        "rollout": {"max_new_tokens": 6, "prefill_tokens": 64, "batch_paddings": [16], "max_running_requests": 16},
        "rewards": [{"name": "rewards.py:ascii_share", "workers": 0}],
        "algorithm": {"group_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "hosts": {"lost_timeout_seconds": 120, "start_timeout_seconds": 300},  # whatever the load of the machine
    }
    return laid_over(tree, sections)


def laid_over(tree: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The tree with these sections: settings over those that it has, and lists in their place."""
    for name, values in sections.items():
        tree[name] = values if isinstance(values, list) else tree.get(name, {}) | values
    return tree


@dataclass(frozen=True)
class Ended:
    """How a run of several hosts ended."""

    code: int
    """The worst exit code."""
    out: str
    errors: str
    seconds: float

    def of_host(self, index: int) -> str:
        """Return the lines that a host wrote to stderr."""
        return "\n".join(line for line in self.errors.splitlines() if line.startswith(f"[{index}]"))


def run_hosts(
    hosts: int,
    devices: int,
    files: Path,
    tree: dict[str, Any],
    *words: str,
    fault: str = "",
    grace: float = 60,
    timeout: float = 580,
    program: Sequence[str] = (),
) -> Ended:
    """Run the config on ``hosts`` processes of ``devices`` devices, in the directory of the files: a training, or
    another program.

    ``fault`` names a function of faulty_host.py, which is called before the command: on the last host, or on the host
    whose number follows, as in ``lost@1:SIGKILL,rollout of step 2``.
    """
    config = written(tree)
    options = ["--hosts", str(hosts), "--devices-per-host", str(devices), "--grace", str(grace)]
    starts = [] if fault.startswith(BEFORE_IMPORTS) else ["-S", str(FORK_SERVER), fork_servers()]
    host = [sys.executable, *starts, *(program or (str(FAULTY_HOST), fault or "none"))]
    command = [sys.executable, str(REPOSITORY / "scripts" / "local_hosts.py"), *options, "--command", shlex.join(host)]
    command += ["--", str(config), *words]
    environment = host_variables()
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=files)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def host_variables() -> dict[str, str]:
    """The environment variables of whoever starts hosts."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    return kept | {"PYTHONPATH": str(REPOSITORY), **quick_programs.VARIABLES}


@functools.cache
def fork_servers() -> str:
    """Start the servers that hosts are forked from; they end with this process. Return their sockets' directory."""
    directory, pipe = tempfile.mkdtemp(), subprocess.PIPE
    atexit.register(shutil.rmtree, directory)
    variables = host_variables() | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    commands = [[sys.executable, str(FORK_SERVER), "serve", directory, str(number)] for number in range(SERVERS)]
    for server in [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables) for command in commands]:
        atexit.register(server.communicate)  # its input ends
        assert server.stdout is not None
        assert server.stdout.readline() == b"listens\n"
    return directory


def written(tree: dict[str, Any]) -> Path:
    """Write the config into the directory of its run."""
    run_dir = Path(tree["run"]["dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir / "as_given.yaml"
    config.write_text(json.dumps(tree))
    return config


def completed(hosts: int, devices: int, files: Path, tree: dict[str, Any], *words: str, **options: Any) -> Ended:
    """Run the config as `run_hosts` does, to its end: every host must end well."""
    ended = run_hosts(hosts, devices, files, tree, *words, **options)
    assert ended.code == 0, ended.errors
    return ended


def train(config: RunConfig, **options: Any) -> dict[str, Any]:
    """Run the config in this process, and return its summary."""
    from tpu_grpo.run import inputs, pipeline  # commands that import this file fork before jax is there

    return pipeline.train(inputs.open_inputs(config), **options)


def seconds_since_last_stage(run_dir: Path) -> float:
    """Return the seconds from the time when host 0 began its last stage to the last line of its log."""
    path = run_dir / "logs" / "host_0.log"
    began = [line for line in path.read_text().splitlines() if line.endswith(" begins")][-1]
    return path.stat().st_mtime - datetime.strptime(began[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def lines(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read the records of a file of a run, a line each."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def outcome(run_dir: Path) -> tuple[list[str], str]:
    """Return the digest of each step's tokens, and the digest of the last parameters."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return [line["rollout/tokens_digest"] for line in lines(run_dir)], summary["params_digest"]
