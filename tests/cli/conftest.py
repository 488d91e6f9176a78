"""A run that has not been started, with its model: what commands that sample from a model are given."""

from pathlib import Path

import pytest

from tests.several.runs import write_files

CONFIG = """
run: {name: r, seed: 5}
model: {path: model}
data: {path: data.jsonl, max_prompt_tokens: 12}
rollout: {max_new_tokens: 6, batch_paddings: [8]}
rewards: [{name: "rewards.py:ascii_share", workers: 0}, {name: exact_answer}]
"""


@pytest.fixture(scope="module")
def unstarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds ``run`` and ``model``."""
    files = write_files(tmp_path_factory.mktemp("files"), layers=1)
    (files / "run").mkdir()
    (files / "run/config.yaml").write_text(CONFIG)
    return files
