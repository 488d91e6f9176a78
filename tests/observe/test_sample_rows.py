"""A conversation as people read it: in a line of samples.jsonl, and on the console."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.observe.samples import completion
from tests.talks import talk
from tpu_grpo.observe.console import ConsoleSink
from tpu_grpo.observe.run_log import JsonlSink
from tpu_grpo.observe.sample_rows import SampleRow, conversation_fields, sample_rows
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

TALK = talk(
    [1, 2],
    ([11, 12, 13], [21]),
    ([14], [22, 23]),
    ([15, 16], []),
    rewards=[0.5, None, 1.0],
    turns={
        0: {"text": "I add.", "calls": ("add", ""), "answer": "5\nError: no call", "errors": 1},
        1: {"text": "Hm", "answer": "Guess!"},
        2: {"text": "[bold]5"},
    },
    prompt="What is 2+3? Tools: add",
    environment="calculator",
)
TURN = ("text", "calls", "answer", "reward", "tokens", "observed_tokens", "errors")


def row(one: Completion = TALK) -> SampleRow:
    rollout = Rollout(PromptBatch(1, (Prompt("What is 2+3?", (9,)),)), 1, (one,), ("I add.5Hm[bold]5",), 0.0)
    return sample_rows(ScoredRollout(rollout, Scores(np.ones(1), {"success": np.ones(1)}, 0.0)), np.zeros(1))[0]


def test_a_line_of_samples(tmp_path: Path) -> None:
    """The prompt is the first one that the policy saw; tokens are those that it sampled."""
    sink = JsonlSink(tmp_path, 0)
    sink.samples(3, [row()])
    sink.close()
    line = json.loads((tmp_path / "samples.jsonl").read_text())
    assert line == {
        "step": 3,
        "prompt": "What is 2+3? Tools: add",
        "completion": "I add.5Hm[bold]5",
        "rewards": {"success": 1.0},
        "reward": 1.0,
        "advantage": 0.0,
        "tokens": 6,
        "finish_reason": "stop",
        "environment": "calculator",
        "ending": "answered",
        "turns": [
            dict(zip(TURN, values, strict=True))
            for values in (
                ("I add.", ["add", ""], "5\nError: no call", 0.5, 3, 1, 1),
                ("Hm", [], "Guess!", None, 1, 2, 0),
                ("[bold]5", [], "", 1.0, 2, 0, 0),
            )
        ],
        "mask": [[3, 1], [1, 2], [2, 0]],
    }


@pytest.mark.parametrize(
    ("sampled", "runs"),
    [
        ([1, 1, 1, 0, 0, 1, 1], [[3, 2], [2, 0]]),
        ([0, 1, 0], [[0, 1], [1, 1]]),
        ([1], [[1, 0]]),
        ([0, 0], [[0, 2]]),
    ],
)
def test_masks_as_runs(sampled: list[int], runs: list[list[int]]) -> None:
    made = replace(TALK, token_ids=np.arange(len(sampled)), sampled=np.array(sampled, np.bool_))
    assert conversation_fields(made)["mask"] == runs


def test_a_failure_is_named_and_a_plain_answer_is_no_conversation() -> None:
    failed = talk([1], ([3], []), ending="failed", failure=Failure("died", "its process exited with 3"))
    assert conversation_fields(failed)["failure"] == "died: its process exited with 3"
    assert conversation_fields(completion([1])) == {}


def shown(one: SampleRow, width: int) -> str:
    file = io.StringIO()
    ConsoleSink(0, 9, console=Console(file=file, width=width)).samples(1, [one])
    return file.getvalue()


def test_the_console_shows_turns_and_who_says_what() -> None:
    """A line of the table for each piece; markup in a text is no markup."""
    table = shown(row(), 120)
    pieces = ["I add.", "add, a call that cannot be read> 5\\nError: no call", "Hm", "calculator> Guess!", "[bold]5"]
    places = [table.index(piece) for piece in pieces]
    assert places == sorted(places)
    assert "Tools: add" in table
    narrow = shown(row(), 50)
    assert f"Tools: add -> {' '.join(pieces)} (success 1.00; advantage +0.00)" in narrow


def test_the_console_leaves_out_turns_in_the_middle_and_names_a_failure() -> None:
    many = [([number], [9]) for number in range(7)]
    texts = {number: {"text": f"turn {number}", "answer": f"answer {number}"} for number in range(7)}
    failed = talk([1], *many, turns=texts, ending="failed", failure=Failure("late", "took 60 s"))
    narrow = shown(row(failed), 50)
    assert "turn 1 Toy> answer 1 [3 turns left out] turn 5 Toy> answer 5 turn 6" in narrow
    assert "[failed, late: took 60 s] (success" in narrow
