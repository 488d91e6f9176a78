"""What TensorBoard finds in the event files: read here record by record, with checksums of this file's own."""

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from tpu_grpo.observe.metrics.sinks import SampleRow
from tpu_grpo.observe.metrics.tensorboard_sink import TensorBoardSink

ROW = SampleRow("1+1?", "a|b <i>\n*two*", {"exact": 1.0, "format": None}, 1.0, -0.5, tokens=3, finish_reason="length")


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
    sink.samples(10, [ROW])
    sink.samples(20, [])
    sink.close()
    [[_, _, shown]] = list(events(tmp_path))
    [value] = shown.summary.value
    assert (shown.step, value.metadata.plugin_data.plugin_name) == (10, "text")
    heads, _, row = value.tensor.string_val[0].decode().splitlines()
    assert heads == "| prompt | completion | exact | format | reward | advantage | tokens | ended by |"
    assert row == "| 1+1? | a&#124;b &#60;i&#62;&#92;n&#42;two&#42; | 1.00 |  | 1.00 | -0.50 | 3 | length |"


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
