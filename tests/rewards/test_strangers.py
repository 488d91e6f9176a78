"""Rewards as people have them: written for other trainers, and called here unchanged or with one line of config.

Each piece has the shape of one that is published: its name, parameters, what it reads, and what it returns. The code is
this project's own. Pieces that do not work are here, too: their errors say why.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import MakeFile, make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion

PROMPTS = ["2+2?", "5*10?"]
TEXTS = ["<think>\na\n</think>\n<answer>\n4\n</answer>", "five", "#### 50", r"\boxed{50}"]
"""Of 39, 4, 7 and 10 characters; 4, 1, 2 and 3 tokens. Two for each prompt."""
DATA: dict[str, list[Any]] = {
    "answer": ["4", "50"],
    "question": PROMPTS,
    "solution": ["4", "50"],
    "ground_truth": ["4", "50"],
    "task": ["math", "code"],
    "info": [{"least": 10}, {"least": 5}],
    "target": [4, 50],
    "nums": [[2, 2], [5, 10]],
    "data_source": ["sums", "products"],
    "reward_model": [{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": "50"}],
    "extra_info": [{"index": 0}, None],
    "verification_info": [{"language": "python"}, {"language": "python"}],
    "test_cases": ["[]", "[]"],
}
RESULTS = {"LENGTHS": [39, 4, 7, 10], "RIGHT": [1, 0, 1, 1], "TAGGED": [1, 0, 0, 0], "BOXED": [0, 0, 0, 1]}


@dataclass(frozen=True)
class Piece:
    """A reward ``f``, and what it gives for the four completions, or what the error says."""

    origin: str
    columns: list[str]
    gives: list[float | None] | str
    settings: dict[str, Any]
    """One line of the config at most: ``messages: true``, or its options."""
    source: str = field(repr=False)


HELPERS = r"""
import asyncio, functools, json, math, re
from typing import Any, Dict, List, Optional

def of_tag(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip() if "<answer>" in text else ""


def number(text):
    found = re.findall(r"\d+", text)
    return found[-1] if found else ""
"""

PIECES = Path(__file__).with_name("strangers.txt").read_text()
"""A line for each: where one like it is, the columns of its data, what it gives, its setting; then the code."""


def read(piece: str) -> Piece:
    head, _, source = piece.partition("\n")
    origin, columns, gives, *rest = (part.strip() for part in head.split("|"))
    settings = {"messages": True} if rest == ["messages"] else {"options": eval(rest[0])} if rest else {}
    return Piece(origin, columns.split(), eval(gives, dict(RESULTS)), settings, source)


ALL = [read(piece) for piece in PIECES.split("\n#: ")[1:]]


def given(pieces: list[Piece], write: MakeFile, workers: int) -> list[list[float | None]]:
    """What rewards give, each in a file of its own, in a run of ten steps of which this is the third."""
    paths = [write(HELPERS + piece.source, f"strange{n}.py") for n, piece in enumerate(pieces)]
    specs = [
        RewardSpec(name=f"{path}:f", label=f"f{n}", workers=workers, **piece.settings)
        for n, (path, piece) in enumerate(zip(paths, pieces, strict=True))
    ]
    columns = list(dict.fromkeys(name for piece in pieces for name in piece.columns))
    records = [{name: DATA[name][prompt] for name in columns} for prompt in range(2)]
    made = make_rollout(PROMPTS, TEXTS, records, step=3)
    ids = [Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), "stop", 0) for n in (4, 1, 2, 3)]
    scores = scored(replace(made, completions=tuple(ids)), *specs, max_steps=10)
    return [[None if np.isnan(value) else value for value in values] for values in scores.by_name.values()]


@pytest.mark.parametrize("piece", ALL, ids=[piece.origin for piece in ALL])
def test_a_reward_of_another_trainer(reward_file: MakeFile, piece: Piece):
    if isinstance(piece.gives, str):
        with pytest.raises(RewardError, match=piece.gives):
            given([piece], reward_file, 0)
    else:
        assert given([piece], reward_file, 0) == [pytest.approx(piece.gives)]


@pytest.mark.full
def test_those_that_are_made_or_get_more_than_columns_run_in_workers(reward_file: MakeFile):
    marks = ("get_soft_overlong", "get_cosine", "XMLParser", "verl batch", "easydel, batch", "tunix agentic")
    pieces = [
        piece for piece in ALL if any(mark in piece.origin for mark in marks) and "messages" not in piece.settings
    ]
    assert len(pieces) >= len(marks)
    assert given(pieces, reward_file, 1) == [pytest.approx(piece.gives) for piece in pieces]
