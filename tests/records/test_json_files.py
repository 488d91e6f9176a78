import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.observe.json_lines import (
    compact,
    encode_line,
    is_number,
    jsonable,
    keep_steps,
    read_records,
    replace_text,
    write_json,
)
from tpu_grpo.records.errors import DataError


def test_numbers_that_json_lacks_become_null_at_any_depth() -> None:
    record = {"a": float("nan"), "b": {"c": [np.float32(0.5), -np.inf]}, "d": np.int64(7)}
    assert jsonable(record) == {"a": None, "b": {"c": [0.5, None]}, "d": 7}


@pytest.mark.parametrize(
    "text", ["é 中 \U0001f600", "line\nbreak\u2028here", "lone \udc80 surrogate", '"quoted" \\ \x00']
)
def test_text_round_trips_on_one_line(text: str) -> None:
    line = encode_line({"text": text})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": text}


def test_floats_round_trip_exactly() -> None:
    values = [0.1, 1e-300, 1 / 3, -0.0, 123456789.123456789]
    assert json.loads(encode_line({"v": values}))["v"] == values


def test_only_the_last_line_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert [r["step"] for r in read_records(path)] == [1, 2]
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"f\.jsonl:2 must be one JSON object"):
        list(read_records(path))


def test_a_missing_file_is_empty_only_where_it_may_be(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl", missing_ok=True)) == []
    with pytest.raises(FileNotFoundError):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_broken_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    content = b'{"step": 1}\nbroken\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(DataError):
        keep_steps(path, 9)
    assert path.read_bytes() == content


def test_replacing_a_file_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("old and longer")
    replace_text(path, "new")
    assert path.read_text() == "new"
    write_json(path, {"a": float("inf"), "b": {"c": 0.1}})
    assert json.loads(path.read_text()) == {"a": None, "b": {"c": 0.1}}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("torn", "said"),
    [
        ('{"step": 3, "rew', ": its last line of step 3 was torn, as by a full disk, and is lost\n"),
        ('{"st', ": its last line was torn, as by a full disk, and is lost\n"),
        ('{"step": 4, "rew', ""),  # it will be done again
        ("", ""),
    ],
)
def test_a_torn_line_of_a_step_that_is_done_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: str, said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    keep_steps(path, 3)
    assert capsys.readouterr().err == (said and f"{path}{said}")
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["{}", '{"step": "1"}', '{"step": true}', '{"step": null}', '{"step": 1.5}'])
def test_a_line_without_a_step_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1}}\n')
    with pytest.raises(DataError, match="every line must hold step, a value of int, got "):
        keep_steps(path, 3)
    assert path.read_text().startswith(line)


def test_an_integer_that_no_float_can_hold_is_no_number() -> None:
    assert is_number(10**308)
    assert not is_number(10**309)
    assert not is_number(-(10**309))
    assert not is_number(True)


def test_compact_records_hold_what_the_records_did() -> None:
    records = [
        {"step": 1, "a": 0.5, "digest": "x", "gap": None, "n": 2**53, "m": 2**53 + 1, "on": True, "inner": {"b": [1]}},
        {"step": 2, "a": 7.0},
        {"a": 1e-300, "step": 3},
    ]
    made = compact(records)
    assert [dict(record) for record in made] == records
    assert [type(value) for value in made[0].values()] == [type(value) for value in records[0].values()]
    assert ("a" in made[1], "digest" in made[1], made[1].get("digest"), len(made[2])) == (True, False, None, 2)


@pytest.mark.full
def test_a_page_holds_less_than_a_kilobyte_of_a_step() -> None:
    """100 metrics of 8 bytes; as a dict, a step takes more than five times as many."""
    records = ({"step": step} | {f"stage/metric_{name}": step / 7 for name in range(99)} for step in range(500))
    tracemalloc.start()
    try:
        made = compact(records)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(made) == 500
    assert held / 500 < 1024
