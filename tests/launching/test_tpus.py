"""Names of slices, and the environment on their machines."""

import pytest

from tpu_grpo.launching.jobs import chip_environment
from tpu_grpo.launching.tpus import GENERATIONS, parse_slice
from tpu_grpo.records.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "accelerator_type", "runtime", "chips_and_hosts"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base", (4, 1)),
        ("v4-32", "v4-32", "tpu-ubuntu2204-base", (16, 4)),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5", (4, 1)),
        ("v5p-16", "v5p-16", "v2-alpha-tpuv5", (8, 2)),
        ("v5e-1", "v5litepod-1", "v2-alpha-tpuv5-lite", (1, 1)),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite", (8, 1)),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite", (16, 4)),
        ("v5litepod-256", "v5litepod-256", "v2-alpha-tpuv5-lite", (256, 64)),
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e", (8, 1)),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e", (16, 4)),
        ("v7x-8", "tpu7x-8", "v2-alpha-tpu7-ubuntu2404", (4, 1)),
        ("v7x-32", "tpu7x-32", "v2-alpha-tpu7-ubuntu2404", (16, 4)),
    ],
)
def test_a_name_becomes_what_the_api_calls_it(
    name: str, accelerator_type: str, runtime: str, chips_and_hosts: tuple[int, int]
) -> None:
    found = parse_slice(name)
    assert (found.accelerator_type, found.generation.runtime) == (accelerator_type, runtime)
    assert (found.chips, found.hosts) == chips_and_hosts
    assert parse_slice(accelerator_type) == found


@pytest.mark.parametrize(
    "name", ["", "v5e", "v5e-", "v5e-0", "v5e-2", "v6e-512", "v4-4", "v4-12", "v5p-0", "v7x-4", "16-v5e", "V4-8"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--type"):
        parse_slice(name)


def test_the_environment_of_a_chip_can_be_replaced() -> None:
    chips = parse_slice("v6e-16")
    assert chip_environment(chips, "gs://b/c", None)["LIBTPU_INIT_ARGS"].split() == list(chips.generation.libtpu_args)
    assert chip_environment(chips, None, "--a=1")["LIBTPU_INIT_ARGS"] == "--a=1"
    assert "LIBTPU_INIT_ARGS" not in chip_environment(chips, None, "")
    assert "LIBTPU_INIT_ARGS" not in chip_environment(None, None, None)
    assert chip_environment(None, "gs://b/c", None)["JAX_COMPILATION_CACHE_DIR"] == "gs://b/c"


@pytest.mark.parametrize(
    ("name", "devices", "links"),
    [
        ("v6e-4", 1, 0),
        ("v6e-4", 2, 1),
        ("v6e-4", 4, 2),  # 2 x 2: of four links two lead to others
        ("v6e-8", 8, 2),
        ("v5e-16", 16, 2),  # 4 x 4, at a corner
        ("v5e-256", 128, 3),  # 8 x 16
        ("v5e-256", 256, 4),  # 16 x 16
        ("v4-8", 4, 2),
        ("v5p-32", 16, 3),  # 2 x 2 x 4
        ("v4-64", 32, 3),  # 2 x 4 x 4
        ("v4-128", 64, 6),  # a cube
        ("v7x-8", 1, 0),
        ("v7x-8", 2, 12),  # of one chip: six whole links
        ("v7x-8", 4, 1),  # two chips
        ("v7x-8", 8, 2),  # 2 x 2
        ("v7x-32", 32, 3),  # 2 x 2 x 4
    ],
)
def test_links_to_others_of_a_part_of_a_slice(name: str, devices: int, links: int) -> None:
    generation = parse_slice(name).generation
    assert generation.links(devices) == links
    every = generation.chip.link_bytes_per_second
    assert generation.sent_bytes_per_second(devices) == every * links / (4 if generation.torus_dimensions == 2 else 6)


def test_two_devices_share_a_chip_of_v7x() -> None:
    """1,200 GB/s of links a chip, both directions together: 100 GB/s a link and direction; two lead to other chips."""
    found = parse_slice("v7x-8")
    assert (found.chips, found.devices) == (4, 8)
    assert found.generation.sent_bytes_per_second(8) == 2 * 100e9 / 2
    assert found.generation.sent_bytes_per_second(2) == 6 * 100e9
    assert parse_slice("v5p-8").devices == 4


TOPOLOGY = {"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy, sys
mesh = Mesh(numpy.array(get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices), ("x",))
rows = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
gather = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P("x")))
print(len(gather.lower(rows, rows).compile().as_text()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.name)
@pytest.mark.parametrize("more", ["", " --xla_tpu_no_such_flag=true"], ids=["ours", "unknown"])
def test_the_pinned_libtpu_knows_the_default_arguments(generation, more: str) -> None:
    """Its compiler, without a chip, refuses an unknown one."""
    import os
    import subprocess
    import sys

    own = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(generation.libtpu_args) + more,
    }
    words = [sys.executable, "-c", COMPILE, TOPOLOGY[generation.name]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=os.environ | own)
    if more:
        assert done.returncode != 0
        assert "xla_tpu_no_such_flag" in done.stdout + done.stderr
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert int(done.stdout) > 0
