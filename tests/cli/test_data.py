"""The preview shows what a run trains on: the same prompts, token by token."""

import io
import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from tpu_grpo.cli import data
from tpu_grpo.cli.data import lengths_of, shown_value
from tpu_grpo.config import parse_config
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.inputs import open_inputs

ADDITION = {"data": {"prompts_per_step": 3, "max_prompt_tokens": 12}}


def test_the_first_prompts_are_those_of_the_first_steps() -> None:
    stream = open_inputs(parse_config(ADDITION)).prompts
    steps = [p for step in (1, 2) for p in stream.batch(step).prompts]
    assert list(data.first(stream, 5)) == steps[:5]
    assert list(data.first(stream, 2, step=2)) == steps[3:5]


def test_of_many_prompts_some_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lengths_of([Prompt("", (0,) * n) for n in (4, 1, 3, 2)]) == [1, 2, 3, 4]
    monkeypatch.setattr("tpu_grpo.cli.data.MEASURED", 3)
    assert lengths_of([Prompt("", (0,) * n) for n in range(1, 10)]) == [1, 4, 7]


def test_a_value_is_one_short_line() -> None:
    assert shown_value("a\nb") == "'a\\nb'"
    assert len(shown_value("x" * 1000)) == 200


def test_what_the_command_prints(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("question,answer\n1+1=,2\n" + "9" * 30 + ",3\n")
    words = [f"data.path={path}", "data.max_prompt_tokens=10", "data.too_long=drop", "data.prompts_per_step=1"]
    words += [f"evaluation.path={path}", "evaluation.prompts=1"]
    out = io.StringIO()
    for evaluation in (False, True):
        shown = Namespace(words=words, preview=1, step=1, evaluation=evaluation)
        data.show(Console(file=out, width=200, highlight=False), shown)
    text = out.getvalue()
    assert text.count("prompt 1: 6 tokens") == 2
    assert " │ 1       │ 1       │ 1      │ 6        │ 6      │ 6 " in text  # one prompt, one dropped, six tokens
    assert "259'<|im_start|>user' 49'1' 43'+' 49'1' 61'=' 260'<|im_start|>assistant'" in text
    assert "question: '1+1='\nanswer: '2'" in text


def test_a_look_needs_no_reward(tmp_path: Path) -> None:
    """The default reward reads the column answer, which these data of TRL, alpaca and verl do not have."""
    for number, record in enumerate(
        (
            {"prompt": [{"role": "user", "content": "2+3?"}], "solution": "5"},
            {"instruction": "2+3?", "input": "", "output": "5"},
            {"data_source": "x", "prompt": "2+3?", "reward_model": {"ground_truth": "5"}},
        )
    ):
        path, out = tmp_path / f"{number}.jsonl", io.StringIO()
        path.write_text(json.dumps(record) + "\n")
        words = [f"data.path={path}", "data.prompts_per_step=1"]
        data.show(Console(file=out), Namespace(words=words, preview=1, step=1, evaluation=False))
        assert "<|im_start|>user2+3?<|im_start|>assistant" in out.getvalue()
