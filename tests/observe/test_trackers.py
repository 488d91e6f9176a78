"""What wandb and TensorBoard get. Event files are read record by record, with checksums of this file's own."""

import struct
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore[missing-module-attribute]

from tpu_grpo.config.sections import LoggingSection
from tpu_grpo.observe import trackers
from tpu_grpo.observe.run_log import OptionalSink
from tpu_grpo.observe.sample_rows import SampleRow
from tpu_grpo.observe.trackers import TensorBoardSink, WandbSink, has_credentials
from tpu_grpo.records.stages import Histogram

SECTION = LoggingSection(wandb_project="a-project", wandb_entity="a-team", wandb_group="a-group")

# --- Weights & Biases -------------------------------------------------------------------------------------------------

ROW = SampleRow("1+1?", "two", {"exact": 1.0, "format": None}, 1.0, -0.5, tokens=3, finish_reason="stop")
COUNTED = Histogram(
    np.linspace(-1.0, 1.0, 65), np.array([3, *[0] * 62, 1]), total=np.array(-1.5), squares=np.array(3.25)
)
"""Of four elements: three near -1, and one near 1."""


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def open_sink(run_dir: Path, mode: Any, said: list[str]) -> OptionalSink:
    """The sink as a run opens it."""
    config = {"run": {"seed": 1}}
    say = said.append
    return OptionalSink("wandb", "", lambda: WandbSink(run_dir, "a-run", SECTION, mode, config, say), say)


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
    sink.histograms(1, {"gradients/w": COUNTED})
    sink.samples(1, [ROW])
    sink.close()
    content = recorded(tmp_path, b"samples.table")
    for text in (b"a-project", b"a-team", b"a-group", b"rewards/mean", b"c0ffee", b"gradients/w", b"histogram"):
        assert text in content
    assert len(list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples*.json"))) == 1
    assert said == []


@pytest.mark.full
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


@pytest.mark.full
def test_a_server_that_does_not_answer_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    said: list[str] = []
    monkeypatch.setattr(trackers, "SERVER_SECONDS", 2.0)
    sink = open_sink(tmp_path, "online", said)
    sink.write({"step": 1})
    sink.samples(1, [ROW])
    sink.close()
    assert len(said) == 1
    assert "wandb failed while starting (CommError" in said[0]


def test_an_online_run_gives_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = types.SimpleNamespace(url="https://example.org/run", define_metric=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Settings=dict, init=lambda **_: run))
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    said: list[str] = []
    open_sink(tmp_path, "online", said)
    assert said == ["wandb: https://example.org/run"]


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


# --- TensorBoard ------------------------------------------------------------------------------------------------------

CUT_ROW = SampleRow(
    "1+1?", "a|b <i>\n*two*", {"exact": 1.0, "format": None}, 1.0, -0.5, tokens=3, finish_reason="length"
)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit from its reflected polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """The checksum as TFRecord files store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(run_dir: Path) -> Iterator[list[Event]]:
    """The events of each file, in the order of the files."""
    for path in sorted((run_dir / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content, found = path.read_bytes(), []
        while content:
            length, check = struct.unpack("<QI", content[:12])
            data, after = content[12 : 12 + length], content[12 + length : 16 + length]
            assert check == masked(content[:8])
            assert struct.unpack("<I", after) == (masked(data),)
            found.append(Event.FromString(data))
            content = content[16 + length :]
        yield found


def test_the_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_every_number_of_a_step_is_a_scalar_of_its_name(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 0)
    sink.write({"step": 1, "rewards/mean": 0.5, "compile/count": 7, "rollout/tokens_digest": "c0ffee"})
    sink.write({"step": 2, "rewards/mean": float("nan")})
    [[version, start, first, second]] = list(events(tmp_path))  # before close: each step is on disk at once
    sink.close()
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 1)
    assert (first.step, second.step) == (1, 2)
    assert {v.tag: v.simple_value for v in first.summary.value} == {"rewards/mean": 0.5, "compile/count": 7.0}
    [value] = second.summary.value
    assert value.simple_value != value.simple_value


def test_samples_are_a_table_of_which_model_text_cannot_leave_its_cell(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 0)
    sink.samples(10, [CUT_ROW])
    sink.samples(20, [])
    sink.close()
    [[_, _, shown]] = list(events(tmp_path))
    [value] = shown.summary.value
    assert (shown.step, value.metadata.plugin_data.plugin_name) == (10, "text")
    heads, _, row = value.tensor.string_val[0].decode().splitlines()
    assert heads == "| prompt | completion | exact | format | reward | advantage | tokens | ended by |"
    assert row == "| 1+1? | a&#124;b &#60;i&#62;&#92;n&#42;two&#42; | 1.00 |  | 1.00 | -0.50 | 3 | length |"


def test_a_histogram_keeps_its_intervals_and_sums(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 0)
    sink.histograms(5, {"gradients/w": COUNTED})
    sink.close()
    [[_, _, shown]] = list(events(tmp_path))
    [value] = shown.summary.value
    counted = value.histo
    assert (shown.step, value.tag) == (5, "gradients/w")
    assert (counted.min, counted.max, counted.num, counted.sum, counted.sum_squares) == (-1.0, 1.0, 4.0, -1.5, 3.25)
    assert list(counted.bucket) == [3.0, *[0.0] * 62, 1.0]
    assert list(counted.bucket_limit) == [pytest.approx(-1.0 + i / 32) for i in range(1, 65)]


def test_a_part_that_goes_on_says_from_which_step_earlier_events_are_dropped(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path, 0)
    for step in (1, 2, 3):
        first.write({"step": step, "a": 1.0})
    first.close()
    second = TensorBoardSink(tmp_path, 2)
    second.write({"step": 3, "a": 2.0})
    second.close()
    [_, [_, start, third]] = list(events(tmp_path))
    assert (start.session_log.status, start.step) == (SessionLog.START, 3)
    assert (third.step, third.summary.value[0].simple_value) == (3, 2.0)
