"""Records come from files and from the built-in task, and errors say why a file cannot be read."""

from pathlib import Path

import pytest

from tpu_grpo.data.sources import Source, read_records
from tpu_grpo.records.errors import DataError
from tpu_grpo.tasks import TASKS, addition


def test_one_record_per_line(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"q": "a\u2028b", "n": 1}\r\n{"n": null, "q": "é"}\n\n'.encode())
    assert read_records(Source(str(path))) == [{"q": "a\u2028b", "n": 1}, {"n": None, "q": "é"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data\.jsonl must hold at least one record, got none"),
        ("\n\n", r"data\.jsonl must hold at least one record, got none"),
        ('{"q": 1}\n{"q": 1\n', r"data\.jsonl:2 must be a JSON object, got Expecting ',' delimiter at column"),
        ('{"q": 1}\n\n{"q": 1}\n', r"data\.jsonl:2 must be a JSON object, got an empty line"),
        ('{"q": 1}\n[1]\n', r"data\.jsonl:2 must be a JSON object with a key per column, got a list"),
        ("{}\n", r"data\.jsonl:1 must be a JSON object with a key per column, got an empty one"),
        (
            '{"q": 1, "a": 2}\n{"q": 1, "a": 2}\n{"q": 1, "b": 2}\n',
            r"data\.jsonl:3 must have the keys of line 1, \['q', 'a'\], but lacks \['a'\] and adds \['b'\]; write null",
        ),
        ('{"q": 1, "a": 2}\n{"q": 1}\n', r"data\.jsonl:2 .* but lacks \['a'\]; write null"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_records(Source(str(path)))


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(DataError, match=r"data file not found: .*missing\.jsonl .*correct it"):
        read_records(Source(str(tmp_path / "missing.jsonl")))
    with pytest.raises(
        DataError, match=r"must be a \.jsonl, .*\.csv, \.tsv file .*or builtin:addition, got .*data\.txt"
    ):
        read_records(Source(str(tmp_path / "data.txt")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"q": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl must be readable UTF-8, got UnicodeDecodeError"):
        read_records(Source(str(tmp_path / "latin.jsonl")))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"folder\.jsonl must be readable UTF-8, got IsADirectoryError"):
        read_records(Source(str(tmp_path / "folder.jsonl")))
    with pytest.raises(DataError, match="got 'builtin:sums'; there are builtin:addition, .*, builtin:environment"):
        read_records(Source("builtin:sums"))


def test_builtin_training_problems_come_as_the_task_has_them():
    records = read_records(Source("builtin:addition"))
    assert records == addition.problems("train")
    assert records[0].keys() == {"question", "answer"}


def test_every_builtin_task_is_read_by_its_name():
    for name, task in TASKS.items():
        assert read_records(Source(f"builtin:{name}")) == task.problems("train")
        heldout = read_records(Source(f"builtin:{name}", use="heldout"))
        assert sorted(map(str, heldout)) == sorted(map(str, task.problems("heldout")))


def test_builtin_heldout_problems_are_mixed_so_that_the_first_few_are_like_the_rest():
    records = read_records(Source("builtin:addition", use="heldout"))
    assert records == read_records(Source("builtin:addition", use="heldout"))
    assert sorted(map(str, records)) == sorted(map(str, addition.problems("heldout")))
    pairs = [tuple(map(int, r["question"].rstrip("=").split("+"))) for r in records]
    carries = [addition.needs_carry(a, b) for a, b in pairs]
    assert abs(sum(carries[:256]) / 256 - sum(carries) / len(carries)) < 0.05


def test_prompts_that_environments_give_are_empty_and_numbered() -> None:
    train = read_records(Source("builtin:environment"))
    assert (len(train), train[0], train[-1]["task"]) == (10_000, {"prompt": "", "task": 0}, 9_999)
    assert read_records(Source("builtin:environment", use="heldout"))[0] == {"prompt": "", "task": 10_000}
