"""Models of the hub: what is needed is said, fetched once from a server on this machine, and found again without it."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "x"}',
    "tokenizer.json": b'{"model": 1}',
    "tokenizer_config.json": b'{"pad_token": 2}',
    "chat_template.jinja": b"x",
    "model-00001-of-00001.safetensors": b"w" * 3_000_000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "consolidated.safetensors": b"w" * 9_000_000,
    "original/model.safetensors": b"w",
    "pytorch_model.bin": b"w",
    "README.md": b"#",
}
NEEDED = {name for name in FILES if not name.startswith(("consolidated", "original", "pytorch", "README"))}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as fetching a model asks for."""

    got: set[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            self._send(json.dumps({"id": "owner/model", "sha": SHA, "siblings": siblings}).encode(), body=body)
        elif path.startswith(f"/owner/model/resolve/{SHA}/"):
            name = path.removeprefix(f"/owner/model/resolve/{SHA}/")
            if body:
                self.got.add(name)
            self._send(FILES[name], body=body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, set[str]]]:
    """The address of a hub on this machine, and the files that it has given."""
    got: set[str] = set()
    handler = type("Handler", (Hub,), {"got": got})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}", got
        serving.shutdown()


def fetch(name: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    program = f"from tpu_grpo.models.fetching import fetch; print(fetch({name!r}, lambda what: print('said', what)))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_model_is_fetched_once_and_its_size_is_said_before(hub: tuple[str, set[str]], tmp_path: Path) -> None:
    address, got = hub
    done = fetch("owner/model", tmp_path, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    said, directory = done.stdout.splitlines()
    assert said == f"said fetching owner/model: 6 files, 3.0 MB, into {tmp_path}/hub"
    assert got == NEEDED
    assert {path.name: path.read_bytes() for path in Path(directory).iterdir()} == {n: FILES[n] for n in NEEDED}
    got.clear()
    again = fetch("owner/model", tmp_path, HF_ENDPOINT=address)
    assert (again.stdout, got) == (f"{directory}\n", set())
    for offline in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert fetch("owner/model", tmp_path, **offline).stdout == f"{directory}\n"


def test_a_model_that_cannot_be_had(hub: tuple[str, set[str]], tmp_path: Path) -> None:
    address, _ = hub
    for name, more in (("owner/other", {"HF_ENDPOINT": address}), ("owner/model", {"HF_HUB_OFFLINE": "1"})):
        done = fetch(name, tmp_path, **more)
        assert f"CheckpointError: model.path=hf:{name} must be a model of the Hugging Face hub" in done.stderr


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import shutil

    from tpu_grpo.models import fetching
    from tpu_grpo.records.errors import CheckpointError

    monkeypatch.setattr(fetching, "_cache_directory", lambda: tmp_path / "hub")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 2_500_000_000))
    with pytest.raises(
        CheckpointError, match=r"needs 16.4 GB in .*/hub, and 2.5 GB are free; make room, or set HF_HOME"
    ):
        fetching._check_room("Qwen/Qwen3-8B", 16_400_000_000)
