"""Models of the hub: what is needed is said, fetched once from a server on this machine, and found again without it."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.models.hub import TOKEN, open_hub
from tpu_grpo.config import ModelSection
from tpu_grpo.models import fetching
from tpu_grpo.records.errors import CheckpointError

REPOSITORY = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def hub() -> Iterator[tuple[str, set[str]]]:
    """The address of a hub on this machine, and the files that it has given."""
    with open_hub({"owner/model": FILES}) as hub:
        yield hub.address, hub.got


def fetch(name: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return run(f"from tpu_grpo.models.fetching import fetch; print(fetch({name!r}))", home, **more)


def run(program: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.full
def test_a_model_is_fetched_once_and_its_size_is_said_before(hub: tuple[str, set[str]], tmp_path: Path) -> None:
    address, got = hub
    done = fetch("owner/model", tmp_path, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    directory = done.stdout.removesuffix("\n")
    assert f"fetching owner/model: 6 files, 3.0 MB, into {tmp_path}/hub\n" in done.stderr
    assert got == NEEDED
    assert {path.name: path.read_bytes() for path in Path(directory).iterdir()} == {n: FILES[n] for n in NEEDED}
    got.clear()
    again = fetch("owner/model", tmp_path, HF_ENDPOINT=address)
    assert (again.stdout, got) == (f"{directory}\n", set())
    assert "fetching owner/model" not in again.stderr
    for offline in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert fetch("owner/model", tmp_path, **offline).stdout == f"{directory}\n"


@pytest.mark.parametrize(
    "answer", [b"7", b"[]", b'{"siblings": 7}', b'{"siblings": [7]}', b'{"siblings": [{"size": 1}]}']
)
def test_a_hub_that_answers_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes
) -> None:
    with open_hub({}, {"api/models/owner/other": answer}) as hub:
        done = fetch_in_process(monkeypatch, tmp_path, hub.address)
    assert (
        "model.path=hf:owner/other must be a model of the Hugging Face hub that can be fetched from here, got" in done
    )


def test_a_hub_that_does_not_answer_is_not_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(fetching, "HUB_SECONDS", 0.2)
        done = fetch_in_process(monkeypatch, tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "Read timed out. (read timeout=0.2)" in done


def fetch_in_process(monkeypatch: pytest.MonkeyPatch, home: Path, address: str) -> str:
    """Return the refusal of a model that is not in the cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.__init__", partialmethod(HfApi.__init__, endpoint=address))
    fetching.fetch.cache_clear()
    with pytest.raises(CheckpointError) as caught:
        fetching.fetch("owner/other")
    return str(caught.value)


def test_a_process_asks_the_hub_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def model_info(self: HfApi, name: str, **_: Any) -> Any:
        asked.append(name)
        return SimpleNamespace(sha="", siblings=())

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    model = ModelSection(path="hf:owner/asked-once")
    assert [fetching.model_directory(model) for _ in range(2)] == [tmp_path] * 2
    assert asked == ["owner/asked-once"]


@pytest.mark.full
def test_a_model_that_cannot_be_had(hub: tuple[str, set[str]], tmp_path: Path) -> None:
    address, _ = hub
    for name, more in (("owner/other", {"HF_ENDPOINT": address}), ("owner/model", {"HF_HUB_OFFLINE": "1"})):
        done = fetch(name, tmp_path, **more)
        assert f"CheckpointError: model.path=hf:{name} must be a model of the Hugging Face hub" in done.stderr


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetching, "_cache_directory", lambda: tmp_path / "hub")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 2_500_000_000))
    said = r"needs 16.4 GB in .*/hub, and 2.5 GB are free; make room, or set HF_HOME"
    with pytest.raises(CheckpointError, match=said):
        fetching._check_room("Qwen/Qwen3-8B", 16_400_000_000)


# --- pushing ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_model_is_pushed_and_fetched_again(tmp_path: Path) -> None:
    """To a repository that only its owner sees."""
    directory = tmp_path / "export"
    directory.mkdir()
    card = b"---\nlicense: mit\n---\n# A card\n"
    exported = {"config.json": b"{}", "model.safetensors": b"a" * 100_000, "README.md": card}
    for name, content in exported.items():
        (directory / name).write_bytes(content)
    program = "from pathlib import Path; from tpu_grpo.models.fetching import push; "
    program += f"print(push(Path({str(directory)!r})"
    with open_hub({}) as hub:
        done = run(f"{program}, 'me/mine'))", tmp_path, HF_ENDPOINT=hub.address, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{hub.address}/me/mine\n"
        assert hub.models == {"me/mine": exported}
        assert hub.private == {"me/mine"}
        fetched = Path(fetch("me/mine", tmp_path, HF_ENDPOINT=hub.address).stdout.removesuffix("\n"))
        assert (fetched / "model.safetensors").read_bytes() == exported["model.safetensors"]
        for more in ({"HF_TOKEN": "hf_other"}, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN}):
            done = run(f"{program}, 'me/other'))", tmp_path, **{"HF_ENDPOINT": hub.address, **more})
            assert "ConfigError: --push must be OWNER/NAME of the Hugging Face hub, where you may write" in done.stderr
            assert f"`hf upload me/other {directory}` sends it\n" in done.stderr
        assert set(hub.models) == {"me/mine"}
