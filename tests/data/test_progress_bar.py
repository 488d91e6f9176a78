"""A bar is shown on a terminal while much data is read, and by host 0 alone."""

import pytest
from rich.console import Console

from tpu_grpo.data import lazy_records as reading
from tpu_grpo.hosts.ending import here


@pytest.fixture
def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))


def shown(total: int, capsys: pytest.CaptureFixture[str]) -> str:
    with reading.reading("reading d.jsonl", total, "bytes") as advance:
        advance(total)
    return capsys.readouterr().err


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_bar_is_shown_for_much(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(reading.MUCH["bytes"] - 1, capsys) == ""
    assert "reading d.jsonl" in shown(reading.MUCH["bytes"], capsys)
    monkeypatch.setattr(here, "index", 1)
    assert shown(reading.MUCH["bytes"], capsys) == ""


def test_off_a_terminal_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(reading.MUCH["bytes"], capsys).strip() == ""
