"""Each example, run as a user types it, for three steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.config import parse_config
from tpu_grpo.observe.callbacks import find_callbacks

REPOSITORY = Path(__file__).resolve().parents[2]
CALLBACKS = REPOSITORY / "examples" / "callbacks.py"


def run_example(name: str, tmp_path: Path, directory: Path = REPOSITORY / "examples") -> str:
    """What an example prints, in an environment without what the tests set for their own process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, str(directory / f"{name}.py"), "run.max_steps=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tpu|grpc|metadata|warning", done.stderr, flags=re.IGNORECASE) is None, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_by_hand_with_advantages_of_single_tokens(tmp_path: Path) -> None:
    """The lines that docs/python.md replaces. Numbers that make every token likelier change what is sampled next."""
    [snippet] = re.findall(
        r"^```python\n(        scores = .*?)```", (REPOSITORY / "docs" / "python.md").read_text(), re.M | re.S
    )
    written = (REPOSITORY / "examples" / "own_loop.py").read_text()
    [line] = [line for line in written.splitlines(keepends=True) if line.startswith("        scored =")]
    mine = "\nimport dataclasses\n\ndef my_numbers(token_ids):\n    return [0.25 * token for token in token_ids]\n"
    config = f"CONFIG = Path({str(REPOSITORY)!r})"
    written = written.replace(line, snippet).replace("\nimport sys", f"{mine}\nimport sys")
    (tmp_path / "own.py").write_text(written.replace("CONFIG = Path(__file__).resolve().parents[1]", config))
    both = [run_example("own_loop", tmp_path), run_example("own", tmp_path, tmp_path)]
    rewards = [re.findall(r"^step \d +reward ([\d.]+)", shown, re.MULTILINE) for shown in both]
    assert [len(found) for found in rewards] == [3, 3]
    assert rewards[0][0] == rewards[1][0]
    assert rewards[0][1:] != rewards[1][1:]


@pytest.mark.slow  # the rewards themselves are tested in tests/rewards/test_given.py
def test_functions_of_the_script_are_rewards(tmp_path: Path) -> None:
    """The lines of docs/python.md, as a script: the function changes a list of the process that trains."""
    written = (REPOSITORY / "docs" / "python.md").read_text()
    [snippet] = re.findall(r"^```python\n(import tpu_grpo\n\nseen = .*?)```", written, re.M | re.S)
    (tmp_path / "mine.py").write_text(snippet.replace("configs/", f"{REPOSITORY}/configs/"))
    shown = run_example("mine", tmp_path, tmp_path)
    seen, mean = re.findall(r"^\[([\d, ]+)\] ([\d.]+)$", shown, re.M)[0]
    steps = [int(step) for step in seen.split(", ")]
    assert steps == [0, 0, 1, 2, 2, 2]  # greedy and sampled evaluations of step 0, two steps, evaluations of step 2
    lines = [json.loads(line) for line in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert sum(line["rewards/right_digits/mean"] for line in lines) / 2 == float(mean)
    assert all(line["rewards/exact_answer/mean"] <= line["rewards/right_digits/mean"] for line in lines)
    assert all(line["rewards/mean"] == line["rewards/right_digits/mean"] for line in lines)
    assert "name: python:right_digits" in (tmp_path / "runs" / "digits" / "config.yaml").read_text()


def test_the_loop_by_hand_is_short() -> None:
    assert len((REPOSITORY / "examples" / "own_loop.py").read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [0, 2])
def test_tunix_own_loop_learns_from_the_engines_samples(tmp_path: Path, hosts: int) -> None:
    if hosts:
        example = REPOSITORY / "examples" / "tunix_loop.py"
        options = ["--hosts", str(hosts), "--devices-per-host", "2", "--command", f"{sys.executable} {example}", "--"]
        script, words = REPOSITORY / "scripts" / "local_hosts.py", [*options, "run.max_steps=3"]
        environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    else:
        shown = run_example("tunix_loop", tmp_path)
    found = {}
    for host, value in re.findall(r"^(?:\[(\d)\] )?reward (\S+)$", shown, re.MULTILINE):
        found.setdefault(host, []).append(float(value))
    assert [len(rewards) for rewards in found.values()] == [3] * max(hosts, 1)
    assert all(rewards == next(iter(found.values())) for rewards in found.values())  # the same on all hosts
    assert all(0.3 < reward < 0.7 for reward in next(iter(found.values())))
    assert len(set(next(iter(found.values())))) == 3  # the policy changes, and so does the engine


STAND_IN = """
import json, sys
def __getattr__(name):
    def call(*given, **named):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps([name, *given, named]) + "\\n")
    return call
"""


@pytest.mark.parametrize(("kind", "library"), [("Mlflow", "mlflow"), ("Trackio", "trackio")])
def test_callbacks_log_to_other_trackers(
    kind: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the libraries are asked for; neither is installed here, and both took the same calls when they were."""
    (tmp_path / f"{library}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = parse_config({"run": {"name": "mine"}, "logging": {"callbacks": [f"{CALLBACKS}:{kind}"]}})
    (callback,) = find_callbacks(config.logging.callbacks)
    callback.begin(config.model_dump(mode="json"))
    callback.call("on_evaluation", {"step": 0, "evaluation/pass@4/gsm8k": 0.5}, [])
    callback.call("on_step", {"step": 1, "rewards/mean": 0.25, "rollout/tokens_digest": "c0ffee"}, [])
    callback.call("on_evaluation", {"step": 1, "evaluation/pass@4/gsm8k": 0.75}, [])
    callback.close()
    calls = [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]
    assert "mine" in str(calls[:2])
    logged = [call[1:] for call in calls if call[0].startswith("log") and call[0] != "log_dict"]
    assert logged == [[{"evaluation/pass_at_4/gsm8k": 0.5}, {"step": 0}], [{"rewards/mean": 0.25}, {"step": 1}]]
    assert calls[-1][0] in ("end_run", "finish")
