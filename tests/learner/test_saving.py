"""Checkpoints that one host cannot write: all hosts end within seconds, name it and why, and keep the one before."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.processes import REPOSITORY, Ended, run

SAVES = """
import resource
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu_grpo.learner.checkpoints import SavingManager

sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
manager = SavingManager({directory!r}, options=ocp.CheckpointManagerOptions(max_to_keep=1))

def save(step):
    whole = np.random.default_rng(step).normal(size=(2, 128, 512)).astype(np.float32)
    array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    manager.save(step, args=ocp.args.StandardSave({{"w": array}}))

def limit(name, value):
    if name == "RLIMIT_NOFILE":
        value += len(os.listdir("/proc/self/fd"))
    resource.setrlimit(getattr(resource, name), (value, value))
"""
TWO_HOSTS = (
    SAVES
    + """
with Watch(hosts, timeout_seconds=40, every=5) as watch:
    for step in (1, 2, 3):
        with watch.stage(f"saving step {{step}}"):
            save(step)
            if step == 1:
                manager.wait_until_finished()
                hosts.barrier("the first is complete")
                if index == {limited}:
                    limit({name!r}, {value})
    manager.close()
"""
)
LARGE = ("RLIMIT_FSIZE", 5000, "File too large; have the limit on the size of files raised (ulimit -f)")
MANY = ("RLIMIT_NOFILE", 3, "Too many open files; have the limit on open files raised (ulimit -n)")
NONE = ("RLIMIT_NOFILE", 1, "Too many open files; have the limit on open files raised (ulimit -n)")
"""With so few files it is the main thread that fails."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("limited", "limit"),
    [
        (1, LARGE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, LARGE), (0, MANY), (0, NONE), (1, NONE))),
    ],
)
def test_a_host_that_cannot_write_ends_all_in_time(tmp_path: Path, limited: int, limit: tuple[str, int, str]) -> None:
    name, value, cause = limit
    directory = tmp_path / "checkpoints"
    body = TWO_HOSTS.format(directory=str(directory), limited=limited, name=name, value=value)
    ended = run(body, 2)  # within 60 s
    message = f"the disk must take step 2 in {directory}, got: {cause}, or name a directory elsewhere"
    assert ended[limited].code == 1, ended
    assert message in last_line(ended[limited])
    other = ended[1 - limited]
    assert other.code == 3, ended
    assert last_line(other).startswith(f"LockstepError: host {limited} failed: DiskError: ")
    assert message in last_line(other)
    assert f"(seen by host {1 - limited}, in stage saving step " in last_line(other)
    assert "Traceback" not in other.errors + ended[limited].errors
    assert [path.name for path in directory.iterdir() if path.name.isdecimal()] == ["1"]


def last_line(end: Ended) -> str:
    return end.errors.strip().splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize("then", ["save(3)", pytest.param("manager.close()", marks=pytest.mark.slow)])
def test_one_host_raises_it_at_its_next_save_or_at_the_end(tmp_path: Path, then: str) -> None:
    directory = tmp_path / "checkpoints"
    code = f"""
import os
from tpu_grpo.records.errors import DiskError
{SAVES.format(directory=str(directory))}
save(1)
manager.wait_until_finished()
limit("RLIMIT_FSIZE", 5000)
save(2)
try:
    {then}
except DiskError as error:
    print(error)
"""
    environment = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"the disk must take step 2 in {directory}, got: File too large; have the limit on the size of files raised "
        "(ulimit -f), or name a directory elsewhere; what was saved stays as it is\n"
    )
    assert [path.name for path in directory.iterdir() if path.name.isdecimal()] == ["1"]
