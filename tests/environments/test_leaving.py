"""What is to be done when a process ends is done by the process that it was registered in."""

from pathlib import Path

import pytest

from tests.environments.playing import acted, begun, call, ended, open_pool, told
from tpu_grpo.workers import supervisor


@pytest.mark.full
def test_a_conversation_that_ends_leaves_to_the_server_what_the_import_wants_done_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(supervisor, "_TIDY_SECONDS", 30.0)
    with open_pool("tests.environments.leaving:Leaving") as pool:
        for key in range(2):
            begun(pool, key)
        seen = [eval(told(acted(pool, call("look"), key))) for key in range(2)]
        assert [sorted(there) for there in seen] == [["own", "shared"]] * 2
        ended(pool, 0)
        while len(pool.groups[""].servers[0].workers) == 2:
            pool._pump(0.01)
        assert not Path(seen[0]["own"]).exists()
        assert sorted(eval(told(acted(pool, call("look"), 1)))) == ["own", "shared"]
        ended(pool, 1)
    assert not any(Path(path).exists() for there in seen for path in there.values())
    assert (tmp_path / "notes").read_text().splitlines() == ["conversation", "conversation", "import"]
