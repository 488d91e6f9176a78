"""Each example, run as a user types it, for three steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_example(name: str, tmp_path: Path, directory: Path = REPOSITORY / "examples") -> str:
    """What an example prints, in an environment without what the tests set for their own process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, str(directory / f"{name}.py"), "run.max_steps=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tpu|grpc|metadata|warning", done.stderr, flags=re.IGNORECASE) is None, done.stderr
    return done.stdout


@pytest.mark.slow  # test_pipeline.py drives the same parts
def test_the_loop_by_hand_samples_what_the_pipeline_samples(tmp_path: Path) -> None:
    lines = re.findall(
        r"^step (\d) +reward ([\d.]+) +agreement (\S+)$", run_example("own_loop", tmp_path), re.MULTILINE
    )
    assert [int(step) for step, *_ in lines] == [1, 2, 3]
    assert all(0.3 < float(reward) < 0.7 for _, reward, _ in lines)  # the demo begins near one half
    assert all(float(agreement) <= 1e-4 for *_, agreement in lines)


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
    assert [step for step in steps if step] == [1, 2]  # the other calls are of evaluations
    lines = [json.loads(line) for line in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert sum(line["rewards/right_digits/mean"] for line in lines) / 2 == float(mean)
    assert all(line["rewards/exact_answer/mean"] <= line["rewards/right_digits/mean"] for line in lines)
    assert all(line["rewards/mean"] == line["rewards/right_digits/mean"] for line in lines)
    assert "name: python:right_digits" in (tmp_path / "runs" / "digits" / "config.yaml").read_text()


def test_the_loop_by_hand_is_short() -> None:
    assert len((REPOSITORY / "examples" / "own_loop.py").read_text().splitlines()) < 60


@pytest.mark.slow
def test_tunix_own_loop_learns_from_the_engines_samples(tmp_path: Path) -> None:
    shown = run_example("tunix_loop", tmp_path)
    rewards = [float(value) for value in re.findall(r"^reward (\S+)$", shown, re.MULTILINE)]
    assert len(rewards) == 3
    assert all(0.3 < reward < 0.7 for reward in rewards)
    pattern = r"^step (\d)  entropy (\S+)  engine and trainer differ by at most (\S+)$"
    steps = re.findall(pattern, shown, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [1, 2, 3]
    assert all(0.0 < float(entropy) < 5.0 for _, entropy, _ in steps)
    assert len({entropy for _, entropy, _ in steps}) == 3  # the policy changes, and so does the engine:
    assert all(float(difference) <= 1e-4 for *_, difference in steps)
