"""JSON and Countdown are labelled by hand, reasoning-gym by the library's own answers."""

import json
from typing import Any

import pytest
import reasoning_gym as gym

from tpu_grpo.rewards.shipped.structured import countdown, json_schema, reasoning_gym

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"n": 5}', 1.0),
        ('{"n": 5, "more": 1}', 1.0),
        ('Here:\n```json\n{"n": 5}\n```\nDone.', 1.0),
        ('{"n": "5"}', 0.2),
        ("{}", 0.2),
        ('{"n": 5', 0.0),
        ('Here: {"n": 5}', 0.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema(completion: str, expected: float):
    assert json_schema([completion], SCHEMA, parsed=0.2) == [expected]


def test_json_schemas_of_the_rows():
    schemas = [{"type": "string"}, json.dumps({"type": "number"}), None]
    assert json_schema(['"a"', '"a"', '"a"'], schemas) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="schema must be a JSON schema .*'x' is not valid"):
        json_schema([], {"type": "x"})
    assert json_schema(["<answer>1</answer>", "1"], {"type": "number"}, tag="answer") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("94*4 - 61 - 6", 1.0),
        ("(94 * 4) - (61 + 6) = 309", 1.0),
        ("94×4 − 61 − 6", 1.0),
        ("94*4 - 61 + 6", 0.1),  # 321
        ("94*4 - 61", 0.0),  # 6 is left over
        ("94*4 - 61 - 6 + 6 - 6", 0.0),  # 6 three times
        ("309", 0.0),
        ("94*4 - 61 - 6/1", 0.0),
        ("94/(6-6)", 0.0),
        ("94**4", 0.0),
        ("__import__('os')", 0.0),
        ("94*4 - 61 -", 0.0),
        ("9" * 500, 0.0),
        ("", 0.0),
    ],
)
def test_countdown(expression: str, expected: float):
    text = f"<think>hm</think><answer>{expression}</answer>"
    assert countdown([text], [309], [[6, 61, 94, 4]], format_score=0.1) == [expected]


def test_countdown_with_fewer_numbers_and_fractions():
    assert countdown(["8/3*3"], [8], [[8, 3, 3, 5]], tag=None, use_all=False) == [1.0]
    assert countdown(["8/3*3"], [8], [[8, 3, 3, 5]], tag=None) == [0.0]
    assert countdown(["8/(3-8/3)"], [24], [[8, 3, 8, 3]], tag=None) == [1.0]
    assert countdown(["1"], [None], [[1]], tag=None) == [None]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "leg_counting", "spell_backward", "simple_equations"])
def test_puzzles_of_reasoning_gym(name: str):
    entries: list[dict[str, Any]] = list(gym.create_dataset(name, size=4, seed=3))
    columns: Any = {key: [entry[key] for entry in entries] for key in ("metadata", "answer", "question")}
    right = reasoning_gym([f"<answer>{e['answer']}</answer>" for e in entries], **columns)
    assert right == [1.0] * 4
    wrong = reasoning_gym(["<answer>no idea</answer>"] * 4, **columns)
    assert all(value is not None and value < 0.5 for value in wrong)
    assert reasoning_gym([str(e["answer"]) for e in entries], **columns) == [0.0] * 4  # no tag
    as_text: Any = {**columns, "metadata": [json.dumps(m) for m in columns["metadata"]]}
    assert reasoning_gym([str(e["answer"]) for e in entries], tag=None, **as_text) == [1.0] * 4
