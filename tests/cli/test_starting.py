"""Every command chooses the platform of jax in time, whoever imported jax, and whoever calls the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.cli.starting import config_from_words
from tpu_grpo.config import load_config
from tpu_grpo.hosts.joining import TPU_DEVICE_FILES

REPOSITORY = Path(__file__).resolve().parents[2]
HAS_TPU = any(any(Path("/dev").glob(pattern)) for pattern in TPU_DEVICE_FILES)
SHOW_DEVICES = """
from tpu_grpo.cli.starting import config_from_words, prepare

prepare(needs_hub=config_from_words([]).needs_hub)
import jax

print(jax.devices()[0].platform)
"""


@pytest.mark.full
@pytest.mark.skipif(HAS_TPU, reason="there is a TPU to be found")
@pytest.mark.parametrize("first", ["", "import jax"], ids=["jax is imported later", "jax was imported before"])
def test_no_tpu_is_looked_for_where_there_is_none(first: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", first + SHOW_DEVICES],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["model.path=/models/x", "data.path=train.jsonl", "run.seed=3"],
        ["model.path=hf:owner/x"],
        ["data.path=train.jsonl"],
        ["data.path=[a.jsonl, b.jsonl]"],
        ["data.sources=[{path: a.jsonl}]"],
    ],
)
def test_a_model_or_data_of_ones_own_without_a_config_is_not_the_demo(words: list[str]) -> None:
    config = config_from_words(words)
    assert config == load_config(None, words)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.run.name) == (512, 256, "run")


@pytest.mark.parametrize("words", [[], ["run.seed=3"], ["model.path=builtin:addition", "data.path='builtin:addition'"]])
def test_without_them_it_is(words: list[str]) -> None:
    config = config_from_words(words)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.run.name) == (12, 4, "demo_cpu")
