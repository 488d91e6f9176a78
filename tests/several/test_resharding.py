"""The weight sync between meshes that span processes: parameters are equal bit for bit, and so are sampled tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_programs import VARIABLES
from tests.several.runs import REPOSITORY, completed, outcome, settings, write_files
from tests.weights.test_meshes import PAIRS

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(600)]


def test_every_round_trip_is_bit_equal_on_two_processes() -> None:
    """Two processes of two devices: shards lie on both, or the trainer has one process and the sampler the other.

    Of 39 pairs, those with one key-value head, which is never sharded, are left to one process, which has all
    (weights/test_meshes.py). Two are repeated in the right order, or sharded, and four are sharded."""
    script = REPOSITORY / "scripts" / "local_hosts.py"
    command = [sys.executable, str(script), "--hosts", "2", "--devices-per-host", "2"]
    command += ["--command", f"{sys.executable} -m tests.several.resharding_host", "--"]
    environment = {**os.environ, **VARIABLES}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    for host in (0, 1):
        assert f"[{host}] {len(PAIRS) * 2 // 3} pairs of meshes on 2 processes" in done.stdout


@pytest.fixture(scope="module", params=[1, 2])
def few_heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Files of a model with fewer key-value heads than a replica can have devices, and the tokens of one process."""
    directory = write_files(tmp_path_factory.mktemp("heads") / "files", kv_heads=request.param)
    run_dir = tmp_path_factory.mktemp("one") / "run"
    completed(1, 4, directory, settings(run_dir), "run.max_steps=1")
    return directory, outcome(run_dir)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tensor"), [("shared", 2), ("shared", 4), ("split", 1), ("split", 2)])
def test_tokens_do_not_depend_on_meshes_that_repeat_heads(
    few_heads: tuple[Path, list[str]], tmp_path: Path, layout: str, tensor: int
) -> None:
    """In other tests the heads need not be repeated."""
    files, tokens = few_heads
    meshes = {"layout": layout, "sampler": {"tensor": tensor}}
    completed(2, 2, files, settings(tmp_path, meshes=meshes), "run.max_steps=1", "hosts.check=step")
    assert outcome(tmp_path)[0] == tokens
