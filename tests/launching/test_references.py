"""The reference runs as they are typed: one command fetches model and data on a slice, one starts.

Slice, hub and the place of the data are stand-ins on loopback; the model is a small one of the published name.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching.driving import REPOSITORY, eventually
from tests.launching.stand_in import StandIn
from tests.models.hub import Hub, open_hub
from tests.several.runs import write_files
from tpu_grpo.cli.launch import main

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow]

PROBLEMS = [{"question": f"How much is {n} and 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(16)]
NAMES = {"qwen3_1p7b_gsm8k": "Qwen/Qwen3-1.7B", "qwen3_4b_gsm8k": "Qwen/Qwen3-4B"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in (write_files(tmp_path) / "model").iterdir()}
    data = "".join(json.dumps(problem) + "\n" for problem in PROBLEMS).encode()
    with open_hub(dict.fromkeys(NAMES.values(), files), {"train.jsonl": data, "test.jsonl": data}) as opened:
        yield opened


@pytest.fixture
def words(stand_in: StandIn, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this machine needs of a run beside the config; the slice has one worker, and the checkout."""
    monkeypatch.delenv("XLA_FLAGS")
    state = stand_in.load()
    stand_in.save({**state, "hosts": 1})
    assert main(["create", "--type", "v5e-8", "--how", "vm"]) == 0
    assert main(["setup", "--how", "vm", "--code", str(REPOSITORY)]) == 0
    environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    data = [f"data.path={hub.address}/train.jsonl", f"evaluation.path={hub.address}/test.jsonl"]
    return [*variables, *data, "data.max_prompt_tokens=1024", "model.dtype=float32"]


def log_of(stand_in: StandIn, code: str) -> str:
    job = stand_in.home(0) / ".tpu_grpo/job"
    eventually((job / "exit_code").exists, seconds=550)
    log = (job / "log").read_text()
    assert (job / "exit_code").read_text() == code, log
    return log


@pytest.mark.parametrize("name", ["qwen3_1p7b_gsm8k", pytest.param("qwen3_4b_gsm8k", marks=pytest.mark.slow)])
def test_a_dry_run_fetches_model_and_data(name: str, stand_in: StandIn, hub: Hub, words: list[str]) -> None:
    config = f"configs/reference/{name}.yaml"
    assert main(["run", "--how", "vm", str(REPOSITORY / config), *words, "--", "--dry-run"]) == 0
    log = log_of(stand_in, "0\n")
    assert f"fetching {NAMES[name]}: " in log
    assert "16 prompts, 0 dropped as too long" in log
    assert "model.safetensors" in hub.got


@pytest.mark.timeout(900)
def test_a_reference_run_is_started_and_compared(stand_in: StandIn, hub: Hub, words: list[str], tmp_path: Path) -> None:
    """Two steps of the recipe, with shorter completions, beside a point of the test's own."""
    point = {"by": "A", "steps": [2, 2], "low": 0.9, "high": 1.0}
    published = {"source": "https://example.org/1", "metric": "evaluation/greedy/vtc", "points": [point]}
    (tmp_path / "mine.json").write_text(json.dumps(published))
    small = ["rollout.max_new_tokens=8", "run.max_steps=2", "evaluation.prompts=2", f"run.dir={tmp_path}/run"]
    small += ["rollout.batch_paddings=[32]", "rollout.prefill_tokens=512", "model.remat=none"]  # less to compile
    config = REPOSITORY / "configs/reference/qwen3_1p7b_gsm8k.yaml"
    assert main(["run", "--how", "vm", str(config), *words, *small, f"logging.against={tmp_path}/mine.json"]) == 0
    log = log_of(stand_in, "0\n")
    assert "step 2: evaluation/greedy/vtc 0.0000; A: 0.9 to 1; outside, by -0.9000" in log
    assert "the run is outside of what was published: look first at " in log
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["update/learning_rate"] for line in lines] == pytest.approx([4e-9, 1.2e-8])  # of updates 1 and 3
