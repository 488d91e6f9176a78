import json
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.records.errors import DataError
from tpu_grpo.records.json_files import encode_line, jsonable, keep_steps, read_records, replace_text, write_json


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
