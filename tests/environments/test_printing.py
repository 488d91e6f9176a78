"""What users' code prints."""

import pytest

from tests.environments.playing import acted, begun, call, ended, failure, open_pool, told
from tests.readers import nobody_reads


def test_what_is_printed_comes_out_once_and_line_by_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Into a file, where a buffer would go along into each process, and be lost with one that is killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open_pool("tests.environments.printing:Printing") as pool:
        begun(pool, 0)
        begun(pool, 1)
        assert failure(acted(pool, call("die"), 0)) == ("died", "was ended by SIGKILL")
    assert capfd.readouterr().out == "imported begun\nbegun\ndying\n"  # a thread copied it until the pool was closed


@pytest.mark.full
@pytest.mark.parametrize("name", ["Printing", "PrintingAsync"])
def test_what_is_printed_when_nobody_reads_changes_nothing(name: str):
    with nobody_reads(), open_pool(f"tests.environments.printing:{name}") as pool:
        begun(pool)
        assert told(acted(pool, call("say", text="é"))) == "said"
        assert ended(pool).reward == 1.0
