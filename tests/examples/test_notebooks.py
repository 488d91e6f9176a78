"""The notebooks, run by a real kernel with the demo's model in place of theirs: in the kernel, and by commands."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import tpu_grpo
from tests import quick_programs
from tests.models.test_builtin import tiny

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)
SETTINGS = ["run.dir=runs/notebook", "evaluation.prompts=8", "logging.samples_every=1"]


def opened(name: str, directory: Path, *settings: str, in_kernel: bool, without: tuple[str, ...]) -> NotebookClient:
    """A notebook in a directory that looks like a clone, with the demo's config, and without some of its cells."""
    for place in ("tpu_grpo", "scripts", "configs"):
        (directory / place).symlink_to(REPOSITORY / place)
    notebook: Any = nbformat.read(REPOSITORY / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    replaced = {
        "parameters": "\n".join(
            [
                'CONFIG, SLICE, RIGHT = "configs/demo_cpu.yaml", "v5e-1", "exact_answer"',
                f'RUN_DIR, SETTINGS = "runs/notebook", {[*SETTINGS, *settings]}',
            ]
        ),
        "install": f"PYTHON = [sys.executable]\nIN_KERNEL = {in_kernel}",
    }
    kept = []
    for cell in notebook.cells:
        tags = set(cell.metadata.get("tags", []))
        for tag in tags & replaced.keys():
            cell.source = replaced[tag]
        if not tags & set(without):
            kept.append(cell)
    notebook.cells = kept
    return NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(directory)}})


def as_a_user_has_it() -> dict[str, str]:
    """The environment without what the tests set for their own process."""
    return {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}


def shown(client: NotebookClient, tag: str) -> str:
    """All that a cell shows, its pages included."""
    cells = [cell for cell in client.nb.cells if tag in cell.metadata.get("tags", [])]
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(str(output.get("text", "")) + str(output.get("data", "")) for output in outputs)


@pytest.mark.parametrize(
    ("name", "model"), [("colab_tpu", "hf:Qwen/Qwen3-0.6B"), ("kaggle_tpu", "hf:google/gemma-3-1b-it")]
)
def test_its_own_settings_train_a_model_of_the_hub_on_gsm8k(name: str, model: str) -> None:
    notebook: Any = nbformat.read(REPOSITORY / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = [c for c in notebook.cells if {"parameters", "rewards"} & set(c.metadata.get("tags", []))]
    said: dict[str, Any] = {}
    exec("\n".join(cell.source for cell in cells), said)
    config = tpu_grpo.load_config(REPOSITORY / said["CONFIG"], said["SETTINGS"])
    assert config.model.path == model
    others = re.findall(r"configs/[\w/]+\.yaml", "\n".join(cell.source for cell in notebook.cells))
    assert all((REPOSITORY / other).is_file() for other in others)
    assert "/grade_school_math/data/train.jsonl" in str(config.data.path)
    assert [reward.name for reward in config.rewards] == ["gsm8k", "my_rewards.py:short"]


@pytest.mark.parametrize(
    ("name", "in_kernel"),
    [
        pytest.param("colab_tpu", True, marks=pytest.mark.slow),
        pytest.param("kaggle_tpu", False, marks=pytest.mark.slow),
    ],
)
def test_a_notebook_trains_with_the_reward_of_its_cell(name: str, in_kernel: bool, tmp_path: Path) -> None:
    client = opened(name, tmp_path, "run.max_steps=2", in_kernel=in_kernel, without=("plan", "check"))
    client.execute(env=as_a_user_has_it())
    lines = (tmp_path / "runs" / "notebook" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert all(0 < json.loads(line)["rewards/short/mean"] <= 1 for line in lines)
    view = shown(client, "train")
    assert "<iframe srcdoc=" in view
    assert "step 2" in view
    assert "step 2  rewards {" in shown(client, "samples")
    assert (tmp_path / "model.zip").stat().st_size > 1_000_000


def stop_when(client: NotebookClient, happened: Callable[[], bool]) -> None:
    """Do what the stop button does, once something has happened: send SIGINT to the kernel."""

    def press() -> None:
        while not happened():
            time.sleep(0.2)
        manager: Any = client.km
        os.kill(manager.provisioner.pid, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@pytest.mark.full
@pytest.mark.parametrize("in_kernel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_stop_button_leaves_a_checkpoint(in_kernel: bool, tmp_path: Path) -> None:
    without = ("plan", "check", "rewards", "samples", "export")
    model = tiny()
    settings = f"model.path={model}", "run.max_steps=1000"
    client = opened("colab_tpu", tmp_path, *settings, in_kernel=in_kernel, without=without)
    run_dir = tmp_path / "runs" / "notebook"
    stop_when(client, lambda: (run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").stat().st_size > 0)
    client.execute(env=as_a_user_has_it() | quick_programs.VARIABLES)  # all but one step compile
    said = json.loads((run_dir / "end.json").read_text())
    assert (said["outcome"], said["exit_code"]) == ("stopped", 4)
    assert (run_dir / "checkpoints" / str(said["step"])).is_dir()
    assert "checkpoint" in shown(client, "train")
