"""The guide is followed line by line."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_printed_commands import followed
from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import AlgorithmSection

REPOSITORY = Path(__file__).parents[2]
GUIDE = "docs/write_an_algorithm.md"


@pytest.mark.full
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    numbers, dry_run = followed(GUIDE, tmp_path)
    page = (REPOSITORY / GUIDE).read_text()
    shown = re.search(r"It prints\n\n```\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert numbers == shown[1]
    assert re.search(r"algorithm +my_algorithm.py:Cispo, token-mean", dry_run)
    [line] = re.findall(r"^`(mean_it \[.*)`\.", page, re.MULTILINE)
    assert f"objective  {line}\n" in dry_run


def test_the_numbers_of_the_page_for_newcomers() -> None:
    page = (REPOSITORY / "docs" / "what_is_grpo.md").read_text()
    algorithm = open_algorithm(AlgorithmSection(name="grpo", group_size=8))
    groups = re.findall(r"^\| [A-D].*? \| ([01 ]{15}) \|.*\| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(groups) == 4
    for rewards, *told in groups:
        [advantages] = algorithm.advantages(np.array([[float(reward) for reward in rewards.split()]]))
        assert [round(float(advantages[at]), 3) for at in (0, -1)] == [_last_number(text) for text in told]
    tokens = re.findall(r"^\| (0\.\d\d), (0\.\d\d) \| [\d.]+ \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(tokens) == 5
    for then, now, advantage, loss, said in tokens:
        given = (jnp.log(jnp.float32([[now]])), jnp.log(jnp.float32([[then]])), jnp.float32([[advantage]]))
        found = algorithm.token_losses(*given)
        assert float(found.loss_BT[0, 0]) == pytest.approx(_last_number(loss), abs=1.15e-3)  # rounded, as its advantage
        assert bool(found.clipped_BT[0, 0]) == said.startswith("clipped")


def _last_number(text: str) -> float:
    return float(text.split()[-1]) if text else 0.0
