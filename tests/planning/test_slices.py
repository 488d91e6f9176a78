"""Slices by name are the devices that libtpu describes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tpu_grpo.hosts import hosts_of
from tpu_grpo.launching.tpus import parse_slice
from tpu_grpo.planning.slices import Target, open_slice, prepare, replica_devices, with_rates
from tpu_grpo.records.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "kind"),
    [
        ("v5e-4", 4, 1, "TPU v5 lite"),
        ("v5e-8", 8, 1, "TPU v5 lite"),
        ("v5litepod-16", 16, 4, "TPU v5 lite"),
        ("v6e-8", 8, 1, "TPU v6 lite"),
        ("v6e-16", 16, 4, "TPU v6 lite"),
        ("v4-8", 4, 1, "TPU v4"),
        ("v4-32", 16, 4, "TPU v4"),
        ("v5p-8", 4, 1, "TPU v5"),
        ("v5p-32", 16, 4, "TPU v5"),
        ("tpu7x-8", 8, 1, "TPU7x"),  # two of a chip
        ("v7x-16", 16, 2, "TPU7x"),
    ],
)
def test_a_slice_has_the_devices_and_hosts_of_its_name(name: str, devices: int, hosts: int, kind: str) -> None:
    target = open_slice(name)
    assert len(target.devices) == target.slice.devices == devices
    assert len(hosts_of(target.devices)) == target.slice.hosts == hosts
    assert {device.device_kind for device in target.devices} == {kind}
    assert target.slice.name == name.replace("litepod", "e").replace("tpu", "v")


@pytest.mark.parametrize(("tensor", "hosts"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
def test_a_replicas_devices_lie_on_as_many_hosts_as_in_the_slice(tensor: int, hosts: int) -> None:
    devices = replica_devices(open_slice("v5e-16"), tensor)
    assert len(set(devices)) == tensor
    assert len(hosts_of(devices)) == hosts


@pytest.mark.parametrize(("tensor", "chips", "hosts"), [(1, 1, 1), (2, 1, 1), (8, 4, 1), (16, 8, 2)])
def test_a_replica_on_v7x_takes_both_devices_of_a_chip(tensor: int, chips: int, hosts: int) -> None:
    devices = replica_devices(open_slice("v7x-32"), tensor)
    assert len(set(devices)) == tensor
    assert (len({tuple(device.coords) for device in devices}), len(hosts_of(devices))) == (chips, hosts)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e", r"--slice must be one of v4-N, v5p-N, v5e-N, v6e-N, v7x-N, got 'v5e'; for example v5e-16"),
        ("v5e-12", r"--slice v5e-N must count chips, N one of \[1, 4, 8, 16, 32, 64, 128, 256\], got v5e-12"),
        ("v5p-24", "--slice must be of a known topology, v5p-8, v5p-16, .*, v5p-1024, got v5p-24; choose the next"),
    ],
)
def test_what_is_no_slice_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_slice(name)


def test_the_environment_is_that_of_the_launch() -> None:
    environment = {"JAX_PLATFORMS": "tpu"}
    prepare("v6e-8", environment)
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] == "0"  # a program is the same whatever lines made it
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in environment["LIBTPU_INIT_ARGS"].split()


def test_measured_rates_take_the_place_of_assumed_ones(tmp_path: Path) -> None:
    path, target = tmp_path / "check.json", Target(parse_slice("v5e-8"), ())
    path.write_text(json.dumps({"generation": "v5e", "rates": {"products": 0.3, "flops_per_second": 1e14}}))
    found = with_rates(target, path)
    assert found.slice.generation.rates == replace(target.slice.generation.rates, products=0.3)
    assert replace(found.slice, generation=target.slice.generation) == target.slice
    with pytest.raises(ConfigError, match=r"--rates must be a check\.json of v6e, got one of v5e"):
        with_rates(Target(parse_slice("v6e-8"), ()), path)
    path.write_text("{}")
    with pytest.raises(DataError, match="must hold rates"):
        with_rates(target, path)
    for wrong in ("fast", 0.0, None):
        path.write_text(json.dumps({"generation": "v5e", "rates": {"memory": wrong}}))
        with pytest.raises(DataError, match=f"must hold rates above 0, got memory {wrong!r}; run tpu-grpo check again"):
            with_rates(target, path)
