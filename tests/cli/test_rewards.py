"""Rewards are tried on a file of completions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import cases, compare
from tpu_grpo.cli.rewards import main, read_completions
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.json_files import encode_line

UNUSABLE = Path(__file__).with_name("unusable.txt")
RECORDS = [
    {"prompt": "2+2?", "completion": "#### 4", "answer": "4"},
    {"prompt": "2+3?", "completion": "it is 5", "answer": "5"},
    {"prompt": "2+4?", "completion": "#### 7", "answer": "6"},
]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def scored(tmp_path: Path, capsys: pytest.CaptureFixture[str], rewards: str, records: list[Any]) -> list[list[str]]:
    """The cells of the table that the command prints."""
    config, path = tmp_path / "config.yaml", write(tmp_path / "c.jsonl", records)
    config.write_text(f"rewards: {rewards}\n")
    assert main([str(config), "--completions", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def test_separators_within_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    """A run writes samples.jsonl in UTF-8, in which JSON leaves U+2028 and U+0085 as they are."""
    path, texts = tmp_path / "c.jsonl", ("a\u2028b\x85c", "d")
    path.write_bytes(b"\r\n".join(encode_line({"completion": text}).rstrip() for text in texts))
    assert read_completions(path).texts == texts


def test_the_table_has_every_row_and_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shown = scored(tmp_path, capsys, "[{name: gsm8k}, {name: format, weight: 0.5}]", RECORDS)
    assert shown == [
        ["row", "gsm8k", "format", "total", "completion"],
        ["0", "1", "1", "1.5", "#### 4"],
        ["1", "1", "0", "1", "it is 5"],
        ["2", "0", "1", "0.5", "#### 7"],
        ["mean", "0.666667", "0.666667", "1", ""],
    ]


def test_groups_and_rows_to_which_a_reward_does_not_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = "def f(completions):\n    return [None if c == 'none' else float(c) for c in completions]\n"
    (tmp_path / "mine.py").write_text(source)
    records = [{"completions": ["1", "2"]}, {"completions": ["none", "3"]}]
    shown = scored(tmp_path, capsys, f"[{{name: '{tmp_path}/mine.py:f', workers: 0}}]", records)
    assert [row[1:3] for row in shown[1:]] == [["1", "1"], ["2", "2"], ["-", "-"], ["3", "3"], ["2", "2"]]


def test_prompts_may_be_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    records = [{"prompt": chat, "completion": "4"}, {"prompt": "2+3?", "completion": "5"}]
    (tmp_path / "mine.py").write_text("def f(prompts, completions):\n    return [float(len(p)) for p in prompts]\n")
    as_messages, as_text = (
        [
            row[1]
            for row in scored(
                tmp_path,
                capsys,
                f"[{{name: '{tmp_path}/mine.py:f', workers: 0, messages: {messages}}}]",
                records,
            )[1:3]
        ]
        for messages in ("true", "false")
    )
    assert (as_messages, as_text) == (["2", "1"], ["4", "4"])  # messages; letters of what the user says


@pytest.mark.parametrize(("given", "told"), cases(UNUSABLE))
def test_files_that_cannot_be_used(tmp_path: Path, given: str, told: str):
    (tmp_path / "c.jsonl").write_text(given.removeprefix("c.jsonl=").replace("↵", "\n"))
    with pytest.raises(DataError) as caught:
        read_completions(tmp_path / "c.jsonl")
    compare(UNUSABLE, given, told, str(caught.value).replace(str(tmp_path), "HERE"))


def test_a_reward_that_fails_is_named_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    source = """
from tpu_grpo.rewards import per_sample

@per_sample
def number(completion):
    return float(completion)
"""
    (tmp_path / "mine.py").write_text(source)
    config, path = (
        tmp_path / "config.yaml",
        write(tmp_path / "c.jsonl", [{"completion": text} for text in ("1", "one")]),
    )
    config.write_text(f"rewards: [{{name: '{tmp_path}/mine.py:number', workers: 0}}]\n")
    assert main([str(config), "--completions", str(path)]) == 2
    errors = capsys.readouterr().err
    assert "ValueError: could not convert string to float: 'one' (" in errors
    assert "for row 1 (prompt '', completion 'one'). Return None for rows" in errors
    assert main([str(config), "--completions", str(path), "rewards=[{name: gsm8}]"]) == 2
    assert "did you mean gsm8k?" in capsys.readouterr().err
