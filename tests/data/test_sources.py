"""Sources of every kind give records under the names of the config, and errors say what cannot work."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tpu_grpo.config import ReadingSection
from tpu_grpo.data import sources
from tpu_grpo.data.sources import Source, read_records
from tpu_grpo.models.tasks import TASKS, addition
from tpu_grpo.records.errors import ConfigError, DataError, TpuGrpoError


def test_one_record_per_line(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"q": "a\u2028b", "n": 1}\r\n{"n": null, "q": "é"}\n\n'.encode())
    assert list(read_records(Source(str(path)))) == [{"q": "a\u2028b", "n": 1}, {"n": None, "q": "é"}]


def test_every_builtin_task_is_read_by_its_name():
    for name, task in TASKS.items():
        assert read_records(Source(f"builtin:{name}")) == task.problems("train")
        heldout = read_records(Source(f"builtin:{name}", use="heldout"))
        assert sorted(map(str, heldout)) == sorted(map(str, task.problems("heldout")))


def test_builtin_heldout_problems_are_mixed_so_that_the_first_few_are_like_the_rest():
    records = read_records(Source("builtin:addition", use="heldout"))
    assert records == read_records(Source("builtin:addition", use="heldout"))
    pairs = [tuple(map(int, r["question"].rstrip("=").split("+"))) for r in records]
    carries = [addition.needs_carry(a, b) for a, b in pairs]
    assert abs(sum(carries[:256]) / 256 - sum(carries) / len(carries)) < 0.05


def test_prompts_that_environments_give_are_empty_and_numbered() -> None:
    train = read_records(Source("builtin:environment"))
    assert (len(train), train[0], train[-1]["task"]) == (10_000, {"prompt": "", "task": 0}, 9_999)
    assert read_records(Source("builtin:environment", use="heldout"))[0] == {"prompt": "", "task": 10_000}


needs_datasets = pytest.mark.skipif(
    int(metadata.version("datasets").split(".")[0]) < 4, reason="the datasets library pinned in pyproject.toml"
)


def read(path: Path | str, use: Any = "train", setting: str = "data.path", **reading: Any) -> list[dict[str, Any]]:
    return [dict(record) for record in read_records(Source(str(path), ReadingSection(**reading), use, setting))]


def message(error: type[TpuGrpoError], path: Path | str, **reading: Any) -> str:
    with pytest.raises(error) as caught:
        read(path, **reading)
    return str(caught.value)


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    rows = [{"problem": "1+1", "solution": 2, "answer": "old", "meta": {"truth": {"n": 7}}}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_get_other_names_and_the_rest_keep_theirs(jsonl: Path) -> None:
    columns = {"question": "problem", "answer": "solution", "n": "meta.truth.n"}
    (row, _) = read(jsonl, columns=columns)
    assert row == {"question": "1+1", "answer": 2, "n": 7, "meta": {"truth": {"n": 7}}}


def test_columns_may_be_swapped(jsonl: Path) -> None:
    (row, _) = read(jsonl, columns={"answer": "solution", "solution": "answer"})
    assert (row["answer"], row["solution"]) == (2, "old")


def test_a_part_of_a_column_that_is_not_there(jsonl: Path) -> None:
    said = message(ConfigError, jsonl, columns={"question": "meta.nope"})
    assert said.startswith(f"data.columns names the column 'meta.nope', which record 0 of {jsonl} (from 0) lacks; ")


# --- files -----------------------------------------------------------------------------------------------------------


def test_csv_values_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"a, ""b""\nc",007\r\n\r\né,\r\n'.encode())
    assert read(path) == [{"question": 'a, "b"\nc', "answer": "007"}, {"question": "é", "answer": ""}]


def test_parquet_keeps_types(tmp_path: Path) -> None:
    rows = [{"q": "a", "n": 1, "l": [1, 2], "m": {"x": None}}, {"q": "b", "n": None, "l": [], "m": {"x": "y"}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet") == rows


def test_parquet_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    assert "data file not found" in message(DataError, path)
    path.write_bytes(b"not parquet")
    assert f"{path} must be a Parquet file, got ArrowInvalid" in message(DataError, path)
    parquet.write_table(pa.Table.from_pylist([{"q": "a"}]).slice(0, 0), path)
    assert "must hold at least one record, got none" in message(DataError, path)


# --- made ------------------------------------------------------------------------------------------------------------


FUNCTIONS = """
def squares(count, start=0):
    return ({"question": f"{n}*{n}=", "answer": n * n} for n in range(start, start + count))
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_function_gets_the_options(functions: Path) -> None:
    rows = read(f"{functions}:squares", options={"count": 2, "start": 5}, columns={"target": "answer"})
    assert rows == [{"target": 25, "question": "5*5="}, {"target": 36, "question": "6*6="}]


def test_a_function_of_a_module() -> None:
    rows = read("tpu_grpo.models.tasks.addition:problems", options={"split": "heldout"})
    assert len(rows) == 512


def test_puzzles_of_reasoning_gym() -> None:
    rows = read("reasoning_gym:chain_sum", options={"size": 3, "min_digits": 1, "max_digits": 1})
    assert [sorted(row) for row in rows] == [["answer", "metadata", "question"]] * 3
    for row in rows:
        assert eval(row["metadata"]["expression"]) == int(row["answer"])
        assert row["metadata"]["expression"] in row["question"]
    again = read("reasoning_gym:chain_sum", options={"size": 3, "min_digits": 1, "max_digits": 1})
    assert again == rows
    held_out = read("reasoning_gym:chain_sum", "heldout", options={"size": 3, "min_digits": 1, "max_digits": 1})
    assert held_out != rows


def test_puzzles_that_are_not_there() -> None:
    assert "got 'chain_sun'; did you mean chain_sum?" in message(ConfigError, "reasoning_gym:chain_sun")
    assert "does not take the options {'sise': 3}" in message(
        ConfigError, "reasoning_gym:chain_sum", options={"sise": 3}
    )


# --- Hugging Face datasets -------------------------------------------------------------------------------------------


ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "4"}]


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    """Where load_dataset keeps what it converts."""
    return {"cache_dir": str(tmp_path / "cache")}


@needs_datasets
def test_a_dataset_that_was_saved(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", columns={"q": "question"}) == [
        {"q": r["question"], "answer": r["answer"]} for r in ROWS
    ]
    assert "data.subset means nothing for a directory of save_to_disk" in message(
        ConfigError, tmp_path / "saved", subset="main"
    )
    said = message(DataError, tmp_path / "saved", split="test")
    assert "with the split 'test', got ValueError: it was saved as the split 'None'; leave the split out" in said


@needs_datasets
def test_splits_that_were_saved(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = DatasetDict({"train": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])})
    splits.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS[:1]
    assert read(tmp_path / "saved", "heldout") == ROWS[1:]
    assert read(tmp_path / "saved", split="test") == ROWS[1:]
    assert "unknown split 'dev'; there are ['train', 'test']" in message(DataError, tmp_path / "saved", split="dev")


@needs_datasets
def test_a_directory_of_data_files(tmp_path: Path, cache: dict[str, Any]) -> None:
    folder = tmp_path / "folder"
    for subset, rows in (("easy", ROWS[:1]), ("hard", ROWS[1:])):
        (folder / subset).mkdir(parents=True)
        (folder / subset / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("easy", "hard"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read(folder, subset="hard", options=cache) == ROWS[1:]
    assert read(folder, subset="easy", options=cache) == ROWS[:1]
    said = message(DataError, folder, subset="easy", split="dev", options=cache)
    assert "must be a Hugging Face dataset with the split 'dev' and the subset 'easy', got ValueError" in said


@needs_datasets
def test_a_dataset_of_the_hub_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, cache: dict[str, Any]) -> None:
    import datasets.config
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = message(DataError, "hf:nobody/nothing", options=cache)
    assert "data.path=hf:nobody/nothing must be a Hugging Face dataset with the split 'train', got" in said
    assert "HF_HUB_OFFLINE=1 is set, so that the hub is not asked" in said


@needs_datasets
def test_a_dataset_of_the_hub_is_asked_for_by_name_subset_split_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself cannot be reached by tests: what the library is asked for is all that is seen."""
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load(*names: Any, **options: Any) -> Any:
        asked.append((*names, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("hf:openai/gsm8k", subset="main", options={"revision": "abc"}) == ROWS
    assert read("hf:openai/gsm8k", "heldout") == ROWS
    assert asked == [
        ("openai/gsm8k", "main", {"split": "train", "revision": "abc"}),
        ("openai/gsm8k", None, {"split": "test"}),
    ]


def test_a_library_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setattr(sources.metadata, "version", lambda name: "2.14.4")
    said = "datasets must be 4.0 or later, got 2.14.4; install what pyproject.toml pins"
    assert message(ConfigError, tmp_path) == said
