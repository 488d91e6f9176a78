"""What is wrong with inputs is found before anything is built; tests/cli/mistakes.txt has more."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run.directory import RunDirectory
from tpu_grpo.run.inputs import open_inputs

ROWS = [{"problem": "1+1=", "answer": "2", "level": 1}, {"problem": "2+2=", "answer": "4", "level": 2}]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def check(tmp_path: Path, **sections: Any) -> None:
    """Look where the run would write, and open all that it reads."""
    config = parse_config({"run": {"dir": str(tmp_path / "run")}} | sections)
    RunDirectory(config, Hosts()).look().refuse()
    open_inputs(config)


def test_what_fits_passes_and_leaves_nothing(tmp_path: Path, data: str) -> None:
    check(
        tmp_path,
        data={"path": data, "columns": {"question": "problem"}, "curriculum": "level"},
        evaluation={"path": data, "prompt_template": "{problem}"},
    )
    assert not (tmp_path / "run").exists()


def test_every_source_of_a_mixture_and_the_held_out_data_are_looked_at(tmp_path: Path, data: str) -> None:
    good = {"path": data, "prompt_template": "{problem}"}
    with pytest.raises(DataError, match="data.sources.1.path: data file not found"):
        check(tmp_path, data={"sources": [good, {"path": "nosuch.csv"}]})
    with pytest.raises(DataError, match="evaluation.path: data file not found"):
        check(tmp_path, data=good, evaluation={"path": "nosuch.csv"})


def test_a_tokenizer_that_is_larger_than_its_model(tmp_path: Path, data: str) -> None:
    model = shutil.copytree(SAVED / "qwen3", tmp_path / "model")
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["added_tokens"].append({**tree["added_tokens"][-1], "id": 264, "content": "<|tool|>"})
    (model / "tokenizer.json").write_text(json.dumps(tree))
    sizes = {"rollout": {"max_new_tokens": 8}, "data": {"path": data, "max_prompt_tokens": 40}}
    told = r"ids in .*tokenizer.json must be below 264, .* got '<\|tool\|>' with 264 among 265 tokens"
    with pytest.raises(CheckpointError, match=told):
        check(tmp_path, model={"path": str(model)}, rewards=[{"name": "exact_answer"}], **sizes)


def test_where_the_run_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir must be a directory this process can write, got .*is no directory"):
        check(tmp_path, run={"dir": str(tmp_path / "file" / "run")})
    config = parse_config({"run": {"dir": str(tmp_path / "file" / "run")}})
    assert RunDirectory(config, Hosts()).look().summary is None  # asked before
