"""The devices of trainer and sampler, and splits that are refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from tpu_grpo.config import parse_config
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.meshes import build_meshes, split_devices


def devices(hosts: int, per_host: int) -> list[Any]:
    """As on a slice, where hosts do not have consecutive numbers of devices."""
    return [SimpleNamespace(process_index=n % hosts, id=n, platform="tpu") for n in range(hosts * per_host)]


def ids(found: list[Any]) -> list[int]:
    return [device.id for device in found]


@pytest.mark.parametrize(
    ("hosts", "per_host", "asked", "trainer", "sampler"),
    [
        (1, 4, None, [0, 1], [2, 3]),
        (2, 2, None, [0, 2], [1, 3]),
        (3, 1, None, [0, 1], [2]),
        (4, 2, None, [0, 4, 1, 5], [2, 6, 3, 7]),
        (4, 2, 1, [0, 4, 1, 5, 2, 6], [3, 7]),
        (4, 2, 3, [0, 4], [1, 5, 2, 6, 3, 7]),
    ],
)
def test_the_last_hosts_sample(
    hosts: int, per_host: int, asked: int | None, trainer: list[int], sampler: list[int]
) -> None:
    found = split_devices(asked, devices(hosts, per_host))
    assert tuple(map(ids, found)) == (trainer, sampler)


@pytest.mark.parametrize(
    ("hosts", "per_host", "asked", "message"),
    [
        (4, 4, 4, r"meshes.sampler.hosts must leave a host to the trainer, at most 3 of 4, got 4; lower it"),
        (
            1,
            3,
            None,
            r"which needs an even number, and no meshes.sampler.hosts, got 3 and none; use meshes.layout=shared",
        ),
        (1, 4, 1, r"which needs an even number, and no meshes.sampler.hosts, got 4 and 1; use meshes.layout=shared"),
    ],
)
def test_a_split_that_leaves_a_side_without_hosts_is_refused(
    hosts: int, per_host: int, asked: int | None, message: str
) -> None:
    checkpoint: Any = None  # comes after the devices
    config = parse_config({"meshes": {"layout": "split", "sampler": {"hosts": asked}}})
    with pytest.raises(ConfigError, match=message):
        build_meshes(config, checkpoint, devices(hosts, per_host))
