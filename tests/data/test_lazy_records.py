"""Large files are not kept in memory: a record is read when it is asked for, and prompts come as they always did."""

import json
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import DataSection
from tpu_grpo.data import lazy_records
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.data.sources import Source, read_records
from tpu_grpo.data.stream import open_prompts, prompts_digest
from tpu_grpo.hosts.ending import this_process
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Prompt

ROWS = [
    {"question": f"{n}+{n}={'?' * (n % 7)}", "n": n, "é": "\u2028"} for n in range(1203)
]  # more than is read at once


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    return path


def test_records_are_found_again_in_any_order(path: Path) -> None:
    records = read_records(Source(str(path)))
    assert len(records) == 1203
    assert [records[index] for index in (1202, 0, 600, -1)] == [ROWS[1202], ROWS[0], ROWS[600], ROWS[1202]]
    assert list(records) == ROWS
    assert records[1000:1003] == ROWS[1000:1003]
    with pytest.raises(IndexError):
        records[1203]


def test_opening_takes_no_memory_for_the_records(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps({"question": "x" * 1000, "n": n}) + "\n" for n in range(5000)))
    tracemalloc.start()
    records = read_records(Source(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(records) == 5000
    assert peak < 1_000_000  # the file has five million bytes


def test_a_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    records = read_records(Source(str(path)))
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="d.jsonl was changed while it is read"):
        records[0]


def by_hand(tokenizer: PreTrainedTokenizerFast, rows: list[dict], most: int) -> list[Prompt]:
    """The prompts that fit, each rendered alone and kept."""
    texts = [f"<s>user:{row['question']}</s><s>assistant:" for row in rows]
    prompts = [
        Prompt(
            text,
            tuple(tokenizer.encode(text, add_special_tokens=False)),
            row,
            [{"role": "user", "content": row["question"]}],
        )
        for text, row in zip(texts, rows, strict=True)
    ]
    return [prompt for prompt in prompts if len(prompt.token_ids) <= most]


@pytest.mark.parametrize("most", [512, 28])
def test_prompts_and_their_order_are_those_of_data_in_memory(
    tokenizer: PreTrainedTokenizerFast, path: Path, most: int
) -> None:
    data = DataSection(path=str(path), max_prompt_tokens=most, too_long="drop", prompts_per_step=5)
    stream = open_prompts(data, 3, tokenizer)
    expected = by_hand(tokenizer, ROWS, most)
    assert list(stream.parts[0].rendered.prompts) == expected
    assert (stream.size, stream.dropped) == (len(expected), len(ROWS) - len(expected))
    batch = stream.batch(2)
    assert batch.prompts == tuple(expected[record] for record in batch.records)
    import grain

    order = grain.MapDataset.source(range(len(expected))).seed(3).shuffle().repeat()
    assert list(batch.records) == [order[position] for position in range(5, 10)]
    assert prompts_digest(stream.parts[0].rendered.prompts) == prompts_digest(expected)


def test_no_token_is_made_of_prompts_that_surely_fit(
    tokenizer: PreTrainedTokenizerFast, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    encoded = PromptRenderer.encoded

    def count(self: PromptRenderer, texts: list[str], where: list[str]) -> list[list[int]]:
        made.append(len(texts))
        return encoded(self, texts, where)

    monkeypatch.setattr(PromptRenderer, "encoded", count)
    open_prompts(DataSection(path=str(path)), 0, tokenizer)
    assert made == []
    longest = max(len(f"<s>user:{row['question']}</s><s>assistant:") for row in ROWS)
    open_prompts(DataSection(path=str(path), max_prompt_tokens=longest), 0, tokenizer)  # bytes do not tell for all
    assert 0 < sum(made) < len(ROWS)


def test_a_prompt_that_is_surely_too_long_is_not_tokenized(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in ("a", "b" * 10_000_000, "c")))
    monkeypatch.setattr(PromptRenderer, "encoded", lambda *_: pytest.fail("it was tokenized"))
    data = DataSection(path=str(path), too_long="drop")
    assert open_prompts(data, 0, tokenizer).dropped == 1
    least = 10_000_029 // len("<pad>")  # the longest token; the chat template adds 29 characters
    with pytest.raises(DataError, match=f"tokens, got at least {least} in record 1 .* to at least {least} or set"):
        open_prompts(DataSection(path=str(path)), 0, tokenizer)


def test_the_pad_token_is_found_in_a_prompt_of_any_length(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in ("a", "b<pad>", "c")))
    with pytest.raises(DataError, match="must not hold the pad token, got '<pad>' .id 256. in the prompt of record 1"):
        open_prompts(DataSection(path=str(path)), 0, tokenizer)
    tokenizer.pad_token = tokenizer.eos_token  # which ends the user's turn; lengths say what is padding
    assert open_prompts(DataSection(path=str(path)), 0, tokenizer).size == 3


def test_the_digest_tells_other_texts_columns_and_tokenizers(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    def digest(**settings: object) -> str:
        return open_prompts(DataSection.model_validate({"path": str(path)} | settings), 0, tokenizer).digest

    first = digest()
    assert digest() == first
    assert digest(prompt_template="{question} ") != first
    assert digest(columns={"m": "n"}) != first
    tokenizer.add_tokens(["+"])
    assert digest() != first


@pytest.fixture
def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))


def shown(total: int, capsys: pytest.CaptureFixture[str]) -> str:
    with lazy_records.reading("reading d.jsonl", total, "bytes") as advance:
        advance(total)
    return capsys.readouterr().err


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_bar_is_shown_for_much(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(lazy_records.MUCH["bytes"] - 1, capsys) == ""
    assert "reading d.jsonl" in shown(lazy_records.MUCH["bytes"], capsys)
    monkeypatch.setattr(this_process, "index", 1)
    assert shown(lazy_records.MUCH["bytes"], capsys) == ""


def test_off_a_terminal_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(lazy_records.MUCH["bytes"], capsys).strip() == ""
