"""A table gives the records of the lines that it was made from, whether datasets, pandas or pyarrow wrote it."""

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import DataSection, ReadingSection
from tpu_grpo.data.arrow_rows import ArrowRows
from tpu_grpo.data.sources import Source, glance, read_records
from tpu_grpo.data.stream import open_prompts
from tpu_grpo.records.errors import DataError
from tpu_grpo.rewards.shipped.correctness import exact_answer
from tpu_grpo.rewards.shipped.instructions import instructions

datasets: Any = pytest.importorskip("datasets", "4")


def read(path: Path | str, **reading: Any) -> list[dict[str, Any]]:
    source = Source(str(path), ReadingSection(**reading))
    records = [dict(record) for record in read_records(source)]
    assert glance(source) in (records[0], None)
    return records


def value(of: Any, kind: pa.DataType | None = None) -> Any:
    """What a table gives for a value that it stores as this type."""
    is_nested = kind is not None and pa.types.is_nested(kind) and "json" in str(kind)  # which cannot be made at once
    array = pa.array([of]).cast(kind) if is_nested else pa.array([of], kind)
    (row,) = ArrowRows(pa.table({"c": array}), "table")
    return row["c"]


# --- one value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "kind", "expected"),
    [
        ('"47+38="', pa.json_(), "47+38="),
        ("1", pa.json_(), 1),
        ('{"a":[null,0.5]}', pa.json_(), {"a": [None, 0.5]}),
        ("9223372036854775809", pa.json_(), 2**63 + 1),
        ("007", pa.json_(), "007"),  # datasets stores a text without quotes if its parser of JSON accepts it
        ("1.50", pa.json_(), "1.50"),
        ("1e400", pa.json_(), "1e400"),
        ("-3.0", pa.json_(), -3.0),
        ("1e+300", pa.json_(), 1e300),
        ("true", pa.json_(), True),
        ([['"a"', None], []], pa.list_(pa.list_(pa.json_())), [["a", None], []]),
        ({"m": '"a"', "n": "null"}, pa.struct({"m": pa.json_(), "n": pa.json_()}), {"m": "a", "n": None}),
        ([{"role": "user", "content": "12"}], None, [{"role": "user", "content": "12"}]),
        (0.1, pa.float32(), 0.1),
        (16777216.0, pa.float32(), 16777216.0),
        ([0.1, None], pa.large_list(pa.float32()), [0.1, None]),
        ({"x": [0.1]}, pa.struct({"x": pa.list_(pa.float32(), 1)}), {"x": [0.1]}),
        (0.1, pa.float64(), 0.1),
        ([6.02e23, 2.0**62, float("inf")], None, [6.02e23, 2.0**62, float("inf")]),
        (Decimal("18.90"), None, 18.9),
        (Decimal("36.00"), None, 36),
        (datetime.date(2024, 1, 5), None, "2024-01-05"),
        (datetime.datetime(2024, 1, 5), pa.timestamp("s"), "2024-01-05"),
        (datetime.datetime(2024, 1, 5, 10, 30), pa.timestamp("us"), "2024-01-05T10:30:00"),
        (datetime.datetime(2024, 1, 5, tzinfo=datetime.UTC), None, "2024-01-05T00:00:00+00:00"),
        (1704412800000000001, pa.timestamp("ns"), "2024-01-05T00:00:00.000000001"),
        ({"a": 1, "b": None}, None, {"a": 1, "b": None}),
        ([{"a": 1, "b": None}, {"a": None, "b": 2}, None], None, [{"a": 1}, {"b": 2}, None]),
        ([("k", "v")], pa.map_(pa.string(), pa.string()), {"k": "v"}),
        ("x", pa.dictionary(pa.int32(), pa.large_string()), "x"),
        ("x", pa.string_view(), "x"),
        (2**64 - 1, pa.uint64(), 2**64 - 1),
        (b"\xff", None, b"\xff"),
        ([], pa.list_(pa.float32()), []),
        (None, pa.json_(), None),
        (None, pa.float32(), None),
    ],
)
def test_values_are_those_of_a_line(stored: Any, kind: pa.DataType | None, expected: Any) -> None:
    found = value(stored, kind)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("stored", "content"), [("12", "12"), ("1.50", "1.50"), ("true", "true"), ("[1, 2]", "[1, 2]")]
)
def test_the_content_of_a_message_is_the_text_that_it_was(stored: str, content: str) -> None:
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.json_()}))
    parts = [{"type": "text", "text": "a"}]
    given = [{"role": "user", "content": text} for text in (stored, json.dumps(parts))]
    assert [message["content"] for message in value(given, kind)] == [content, parts]


def test_whole_numbers_that_may_have_lost_digits_are_refused_by_name(tmp_path: Path) -> None:
    lines, rows = tmp_path / "d.jsonl", [{"q": "x", "more": [{"n": 2**63 + 1}]}]
    lines.write_text(json.dumps(rows[0]) + "\n")
    assert read(lines) == rows
    loaded = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    loaded.save_to_disk(tmp_path / "saved")
    loaded.to_parquet(str(tmp_path / "d.parquet"))
    for path in (tmp_path / "saved", tmp_path / "d.parquet"):
        said = rf"{path}.*: the column 'more' must hold numbers of 64 bits, got 9.223372036854776e\+18; it may have"
        with pytest.raises(DataError, match=said):
            read(path)


def test_files_of_arrow_are_read_in_both_formats(tmp_path: Path) -> None:
    rows = [{"q": "a", "n": [{"x": 1}]}, {"q": None, "n": []}]
    table = pa.Table.from_pylist(rows)
    feather.write_feather(table, str(tmp_path / "file.arrow"))
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "file.arrow") == read(tmp_path / "stream.arrow") == rows
    (tmp_path / "none.arrow").write_bytes(b"none")
    with pytest.raises(DataError, match=r"none.arrow must be an Arrow file, got ArrowInvalid"):
        read(tmp_path / "none.arrow")


def test_an_index_of_pandas_is_no_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"q": ["a", "b", "c"]}).iloc[[2, 0]]
    frame.to_parquet(tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet") == [{"q": "c"}, {"q": "a"}]


# --- the same rows in every layout -----------------------------------------------------------------------------------


def uniform(number: int) -> dict[str, Any]:
    """A row whose columns have a type each, which pyarrow can hold."""
    call = {"a": number} if number % 2 else {"b": str(number), "c": [number]}
    return {
        "prompt": [
            {"role": "user", "content": f"{number}+1="},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": call}}]},
            {"role": "tool", "content": str(number)},
        ],
        "answer": number + 0.1,
        "day": f"2024-01-{number + 1:02}",
        "code": f"{number:03}",
        "nothing": None if number else "x",
        "instruction_id_list": ["change_case:english_lowercase", "keywords:existence"][: number % 3],
        "kwargs": [{}, {"keywords": ["1"]}][: number % 3],
    }


def mixed(number: int) -> dict[str, Any]:
    """A row with columns of mixed types, which only datasets can hold, as JSON."""
    content = [f"{number}+1=", [{"type": "text", "text": f"{number}+1="}], str(number)][number % 3]
    answer = [number, "a", number + 0.5][number % 3]
    return uniform(number) | {"prompt": [{"role": "user", "content": content}], "answer": answer}


def layouts(rows: list[dict[str, Any]], folder: Path, *, is_mixed: bool) -> dict[str, str]:
    """Write the rows in every layout that can hold them; return ``data.path`` by the layout's name."""
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "directory").mkdir()
    shutil.copy(lines, folder / "directory" / "train.jsonl")
    loaded = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(folder / "cache"))
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    loaded.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=made).save_to_disk(folder / "made")
    loaded.to_parquet(str(folder / "rows.parquet"))
    (folder / "tables").mkdir()
    made.to_parquet(str(folder / "tables" / "train.parquet"))
    (folder / "rows.py").write_text(
        f"import datasets\ndef saved(): return datasets.load_from_disk({str(folder / 'saved')!r}).select(range(30))\n"
    )
    paths = {name: name for name in ("rows.jsonl", "rows.json", "directory", "saved", "made", "rows.parquet", "tables")}
    paths |= {"a Dataset": "rows.py:saved", "Arrow": next((folder / "saved").glob("*.arrow")).name}
    shutil.copy(folder / "saved" / paths["Arrow"], folder)
    if not is_mixed:
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, folder / "pyarrow.parquet")
        floats = table.column("answer").cast(pa.float32())
        parquet.write_table(table.set_column(1, "answer", floats), folder / "float32.parquet")
        pd.DataFrame(rows).to_parquet(folder / "pandas.parquet")
        datasets.Dataset.from_list(rows).save_to_disk(folder / "filled")
        paths |= {name: name for name in ("pyarrow.parquet", "float32.parquet", "pandas.parquet", "filled")}
    return {name: f"{folder}/{path}" for name, path in paths.items()} | {"hub": "hf:me/rows"}


@pytest.mark.parametrize("is_mixed", [False, True])
def test_thirty_rows_are_the_same_in_every_layout(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mixed: bool
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %};{% endfor %}"
    )
    rows = [(mixed if is_mixed else uniform)(number) for number in range(30)]
    paths = layouts(rows, tmp_path, is_mixed=is_mixed)
    of_hub = datasets.load_from_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: of_hub)
    right = [str(row["answer"]) for row in rows]
    expected: Any = None
    for name, path in paths.items():
        prompts = open_prompts(DataSection(path=path), 0, tokenizer).parts[0].rendered.prompts
        columns = {column: [prompt.columns[column] for prompt in prompts] for column in rows[0]}
        scores = [
            exact_answer(right, columns["answer"]),
            instructions(["1 a"] * 30, columns["instruction_id_list"], columns["kwargs"]),
        ]
        found = [prompt.token_ids for prompt in prompts], [dict(prompt.columns) for prompt in prompts], scores
        expected = expected or found
        assert found == expected, name
        assert found[1] == rows, name
        assert scores[0] == [1.0] * 30, name


def test_thirty_flat_rows_are_the_same_as_csv(tmp_path: Path) -> None:
    rows = [{key: str(row[key]) for key in ("answer", "day", "code")} for row in map(uniform, range(30))]
    (tmp_path / "directory").mkdir()
    for suffix, sign in (("csv", ","), ("tsv", "\t")):
        text = "\n".join([sign.join(rows[0]), *(sign.join(row.values()) for row in rows)])
        for path in (tmp_path / f"rows.{suffix}", tmp_path / "directory" / f"train.{suffix}"):
            path.write_text(text)
            assert read(path if path.parent == tmp_path else path.parent) == rows
        (tmp_path / "directory" / f"train.{suffix}").unlink()
    (tmp_path / "directory" / "train.csv").write_text("code;day\n007;x\n")
    assert read(tmp_path / "directory", options={"sep": ";", "cache_dir": str(tmp_path / "c")}) == [
        {"code": 7, "day": "x"}
    ]
