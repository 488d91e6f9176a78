"""Joining a run: the backend, on machines whose /dev is a temporary directory; meeting, with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.hosts.processes import run
from tpu_grpo.hosts import choose_platform, coordination_service, start
from tpu_grpo.hosts.coordination_service import Service
from tpu_grpo.hosts.joining import choose_threads
from tpu_grpo.records.errors import ConfigError


@pytest.mark.full
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_hosts_meet_and_see_all_devices(count: int) -> None:
    ended = run(
        """
        import jax
        print(hosts.index, hosts.count, hosts.is_first, jax.process_count(), len(jax.devices()))
        hosts.barrier("the end")
        """,
        count,
    )
    for index, end in ended.items():
        assert (end.code, end.out) == (0, f"{index} {count} {index == 0} {count} {count}\n"), end


@pytest.mark.full
@pytest.mark.parametrize(("came", "timeout"), [((0, 1), 4), ((1,), 2)])
def test_missing_hosts_are_named_in_time(came: tuple[int, ...], timeout: int) -> None:
    ended = run("print('started')", 3, only=came, timeout=timeout)
    for index, end in ended.items():
        assert (end.code, end.out) == (3, ""), end
        last = end.errors.strip().splitlines()[-1]
        if 0 in came:
            assert last == (
                f"LockstepError: all 3 hosts must start within 4 s; host 2 did not come (this is host {index}); "
                "start the same command on every host, each with its own hosts.index"
            )
        else:
            assert "within 2 s; host 0, the coordinator at 127.0.0.1:" in last
            assert "did not answer host 1" in last
        assert end.at < 25


@pytest.mark.full
def test_a_host_with_another_count_is_refused_and_missed() -> None:
    ended = run("print('started')", 2, counts={1: 3}, timeout=4)
    assert [(end.code, end.out) for end in ended.values()] == [(3, "")] * 2, ended
    rule = "hosts.count must be the same on every host, got 2 on host 0 and 3 on host 1"
    assert f"LockstepError: {rule}" in ended[1].errors
    unprotected, sent_away, late = ended[0].errors.splitlines()
    assert unprotected.startswith("TPU_GRPO_SECRET is not set: whoever reaches 127.0.0.1:")
    assert rule in sent_away
    assert late.startswith("LockstepError: all 2 hosts must start within 4 s; host 1 did not come")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost", 2, 0), "hosts.coordinator must be ADDRESS:PORT of host 0, got 'localhost'"),
        ((":80", 2, 0), "got ':80'"),
        (("a:http", 2, 0), "got 'a:http'"),
        (("a:70000", 2, 0), "got 'a:70000'"),
        (("a:0", 2, 0), "got 'a:0'"),
    ],
)
def test_settings_that_cannot_work(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(*arguments, timeout_seconds=1)


def test_several_hosts_meet_before_jax_has_devices() -> None:
    assert jax.devices()
    with pytest.raises(ConfigError, match="several hosts must meet before jax uses a device"):
        start("127.0.0.1:8476", 2, 0, timeout_seconds=1)


def test_one_process_needs_nothing_and_jax_is_not_imported() -> None:
    code = """
import sys
from tpu_grpo.hosts import Watch, start
hosts = start(None, 1, 0, environment={"JAX_PLATFORMS": "cpu"})
with Watch(hosts) as watch, watch.stage("rollout"):
    hosts.agree_all({"a": "b"})
print(hosts.index, hosts.count, hosts.service, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 1 None False\n"


def test_a_tpu_slice_gives_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

    met = []
    monkeypatch.setattr(GceTpuCluster, "is_env_present", classmethod(lambda _: True))
    monkeypatch.setattr(GceTpuCluster, "get_process_count", classmethod(lambda _: 4))
    monkeypatch.setattr(GceTpuCluster, "get_process_id", classmethod(lambda _: 3))
    monkeypatch.setattr(GceTpuCluster, "get_coordinator_address", classmethod(lambda *_: "10.0.0.1:8476"))
    monkeypatch.setattr(coordination_service, "connect", lambda *arguments: met.append(arguments) or Service(None))
    monkeypatch.setattr("tpu_grpo.hosts.ending.this_process.index", 0)
    hosts = start(None, 1, 0, run="demo", timeout_seconds=7, environment={"JAX_PLATFORMS": ""})
    assert (hosts.index, hosts.count, met) == (3, 4, [("10.0.0.1:8476", 4, 3, 7, "demo")])
    monkeypatch.setattr(GceTpuCluster, "get_process_count", classmethod(lambda _: 1))
    assert start(None, 1, 0, environment={}).service is None


# --- backend and threads --------------------------------------------------------------------------------------------


def device_tree(root: Path, *files: str) -> Path:
    for name in ("null", "tty0", "dri/card0", *files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


NO_TPU = [(), ("vfio/vfio",), ("vfio/devices/vfio0",)]
"""Every machine with the module has /dev/vfio/vfio; a numbered file is a device group."""
TPU = [("accel0",), ("accel0", "accel3"), ("vfio/vfio", "vfio/0"), ("vfio/12",)]


@pytest.mark.parametrize(
    ("files", "before", "after"),
    [
        *((files, None, "cpu") for files in NO_TPU),
        *((files, None, None) for files in TPU),
        ((), "", "cpu"),  # an empty value is no choice
        (("accel0",), "", ""),
        *((files, chosen, chosen) for files in ((), ("accel0",)) for chosen in ("cpu", "tpu", "cuda,cpu")),
    ],
)
def test_without_a_tpu_jax_gets_the_cpu_unless_the_user_has_chosen(
    tmp_path: Path, files: tuple[str, ...], before: str | None, after: str | None
) -> None:
    environment = {"PATH": "/bin"} | ({} if before is None else {"JAX_PLATFORMS": before})
    choose_platform(environment, device_tree(tmp_path, *files))
    assert environment == {"PATH": "/bin"} | ({} if after is None else {"JAX_PLATFORMS": after})


def test_a_machine_without_dev_has_no_tpu(tmp_path: Path) -> None:
    choose_platform(environment := {}, tmp_path / "none")
    assert environment == {"JAX_PLATFORMS": "cpu"}


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")  # restored afterwards
    choose_platform(devices=tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("environment", "count", "threads"),
    [
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=4"}, 1, "4"),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 2, "4"),
        ({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}, 2, "6"),
        ({"JAX_PLATFORMS": "cpu"}, 4, "4"),
        ({"JAX_PLATFORMS": "cpu"}, 1, None),
        ({"JAX_PLATFORMS": "", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4, None),
        ({"JAX_PLATFORMS": "cpu", "NPROC": "9"}, 4, "9"),
    ],
)
def test_threads_are_as_many_as_the_cpu_devices_of_the_run(
    environment: dict[str, str], count: int, threads: str | None
) -> None:
    choose_threads(count, environment)
    assert environment.get("NPROC") == threads


# --- who may write ------------------------------------------------------------------------------------------------

SECRET = "0123456789abcdef"


@pytest.mark.full
@pytest.mark.parametrize(
    ("deed", "named"),
    [
        ("client.key_value_set_bytes('tpu_grpo/exchange/2/0', b'x' * 32 + b'second\\0forged', allow_overwrite=True)",
         "a value without their signature at 'tpu_grpo/exchange/2/0'"),
        ("client.key_value_set_bytes('tpu_grpo/exchange/2/0', "
         "client.blocking_key_value_get_bytes('tpu_grpo/exchange/1/0', 1000), allow_overwrite=True)",
         "a value without their signature at 'tpu_grpo/exchange/2/0'"),
        ("client.key_value_set_bytes('tpu_grpo/watch/beat/7', b'[1, {}]', allow_overwrite=True)",
         "a value without their signature at 'tpu_grpo/watch/beat/7'"),
        ("client.key_value_delete('tpu_grpo/exchange/2/0')", "nothing any more at 'tpu_grpo/exchange/2/0'"),
    ],
    ids=["forged", "moved", "heartbeat", "deleted"],
)  # fmt: skip
def test_what_a_stranger_does_to_the_store_is_named_as_an_attack(
    deed: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 plays the stranger: it uses the client below what signs, as anybody can who reaches the port."""
    monkeypatch.setenv("TPU_GRPO_SECRET", SECRET)
    ended = run(
        f"""
        assert "TPU_GRPO_SECRET" not in os.environ
        assert hosts.gather("first", b"%d" % index) == [b"0", b"1"]
        with Watch(hosts, timeout_seconds=4, every=0.5):
            if index == 1:
                time.sleep(1)  # host 0 is waiting in its second exchange
                client = hosts.service._client
                {deed}
                time.sleep(1)
            hosts.gather("second", b"%d" % index)
        """,
        2,
        timeout=20,
    )
    assert ended[0].code == 3, ended
    assert named in ended[0].errors
    assert SECRET not in ended[0].errors + ended[1].errors


@pytest.mark.full
def test_what_lies_where_a_host_is_to_write_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_GRPO_SECRET", SECRET)
    ended = run(
        """
        if index == 1:
            hosts.service._client.key_value_set_bytes("tpu_grpo/exchange/1/0", b"x")
            hosts.service.put("planted", b"")
        else:
            hosts.service.wait("planted", 10)
        hosts.gather("first", b"")
        """,
        2,
        timeout=20,
    )
    assert ended[0].code == 3, ended
    assert "a value that was there before this host wrote its own at 'tpu_grpo/exchange/1/0'" in ended[0].errors


@pytest.mark.full
def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_GRPO_SECRET", "guessed")
    ended = run("print('started')", 2, timeout=4)
    assert [(end.code, end.out) for end in ended.values()] == [(2, "")] * 2, ended
    assert "TPU_GRPO_SECRET must have at least 16 characters, got 7" in ended[0].errors
