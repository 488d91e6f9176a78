"""The devices of trainer and sampler, and splits that are refused."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.models.random_checkpoint import write_random
from tpu_grpo.config import parse_config
from tpu_grpo.hosts import slices_of
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.planning.slice_plan import PUBLISHED
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.meshes import Meshes, build_meshes, check_trainer, split_devices


def devices(hosts: int, per_host: int, **more: Any) -> list[Any]:
    """As on a slice, where hosts do not have consecutive numbers of devices."""
    return [SimpleNamespace(process_index=n % hosts, id=n, platform="tpu", **more) for n in range(hosts * per_host)]


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


@pytest.mark.parametrize(("shape", "sampler"), [((1, 2), (1, 2)), ((2, 1), (2, 1)), ((1, 3), (1, 1))])
def test_a_teacher_of_the_sampler_has_all_its_devices(shape: tuple[int, int], sampler: tuple[int, int]) -> None:
    """tp is the trainer's, if that divides their number."""
    count, found = math.prod(shape), jax.devices()
    trainer = Mesh(np.array(found[:count]).reshape(shape), ("fsdp", "tp"))
    mesh = Meshes(trainer, None, tuple(found[count:]), 0, 1, None).of_sampler
    assert (mesh.devices.shape, mesh.axis_names, list(mesh.devices.flat)) == (sampler, ("fsdp", "tp"), found[count:])


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
        build_meshes(
            config.meshes, config.model, config.environment, config.row_tokens, checkpoint, devices(hosts, per_host)
        )


@pytest.mark.parametrize(
    ("kind", "hosts", "asked", "message"),
    [
        ("TPU v5 lite", 8, 4, "v5e slices of more than 16 chips; use meshes.layout=shared, got 16 chips that train"),
        ("TPU v5 lite", 4, 2, None),
        ("TPU v6 lite", 8, 2, "at least half of the hosts, got 24 chips that train and 8 that sample"),
        ("TPU v6 lite", 8, 4, None),
        ("TPU v6 lite", 8, 6, None),
        ("TPU v5", 8, 2, None),
    ],
)
def test_parts_that_the_compiler_refuses_are_refused(kind: str, hosts: int, asked: int, message: str | None) -> None:
    found = devices(hosts, 4, device_kind=kind)
    if message is None:
        assert len(split_devices(asked, found)[1]) == 4 * asked
        return
    with pytest.raises(ConfigError, match=message):
        split_devices(asked, found)


@pytest.mark.parametrize(
    ("model", "found", "settings", "engines"),
    [
        ("random", 1, {}, 2),
        ("random", 2, {}, 2),
        ("random", 4, {"meshes": {"sampler": {"tensor": 2}}}, 2),
        ("random", 1, {"environment": {"name": "mine.py:Game"}}, 1),
        ("Qwen3-0.6B", 1, {}, 1),
    ],
)
def test_a_cpu_alone_has_two_engines_of_a_small_model(
    tmp_path: Path, model: str, found: int, settings: dict[str, Any], engines: int
) -> None:
    checkpoint = abstract_checkpoint(write_random("qwen3", tmp_path) if model == "random" else PUBLISHED / model)
    config, cpus = parse_config(settings), jax.devices()[:found]
    given = config.meshes, config.model, config.environment, config.row_tokens, checkpoint
    meshes = build_meshes(*given, cpus)
    assert (meshes.replicas, [*dict.fromkeys(meshes.sampler_devices)]) == (engines, cpus)
    assert list(meshes.of_sampler.devices.flat) == list(meshes.trainer.devices.flat) == cpus


@pytest.mark.parametrize(("kind", "hosts"), [("TPU v5 lite", 4), ("TPU v5 lite", 8), ("TPU v6 lite", 8)])
def test_experts_on_v5e_need_a_slice_of_at_most_16_chips(kind: str, hosts: int) -> None:
    """As libtpu's compiler refuses a ragged all-to-all over 32, 64 or 256 chips of v5e, and not over 16."""
    found, config = np.array(devices(hosts, 4, device_kind=kind)), parse_config({})
    meshes: Any = SimpleNamespace(trainer=SimpleNamespace(devices=found), sampler_devices=found)
    experts, dense = (abstract_checkpoint(PUBLISHED / name) for name in ("Qwen3-30B-A3B", "Qwen3-0.6B"))
    check_trainer(config.algorithm, dense, meshes)
    if kind == "TPU v5 lite" and hosts == 8:
        with pytest.raises(ConfigError, match="at most 16 chips, .* got qwen3_moe on 32; use a slice of v5p or v6e"):
            check_trainer(config.algorithm, experts, meshes)
    else:
        check_trainer(config.algorithm, experts, meshes)


def test_one_step_off_needs_hosts_of_both_roles() -> None:
    config = parse_config({"meshes": {"layout": "split"}, "algorithm": {"staleness": 1}})

    def meshes(hosts: int) -> Any:
        trainer, sampler = split_devices(None, devices(hosts, 4))
        return SimpleNamespace(trainer=SimpleNamespace(devices=np.array(trainer)), sampler_devices=sampler)

    dense = abstract_checkpoint(PUBLISHED / "Qwen3-0.6B")
    check_trainer(config.algorithm, dense, meshes(2))
    with pytest.raises(ConfigError, match="staleness=1 needs hosts that train and hosts that sample, got one host"):
        check_trainer(config.algorithm, dense, meshes(1))


@pytest.mark.parametrize(
    ("hosts_along", "fitting"),
    [((2, 2, 1), [2]), ((1, 1, 4), [1, 2, 3]), ((2, 4, 1), [2, 4, 6])],
    ids=["v5e-16", "v5p-32", "v5e-32"],
)
def test_on_a_slice_both_parts_are_boxes_of_chips(hosts_along: tuple[int, int, int], fitting: list[int]) -> None:
    """Hosts of 2 x 2 chips; by hand: of four hosts in a square, one row of two, and of four in a row, any number."""
    found = []
    for host, (z, y, x) in enumerate(itertools.product(*(range(n) for n in reversed(hosts_along)))):
        for chip in range(4):
            coords = (2 * x + chip % 2, 2 * y + chip // 2, z)
            found.append(SimpleNamespace(process_index=host, id=4 * host + chip, platform="tpu", coords=coords))
    count = math.prod(hosts_along)
    for asked in range(1, count):
        if asked in fitting:
            trainer, sampler = split_devices(asked, found)
            assert (len(trainer), len(sampler)) == (4 * (count - asked), 4 * asked)
        else:
            with pytest.raises(ConfigError, match=f"a box of chips.*got meshes.sampler.hosts={asked} of {count}"):
                split_devices(asked, found)


def sliced(slices: int, hosts: int, per_host: int, platform: str) -> list[Any]:
    """Devices of TPU slices, whose hosts are numbered slice by slice, or of hosts without TPUs."""
    return [
        SimpleNamespace(process_index=host, id=per_host * host + n, platform=platform, slice_index=host // hosts)
        for host in range(slices * hosts)
        for n in range(per_host)
    ]


def alternating(host: int) -> Any:
    """The device of a host, where hosts are not numbered slice by slice."""
    return SimpleNamespace(process_index=host, id=host, platform="tpu", slice_index=host % 2)


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_slices_are_whole_hosts_in_order(platform: str) -> None:
    found = sliced(2, 2, 2, platform)
    assert [ids(each) for each in slices_of(reversed(found), 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("found", "asked", "got"),
    [
        (sliced(2, 2, 2, "tpu"), 1, r"1 for hosts of the slices \[0, 0, 1, 1\]"),
        (sliced(1, 2, 2, "tpu"), 2, r"2 for hosts of the slices \[0, 0\]"),
        (sliced(1, 3, 1, "cpu"), 2, r"2 for hosts of the slices \[0, 0, 1\]"),
        (list(map(alternating, range(4))), 2, r"2 for hosts of the slices \[0, 1, 0, 1\]"),
        (sliced(1, 1, 4, "cpu"), 2, r"2 for hosts of the slices \[0\]"),
    ],
)
def test_another_number_of_slices_is_refused(found: list[Any], asked: int, got: str) -> None:
    with pytest.raises(ConfigError, match=f"meshes.slices must be the number of slices.*, got {got}"):
        slices_of(found, asked)
