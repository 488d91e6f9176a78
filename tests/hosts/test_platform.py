"""Which backend is chosen, on machines whose /dev is a temporary directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.hosts import choose_platform
from tpu_grpo.hosts.platform import choose_threads, disable_xnnpack


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


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "--xla_cpu_use_xnnpack=false"),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_a=1"}, "--xla_a=1 --xla_cpu_use_xnnpack=false"),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_use_xnnpack=true"}, "--xla_cpu_use_xnnpack=true"),
        ({"JAX_PLATFORMS": ""}, None),
    ],
)
def test_matrix_products_are_xlas_own_on_a_cpu(environment: dict[str, str], flags: str | None) -> None:
    disable_xnnpack(environment)
    assert environment.get("XLA_FLAGS") == flags


WRONG_PRODUCTS = """
import jax, jax.numpy as jnp, numpy as np

def wrong(function, rows):
    program, filled = jax.jit(function), jax.jit(lambda value: jnp.full((192, 576), value, jnp.float32))
    x, count = np.ones((rows, 192), np.float32), 0
    for value in range(1, 41):
        weight = filled(np.float32(value / 1024))
        got = np.asarray(program(x, weight))
        count += not np.allclose(got, function(x, np.full((192, 576), value / 1024, np.float32)), rtol=1e-3)
        weight.delete()  # the next one may lie where this one did
    return count

print(sum(wrong(f, rows) for rows in (64, 256) for f in (lambda x, w: x @ w, lambda x, w: (x @ w) @ w.T)))
"""


def wrong_products(flag: str) -> int:
    """How many of 160 products with a new weight are those of an old one."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    done = subprocess.run(
        [sys.executable, "-c", WRONG_PRODUCTS], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_new_weight_at_an_old_address_is_the_new_one() -> None:
    environment = {"JAX_PLATFORMS": "cpu"}
    disable_xnnpack(environment)
    assert wrong_products(environment["XLA_FLAGS"]) == 0


@pytest.mark.skipif("AuthenticAMD" not in Path("/proc/cpuinfo").read_text(), reason="XLA uses XNNPACK there by itself")
def test_xnnpack_still_takes_it_for_the_old_one() -> None:
    assert wrong_products("") > 0, "XLA no longer does: disable_xnnpack can go"
