"""Files as people have them: packed, several, on the network; each gives the records of the plain file."""

import bz2
import functools
import gzip
import http.server
import json
import lzma
import resource
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from pyarrow import parquet

from tests.goldens import cases, compare
from tpu_grpo.config import parse_config
from tpu_grpo.data.sources import Source, glance, read_records
from tpu_grpo.records.errors import ConfigError, DataError, DiskError, disk_errors_explained
from tpu_grpo.records.untrusted_input import LONGEST
from tpu_grpo.run.fingerprints import fingerprints

ROWS = [
    {"question": "1+1=", "answer": "2"},
    {"question": 'a\tb,"c"\n', "answer": "007"},
    {"question": "é", "answer": ""},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def packed(content: bytes) -> bytes:
    """Pack without the time of day: the content is a part of a test's name, which all workers must call the same."""
    return gzip.compress(content, mtime=0)


def read(*paths: object) -> list[dict[str, Any]]:
    given = tuple(map(str, paths))
    source = Source(given[0] if len(given) == 1 else given)
    records = list(read_records(source))
    assert glance(source) in (records[0], None)
    return [dict(record) for record in records]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl.gz", packed(LINES)),
        ("d.jsonl.bz2", bz2.compress(LINES)),
        ("d.ndjson.xz", lzma.compress(LINES)),
        ("d.json", json.dumps(ROWS, indent=2).encode()),
        ("d.json.gz", packed(json.dumps(ROWS).encode())),
        ("lines.json", LINES),
        ("d.tsv", b'question\tanswer\n1+1=\t2\n"a\tb,""c""\n"\t007\n\xc3\xa9\t\n'),
        ("d.csv.gz", packed(b'question,answer\n1+1=,2\n"a\tb,""c""\n",007\n\xc3\xa9,\n')),
    ],
)
def test_every_format_gives_the_same_records(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == ROWS


def test_a_packed_table_keeps_its_types(tmp_path: Path) -> None:
    rows = [{"q": "a", "n": 1, "l": [{"role": "user"}]}, {"q": "b", "n": None, "l": []}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress((tmp_path / "d.parquet").read_bytes()))
    assert read(tmp_path / "d.parquet.gz") == rows


BROKEN = Path(__file__).with_name("broken_files.txt")


@pytest.mark.parametrize(("file", "told"), cases(BROKEN))
def test_what_does_not_fit_is_named(tmp_path: Path, file: str, told: str) -> None:
    name, _, content = file.partition("=")
    path = tmp_path / name
    path.write_bytes(content.replace("↵", "\n").encode())
    with pytest.raises(DataError) as caught:
        read_records(Source(str(path)))
    compare(BROKEN, file, told, str(caught.value).replace(str(tmp_path), "HERE"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (packed(LINES)[:-9], "EOFError"),
        (b"plain", r"BadGzipFile: Not a gzipped file \(b'pl'\); copy or pack it again"),
    ],
)
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} must be readable, got {said}"):
        read_records(Source(str(path)))


def test_patterns_and_lists_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[1:2]), ("a", ROWS[:1]), ("c", ROWS[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path / "*.jsonl") == ROWS  # sorted by name
    assert read(tmp_path / "c.jsonl", tmp_path / "[ab].jsonl") == [ROWS[2], ROWS[0], ROWS[1]]
    records = read_records(Source(str(tmp_path / "*.jsonl")))
    assert [records[n] for n in (2, 0, -2)] == [ROWS[2], ROWS[0], ROWS[1]]
    with pytest.raises(DataError, match=r"data.path: no file fits the pattern .*\*.csv"):
        read(tmp_path / "*.csv")
    (tmp_path / "d.jsonl").write_text('{"q": 1}\n')
    with pytest.raises(DataError, match="the first record of .*d.jsonl must have the keys of .*a.jsonl"):
        read(tmp_path / "*.jsonl")


def test_a_limit_on_open_files_is_not_an_error_of_a_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(list(Path("/proc/self/fd").iterdir())) + 20
    for index in range(30):
        (tmp_path / f"{index:02}.jsonl").write_bytes(LINES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        message = r"Too many open files; have the limit on open files raised \(ulimit -n\)"
        with pytest.raises(DiskError, match=message), disk_errors_explained():
            read(tmp_path / "*.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hosts_compare_every_file_of_a_pattern_and_a_list(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)
    config = parse_config(
        {"data": {"path": f"{tmp_path}/*.jsonl"}, "evaluation": {"path": [f"{tmp_path}/a.jsonl", "x"]}}
    )
    found = [name for name in fingerprints(config) if name.startswith("data file")]
    assert found == [
        f"data file {tmp_path}/a.jsonl of data.path",
        f"data file {tmp_path}/b.jsonl of data.path",
        "data file of evaluation.path.0",
        "data file of evaluation.path.1",
    ]


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.csv.gz"])
def test_a_packed_file_without_the_end_of_a_line_is_unpacked_up_to_a_limit(tmp_path: Path, name: str) -> None:
    content = packed(bytes(LONGEST + 2**22))[:-100]  # whoever unpacks it all gets EOFError
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}:1 must have less than {LONGEST} characters in a line, got more; div"):
        read_records(Source(str(tmp_path / name)))


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server, on this machine, of the test's directory."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl?download=true"])
def test_addresses_are_read_once(tmp_path: Path, server: str, name: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    (tmp_path / "d.jsonl.gz").write_bytes(packed(LINES))
    records = read_records(Source(f"{server}/{name}"))
    for path in tmp_path.iterdir():
        path.unlink()
    assert list(records) == ROWS
    with pytest.raises(DataError, match=r"data.path: data file not found: http://127.0.0.1:\d+/d.jsonl"):
        read(f"{server}/d.jsonl")


def test_a_password_in_an_address_comes_from_the_environment_and_is_not_shown(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES)
    address = server.replace("http://", "http://me:$MY_PASSWORD@")
    with pytest.raises(
        ConfigError, match=r"^data\.path: http://me:\$MY_PASSWORD@127.* needs the variable MY_PASSWORD; set"
    ):
        read(f"{address}/d.jsonl")
    monkeypatch.setenv("MY_PASSWORD", "w0rd")
    assert read(f"{address}/d.jsonl") == ROWS
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for nowhere in (f"http://me:$MY_PASSWORD@127.0.0.1:{port}/$MY_PASSWORD/d.jsonl", f"{address}/none.jsonl"):
        with pytest.raises(DataError) as raised:
            read(nowhere)
        assert "w0rd" not in str(raised.value)
        assert "$MY_PASSWORD" in str(raised.value)


def test_a_bucket_is_read_with_its_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bucket(MemoryFileSystem):
        protocol = "gs"
        store: dict[str, Any] = {}  # noqa: RUF012  # as the library has it
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("gs://").strip("/")

    monkeypatch.setitem(_registry, "gs", Bucket)
    bucket = Bucket()
    bucket.pipe({"/bucket/b.jsonl": LINES[LINES.index(b"\n") + 1 :], "/bucket/a.jsonl": LINES.splitlines(True)[0]})
    assert read("gs://bucket/*.jsonl") == ROWS
    assert read("gs://bucket/a.jsonl") == ROWS[:1]
    monkeypatch.setenv("MY_BUCKET", "bucket")
    assert read("gs://$MY_BUCKET/*.jsonl") == ROWS
    bucket.pipe("/bucket/c.jsonl", b"{")
    with pytest.raises(DataError, match=r"^gs:///?\$\{MY_BUCKET\}/c\.jsonl:1 must be a JSON object"):
        read("gs://$MY_BUCKET/*.jsonl")
    monkeypatch.delenv("MY_BUCKET")
    with pytest.raises(ConfigError, match=r"gs://\$MY_BUCKET/\*\.jsonl needs the variable MY_BUCKET; set it"):
        read("gs://$MY_BUCKET/*.jsonl")


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="the package is there")
def test_an_address_without_its_package_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="gs://bucket/d.jsonl needs the package gcsfs, .*: uv sync --extra gcs$"):
        read("gs://bucket/d.jsonl")
    with pytest.raises(
        DataError, match="data.path: nosuch://bucket/d.jsonl must be readable, got ValueError: Protocol"
    ):
        read("nosuch://bucket/d.jsonl")
