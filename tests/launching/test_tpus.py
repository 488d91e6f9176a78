"""Names of slices, and the environment on their machines."""

from pathlib import Path

import pytest

from tests.goldens import labelled
from tpu_grpo.launching.jobs import chip_environment
from tpu_grpo.launching.tpus import GENERATIONS, parse_slice
from tpu_grpo.records.errors import ConfigError

LABELLED = Path(__file__).with_name("labelled.txt")


@pytest.mark.parametrize(("name", "accelerator_type", "runtime", "chips_and_hosts"), labelled(LABELLED, "slices"))
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


@pytest.mark.parametrize(("name", "devices", "links"), labelled(LABELLED, "links"))
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
