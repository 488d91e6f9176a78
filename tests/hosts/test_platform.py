"""Which backend is chosen, on machines whose /dev is a temporary directory."""

import os
from pathlib import Path

import pytest

from tpu_grpo.hosts import choose_platform
from tpu_grpo.hosts.platform import choose_threads


def device_tree(root: Path, *files: str) -> Path:
    for name in ("null", "tty0", "dri/card0", *files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def chosen(devices: Path, **environment: str) -> dict[str, str]:
    choose_platform(environment, devices)
    return environment


@pytest.mark.parametrize("files", [(), ("vfio/vfio",), ("vfio/devices/vfio0",)])
def test_without_a_tpu_jax_gets_the_cpu(tmp_path: Path, files: tuple[str, ...]) -> None:
    # /dev/vfio/vfio is there on every machine with the module; a numbered file is a device group
    assert chosen(device_tree(tmp_path, *files), PATH="/bin") == {"PATH": "/bin", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("files", [("accel0",), ("accel0", "accel3"), ("vfio/vfio", "vfio/0"), ("vfio/12",)])
def test_with_a_tpu_jax_chooses_itself(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert chosen(device_tree(tmp_path, *files), PATH="/bin") == {"PATH": "/bin"}


def test_a_machine_without_dev_has_no_tpu(tmp_path: Path) -> None:
    assert chosen(tmp_path / "none") == {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("platforms", ["cpu", "tpu", "cuda,cpu"])
@pytest.mark.parametrize("files", [(), ("accel0",)])
def test_a_choice_made_by_the_user_is_kept(tmp_path: Path, platforms: str, files: tuple[str, ...]) -> None:
    assert chosen(device_tree(tmp_path, *files), JAX_PLATFORMS=platforms) == {"JAX_PLATFORMS": platforms}


def test_an_empty_value_is_no_choice(tmp_path: Path) -> None:
    assert chosen(device_tree(tmp_path), JAX_PLATFORMS="") == {"JAX_PLATFORMS": "cpu"}
    assert chosen(device_tree(tmp_path, "accel0"), JAX_PLATFORMS="") == {"JAX_PLATFORMS": ""}


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
