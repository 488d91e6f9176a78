"""A TPU slice that is not on this machine: libtpu describes its devices, and programs are compiled for them.

code = run_in_child()                 # before jax is imported
if code is not None:
    return code                       # in the parent, once the child has ended
prepare("v5e-16")                     # in the child, before jax is imported
target = open_slice("v5e-16")         # 16 devices on 4 hosts
with target.as_jax_devices():         # jax.devices() returns the devices of the slice
    ...
"""

import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tpu_grpo.launching.tpus import Chip, Rates, Slice, parse_slice
from tpu_grpo.observe.json_lines import is_number
from tpu_grpo.records.errors import ConfigError, DataError, PlanningError, say
from tpu_grpo.records.json_files import read_json

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILLED = (
    "a plan must have the memory that compiling takes, 8 to 22 GiB for a whole one, but was killed in what is named "
    "last above, most likely because memory ran out; use --fast, or a machine with more memory"
)
ABORTED = (
    "libtpu must compile the programs of this config, but ended its process by {name} in what is named last above; its "
    "own words say where; change what they point to (mesh, attention, micro-batch, kernel settings), and report it"
)


@dataclass(frozen=True)
class Target:
    """A slice, or several equal ones, and their devices."""

    slice: Slice
    devices: tuple[Any, ...]
    """Those of all slices, the first slice's first."""
    slices: int = 1
    """The number of such slices, joined by the data-center network."""

    @property
    def chip(self) -> Chip:
        """The memory and the speeds of each chip, or of each of its devices if it has two."""
        return self.slice.generation.chip

    @property
    def chips(self) -> int:
        """The number of chips of all slices."""
        return self.slices * self.slice.chips

    @property
    def name(self) -> str:
        """The name of the slice, such as v5e-16; for several slices, such as 2 x v5e-16."""
        return (f"{self.slices} x " if self.slices > 1 else "") + self.slice.name

    @contextmanager
    def as_jax_devices(self) -> Iterator[None]:
        """Make ``jax.devices()`` return these devices.

        Tunix's models decide by the first of ``jax.devices()`` whether to use shardings, and kernels choose their block
        sizes by this device. jax itself does not call that function.
        """
        import jax

        with mock.patch.object(jax, "devices", return_value=list(self.devices)):
            yield


def run_in_child() -> int | None:
    """Fork. In the child, return None immediately; in the parent, wait for the child, and return its exit code.

    A compilation can end its process without a message: libtpu aborts if one of its checks fails, and memory may run
    out. Nor can a compilation be interrupted.

    SIGINT, SIGTERM and SIGHUP end both processes immediately, because a plan has nothing to save.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the parent kills the child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        return None
    asked: list[int] = []

    def kill_child(number: int, _: Any) -> None:
        asked.append(number)
        os.kill(child, signal.SIGKILL)

    previous = {number: signal.signal(number, kill_child) for number in ENDING}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if asked:
        print("interrupted; what was compiled is kept", file=sys.stderr)
    else:
        name = signal.Signals(-code).name
        say(PlanningError(KILLED if name == "SIGKILL" else ABORTED.format(name=name)))
    return PlanningError.exit_code


def prepare(name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that libtpu and jax read when loaded. This changes the whole process, so only commands
    may call it. Raises ConfigError if the slice does not exist."""
    generation = parse_slice(name, flag="--slice").generation
    environment["JAX_PLATFORMS"] = "cpu"  # nothing is computed, even on a TPU machine
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # else kernels hold tracebacks, which change the cache key
    environment.setdefault("LIBTPU_INIT_ARGS", " ".join(generation.libtpu_args))


def open_slice(name: str, slices: int = 1) -> Target:
    """Ask libtpu for the devices of so many equal slices; raises ConfigError if there is no slice of that name."""
    found = parse_slice(name, flag="--slice")
    return Target(found, _devices(found, slices, one_host=found.hosts == 1), slices)


def with_rates(target: Target, path: Path) -> Target:
    """Return the slice with the rates that `tpu-grpo check` measured, from its check.json.

    Raises ConfigError for a check.json of another generation, and DataError for a file that is not a check.json.
    """
    generation = target.slice.generation
    measured = read_json(path, rates=dict)
    if measured.get("generation") != generation.name:
        raise ConfigError(
            f"--rates must be a check.json of {generation.name}, got one of {measured.get('generation')}; check a "
            "slice of that generation"
        )
    rates = {name: value for name, value in measured["rates"].items() if name in Rates.__dataclass_fields__}
    for name, value in rates.items():
        if not is_number(value) or not 0 < value < float("inf"):
            raise DataError(f"{path} must hold rates above 0, got {name} {value!r}; run tpu-grpo check again")
    with_measured = replace(generation, rates=replace(generation.rates, **rates))
    return replace(target, slice=replace(target.slice, generation=with_measured))


def replica_devices(target: Target, tensor: int) -> tuple[Any, ...]:
    """Return devices to compile one replica's programs for: the whole slice, or the first devices of a smaller slice.

    libtpu compiles for a part of a slice only if the part has the lowest device numbers. So a replica that is smaller
    than the slice gets devices of the smallest slice that has enough devices.
    """
    whole = len(target.devices) // target.slices
    if tensor == whole:
        return target.devices[:whole]
    generation = target.slice.generation
    chips = min(chips for chips in generation.topologies if chips * generation.devices_per_chip >= tensor)
    found = _devices(Slice(generation, chips), 1, one_host=tensor <= whole // target.slice.hosts)
    return tuple(sorted(found, key=lambda device: device.id)[:tensor])


def _devices(kind: Slice, slices: int, *, one_host: bool) -> tuple[Any, ...]:
    generation = kind.generation
    name = f"{generation.device_kinds[0]}:{kind.topology('--slice')}"
    os.environ.update(  # libtpu reads these instead of a TPU machine's metadata
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-16",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    from jax.experimental import topologies

    described: dict[str, Any] = {**generation.libtpu_description, **({"num_slices": slices} if slices > 1 else {})}
    if one_host:
        described["chips_per_host_bounds"] = [*generation.topologies[kind.chips], 1][:3]
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **described).devices)
