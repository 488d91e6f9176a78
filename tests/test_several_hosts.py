"""Runs of several processes: in lockstep with each other, and an end for all when they differ."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.random_checkpoint import edit_config, write_random_qwen3
from tpu_grpo.models.tokenizers import build_byte_tokenizer

REWARD = """
def ascii_share(prompts, completions):
    return [sum(c.isascii() for c in text) / max(1, len(text)) for text in completions]
"""
FAILING_ON_HOST_1 = """
import sys

def fails(prompts, completions):
    if "hosts.index=1" in sys.argv:
        raise RuntimeError("no luck")
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    tokenizer = build_byte_tokenizer()
    model = write_random_qwen3(directory / "model", vocab=len(tokenizer), kv_heads=4, scale=0.3)
    tokenizer.save_pretrained(str(model))
    edit_config(model, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    (directory / "rewards.py").write_text(REWARD)
    (directory / "failing.py").write_text(FAILING_ON_HOST_1)
    (directory / "data.jsonl").write_text(
        "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(20))
    )
    return directory


def write_config(files: Path, run_dir: Path) -> Path:
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "max_steps": 3, "seed": 5},
        "model": {"path": str(files / "model")},
        "data": {"path": str(files / "data.jsonl"), "prompts_per_step": 4, "max_prompt_tokens": 12},
        "rollout": {"max_new_tokens": 6, "prefill_tokens": 64, "batch_paddings": [16], "max_running_requests": 16},
        "rewards": [{"name": f"{files}/rewards.py:ascii_share"}],
        "algorithm": {"group_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "hosts": {"lost_timeout_seconds": 20, "start_timeout_seconds": 60},
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "as_given.yaml"
    path.write_text(json.dumps(tree))
    return path


def local_hosts(
    hosts: int, devices: int, config: Path, *settings: str, command: str | None = None
) -> subprocess.CompletedProcess[str]:
    arguments = ["--hosts", str(hosts), "--devices-per-host", str(devices), "--grace", "60"]
    if command is not None:
        arguments += ["--command", command]
    words = [sys.executable, "scripts/local_hosts.py", *arguments, "--", str(config), *settings]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(words, capture_output=True, text=True, timeout=280, env=environment)


def outcome(run_dir: Path) -> tuple[list[str], str]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    return [line["rollout/tokens_digest"] for line in lines], summary["params_digest"]


@pytest.fixture(scope="module")
def one_process(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What one process with four devices samples, and the parameters it ends with."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    done = local_hosts(1, 4, write_config(files, run_dir))
    assert done.returncode == 0, done.stderr
    return outcome(run_dir)


@pytest.mark.parametrize(("hosts", "devices"), [pytest.param(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_processes_run_in_lockstep_and_repeat_exactly(
    files: Path, tmp_path: Path, one_process: tuple[list[str], str], hosts: int, devices: int
) -> None:
    """With the same parameters, the tokens of one process; and the whole run again, bit for bit.

    After an update they may differ from one process: gradients are summed over devices in another order.
    """
    done = local_hosts(hosts, devices, write_config(files, tmp_path / "run"), "hosts.check=step")
    assert done.returncode == 0, done.stderr
    again = local_hosts(hosts, devices, write_config(files, tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert outcome(tmp_path / "run")[0][0] == one_process[0][0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "again")
    progress = [line for line in done.stdout.splitlines() if "step 3 of 3" in line]
    assert [line[:4] for line in progress] == ["[0] "]  # the others are quiet


@pytest.mark.slow
def test_a_trainer_mesh_of_two_by_two_samples_the_same_first_tokens(
    files: Path, tmp_path: Path, one_process: tuple[list[str], str]
) -> None:
    done = local_hosts(2, 2, write_config(files, tmp_path / "run"), "meshes.trainer.fsdp=2", "meshes.trainer.tp=2")
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run")[0][0] == one_process[0][0]  # the same parameters, so the same tokens


@pytest.mark.slow
def test_a_setting_that_differs_ends_all_with_its_name(files: Path, tmp_path: Path) -> None:
    """Host 1 runs with another seed: a wrapper appends it there."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import runpy, sys\n"
        "if 'hosts.index=1' in sys.argv:\n"
        "    sys.argv.append('run.seed=6')\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        f"runpy.run_path({str(Path.cwd() / 'scripts' / 'run.py')!r}, run_name='__main__')\n"
    )
    config = write_config(files, tmp_path / "run")
    done = local_hosts(2, 2, config, command=f"{sys.executable} {wrapper}")
    assert done.returncode == 3, done.stderr
    for host in (0, 1):
        own = "\n".join(line for line in done.stderr.splitlines() if line.startswith(f"[{host}]"))
        assert "setting run.seed differs: host 0 has" in own, own


@pytest.mark.slow
def test_a_reward_that_fails_on_one_host_ends_all_with_its_name(files: Path, tmp_path: Path) -> None:
    config = write_config(files, tmp_path / "run")
    done = local_hosts(2, 2, config, f"rewards=[{{name: {files}/failing.py:fails, workers: 0}}]")
    assert done.returncode in (2, 3), done.stderr  # 2 on the host whose reward it is, 3 on the other
    own = [line for line in done.stderr.splitlines() if line.startswith("[1]") and "RewardError" in line]
    other = [line for line in done.stderr.splitlines() if line.startswith("[0]") and "host 1 failed" in line]
    assert own, done.stderr
    assert "fails" in other[0]
