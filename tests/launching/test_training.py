"""Real training runs on the workers of the stand-in: two processes of two CPU devices that find each other."""

import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

from tests import quick_programs
from tests.launching import gcloud_syntax
from tests.launching.driving import REPOSITORY, eventually
from tests.launching.kubernetes_stand_in import Kubernetes
from tests.launching.stand_in import StandIn
from tests.several.runs import outcome, settings, write_files
from tpu_grpo.cli.launch import main

pytestmark = pytest.mark.several_hosts

STEPS = 2


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a tiny model; its directory is the workers' shared disk."""
    for name, value in quick_programs.VARIABLES.items():
        monkeypatch.setenv(name, value)
    files = write_files(tmp_path, layers=1)
    tree = settings(
        tmp_path / "run",
        run={"max_steps": 4},
        model={"path": str(files / "model")},
        data={"path": str(files / "data.jsonl")},
        rewards=[{"name": f"{files}/rewards.py:ascii_share"}],
        checkpoint={"every": 1},
        hosts={"lost_timeout_seconds": 20, "start_timeout_seconds": 60},
    )
    path = tmp_path / "training.yaml"
    path.write_text(json.dumps(tree))
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_workers_train_to_the_end(
    slices: int,
    stand_in: StandIn,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of one slice, or of a slice each."""
    monkeypatch.setenv("TPU_SLICES", str(slices))
    stand_in.save({**stand_in.load(), "hosts": 2 // slices})
    assert main(["create", "--type", "v5e-16", "--spot"]) == 0
    assert main(["setup", "--code", str(REPOSITORY)]) == 0
    assert main(["run", str(config), "hosts.check=step", f"meshes.slices={slices}", f"run.max_steps={STEPS}"]) == 0
    homes = [stand_in.home(0), stand_in.home(1)] if slices == 1 else [stand_in.home(0, f"grpo-{n}") for n in (0, 1)]
    codes = [home / ".tpu_grpo/job/exit_code" for home in homes]
    eventually(lambda: all(code.exists() for code in codes), seconds=500)  # whatever the load of the machine
    capsys.readouterr()
    assert main(["logs"]) == 0
    out = capsys.readouterr().out
    assert [code.read_text() for code in codes] == ["0\n", "0\n"], out
    assert f"step {STEPS} of {STEPS}" in out
    assert f"[0] done: {STEPS} steps" in out
    digests, _ = outcome(tmp_path / "run")
    assert len(digests) == STEPS
    assert main(["status"]) == 0
    status = capsys.readouterr().out
    assert status.count("exit code 0") == 2
    assert f"look at {tmp_path}/run/report.html" in status
    assert main(["delete"]) == 0
    for command in stand_in.calls():
        gcloud_syntax.check(command)


@pytest.mark.slow
def test_a_preempted_run_goes_on_and_ends_as_one_that_was_not(
    stand_in: StandIn, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["babysit", "--type", "v5e-16", "--spot", "--poll", "0.5", "--run-dir-survives", "--code", str(REPOSITORY)]
    assert main([*words, str(config), f"run.dir={tmp_path}/calm"]) == 0
    assert stand_in.load()["made"] == 1
    metrics = tmp_path / "run" / "metrics.jsonl"

    def take_away() -> None:
        eventually(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, seconds=200)
        stand_in.preempt()

    thread = threading.Thread(target=take_away)
    thread.start()
    assert main([*words, str(config)]) == 0
    thread.join()
    assert stand_in.load()["made"] == 2
    assert "; recreate\n" in capsys.readouterr().err
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")


@pytest.mark.slow
def test_stopping_saves_a_checkpoint_on_all_workers(
    stand_in: StandIn, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["create", "--type", "v5e-16", "--how", "vm"]) == 0
    assert main(["setup", "--how", "vm"]) == 0
    assert main(["run", "--how", "vm", str(config), "run.max_steps=100000", "checkpoint.every=0"]) == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    eventually(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, seconds=200)
    capsys.readouterr()
    assert main(["stop", "--how", "vm", "--grace", "60"]) == 0
    assert capsys.readouterr().out.count("ended, pid") == 2
    for worker in (0, 1):
        job = stand_in.home(worker) / ".tpu_grpo/job"
        assert (job / "exit_code").read_text() == "4\n", (job / "log").read_text()
    assert [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]


def in_pods(cluster: Kubernetes) -> dict[str, list[str]]:
    """What processes here need instead of a slice's devices: who they are, as jax finds it in the pods' variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {}
    cluster.pods()
    for pod in cluster.load()["pods"]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.variables(pod).items():
                patch.setenv(name, value)
            count, index = GkeTpuCluster.get_process_count(), GkeTpuCluster.get_process_id()
        host = pod["metadata"]["name"].rpartition("-r")[0]
        found[host] = [f"hosts.coordinator=127.0.0.1:{port}", f"hosts.count={count}", f"hosts.index={index}"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_goes_on_after_a_pod_was_evicted_and_ends_as_one_that_was_not(
    kubernetes: Kubernetes, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pods of two CPU devices; the one that is left ends with 3, and the JobSet starts both again."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(REPOSITORY)
    for name in ("calm", "run"):
        words = ["run", "--on", "gke", "--type", "v4-16", str(config), f"run.dir={tmp_path}/{name}"]
        assert main(words) == 0
        kubernetes.start(sys.executable, in_pods(kubernetes))
        if name == "run":
            metrics = tmp_path / "run" / "metrics.jsonl"
            eventually(lambda path=metrics: path.exists() and len(path.read_text().splitlines()) >= 2, seconds=500)
            kubernetes.processes["grpo-slice-0-1-r0"].kill()
            codes = {pod: process.wait(100) for pod, process in kubernetes.processes.items()}
            assert codes == {"grpo-slice-0-0-r0": 3, "grpo-slice-0-1-r0": -9}, kubernetes.log("grpo-slice-0-0-r0")
            assert kubernetes.settle() == "restarts"
            kubernetes.start(sys.executable, in_pods(kubernetes), restart=1)
        assert kubernetes.settle() == "completed", kubernetes.log(f"grpo-slice-0-0-r{int(name == 'run')}")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")
