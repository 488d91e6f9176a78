import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.observe.metrics.optional_sink import OptionalSink
from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.observe.metrics.wandb_sink import WandbSink, has_credentials

ROW = SampleRow("1+1?", "two", {"exact": 1.0, "format": None}, 1.0, -0.5, tokens=3, finish_reason="stop")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def open_sink(run_dir: Path, mode: Any, said: list[str], **options: Any) -> OptionalSink:
    """The sink as a run opens it."""
    config = {"run": {"seed": 1}}
    return OptionalSink(
        "wandb",
        "Do without.",
        lambda: WandbSink(run_dir, "a-run", "a-project", mode, config, said.append, **options),
        said.append,
    )


def recorded(run_dir: Path, last: bytes) -> bytes:
    """The offline files, once they hold ``last``: wandb's service writes them a moment after finishing."""
    content, deadline = b"", time.monotonic() + 20.0
    while last not in content and time.monotonic() < deadline:
        time.sleep(0.02)
        content = b"".join(path.read_bytes() for path in (run_dir / "wandb").glob("offline-run-*/*.wandb"))
    return content


def test_offline_leaves_everything_under_the_run_and_says_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    sink = open_sink(tmp_path, "offline", said)
    sink.write({"step": 1, "rewards/mean": 0.5, "rollout/tokens_digest": "c0ffee", "update/kl": float("nan")})
    sink.samples(1, [ROW])
    sink.close()
    content = recorded(tmp_path, b"samples.table")
    for text in (b"a-project", b"rewards/mean", b"c0ffee", b"samples.table"):
        assert text in content
    assert len(list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples*.json"))) == 1
    assert said == []


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    for _ in range(2):
        open_sink(tmp_path, "offline", []).close()
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    names = {path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert names == {f"run-{run_id}.wandb"}


def test_online_without_a_key_falls_to_offline_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    sink = open_sink(tmp_path, "online", said)
    sink.write({"step": 1, "rewards/mean": 0.25})
    sink.close()
    assert len(said) == 1
    assert "WANDB_API_KEY" in said[0]
    assert "wandb sync" in said[0]
    assert b"rewards/mean" in recorded(tmp_path, b"rewards/mean")


def test_a_server_that_does_not_answer_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    said: list[str] = []
    sink = open_sink(tmp_path, "online", said, timeout_seconds=2.0)
    sink.write({"step": 1})
    sink.samples(1, [ROW])
    sink.close()
    assert len(said) == 1
    assert "wandb failed while starting (CommError" in said[0]


class FailingRun:
    """Stands for a run whose service dies at the first log."""

    url = "https://example.org/run"
    logged = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.logged += 1
        raise ConnectionResetError("Connection lost") if self.logged == 1 else AssertionError("logged after failing")


def test_an_online_run_gives_its_address_and_tells_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FailingRun()
    fake = types.SimpleNamespace(Settings=dict, init=lambda **_: run, Table=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    said: list[str] = []
    sink = open_sink(tmp_path, "online", said)
    sink.write({"step": 1})
    sink.write({"step": 2})
    sink.samples(2, [ROW])
    sink.close()
    assert said[0] == "wandb: https://example.org/run"
    assert "while logging (ConnectionResetError: Connection lost)" in said[1]
    assert len(said) == 2


def test_credentials_from_the_environment_and_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_credentials()
    (tmp_path / "netrc").write_text("machine elsewhere.org login u password p\n")
    (tmp_path / "netrc").chmod(0o600)
    assert not has_credentials()
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password k\n")
    assert has_credentials()
    (tmp_path / "netrc").write_text("machine")
    assert not has_credentials()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_credentials()
