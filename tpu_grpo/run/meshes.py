"""The placement of a run: the trainer's mesh, the sampler's devices, and the size of the sampler's replicas.

With meshes.slices, every slice has a trainer and replicas of its own. Two slices of two hosts, with layout "shared":

    slice 0    hosts 0 and 1    trainer mesh fsdp x tp, replicas 0 and 1
    slice 1    hosts 2 and 3    trainer mesh fsdp x tp, replicas 2 and 3
    joined     hosts 0 to 3     slice x fsdp x tp: in it, the gradients of both trainers are added
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_grpo.config import AlgorithmSection, EnvironmentSection, MeshesSection, ModelSection
from tpu_grpo.engine.replicas import make_replicas
from tpu_grpo.hosts import by_host, devices_per_host, hosts_of, own_slice, slices_of
from tpu_grpo.learner.building import SMALL_MODEL_PARAMETERS
from tpu_grpo.models.checkpoint import Checkpoint, check_mesh, check_sampler_mesh, sampler_sizes
from tpu_grpo.models.families.trainer_attention import flash_block
from tpu_grpo.records.errors import ConfigError

SHARE_BYTES = 4 * 2**30
"""By default, a replica has the fewest devices with at most this many bytes of weights on each."""


@dataclass(frozen=True)
class Meshes:
    """The trainer's mesh, and the sampler's devices, which are divided into replicas of equal size."""

    trainer: Mesh
    """The mesh of this process's slice; its axes are fsdp and tp."""
    joined: Mesh | None
    """The trainers' meshes of all slices, along a first axis, slice; None for one slice."""
    sampler_devices: tuple[Any, ...]
    """Of all slices, listed host by host. A CPU that is alone and samples with a small model is listed twice: see
    ``build_meshes``."""
    own: int
    """The number of this process's slice."""
    tensor: int
    """The number of devices of a replica."""
    flash_block: int | None
    """Tokens in a block of the trainer's flash attention; None with dot attention."""

    @property
    def slices(self) -> int:
        """The number of slices."""
        return 1 if self.joined is None else self.joined.shape["slice"]

    @property
    def replicas(self) -> int:
        """The number of the sampler's replicas."""
        return len(self.sampler_devices) // self.tensor

    @property
    def of_sampler(self) -> Mesh:
        """The sampler's devices of this process's slice, as a mesh with the trainer's axes and, if it fits, its tp."""
        devices = np.asarray([*dict.fromkeys(self.sampler_devices)]).reshape(self.slices, -1)[self.own]
        return Mesh(devices.reshape(-1, math.gcd(len(devices), self.trainer.shape["tp"])), ("fsdp", "tp"))

    @property
    def platform(self) -> str:
        """The platform of the sampler's devices: tpu, cpu or gpu."""
        return self.sampler_devices[0].platform

    @property
    def attention(self) -> str:
        """The name of the trainer's attention, for messages."""
        block = self.flash_block
        return "dot attention" if block is None else f"flash attention in blocks of {block} tokens"


def build_meshes(
    section: MeshesSection,
    model: ModelSection,
    environment: EnvironmentSection,
    row_tokens: int,
    checkpoint: Checkpoint,
    devices: Sequence[Any] | None = None,
) -> Meshes:
    """Place trainer and sampler on ``devices``; if None, on the devices of all hosts. ``row_tokens`` is the length of a
    training row.

    With layout "shared" both are colocated on all devices of a slice and use them in turn. With layout "split" the
    sampler has a slice's last ``meshes.sampler.hosts`` hosts and the trainer has the rest, because the TPU compiler
    refuses programs on a part of every host's devices. A single host's devices are halved.

    If a CPU is the only device, the sampler has it twice for a small model without environments: two engines, each with
    half of the rows, compute at the same time. Cores that share the operations of one engine wait for each other.

    Raises:
        ConfigError: if the sizes do not multiply to the number of devices, or do not divide the model's dimensions,
            if a split leaves the trainer or the sampler without devices, if the trainer's devices cannot run its
            attention, or for what `check_turns` refuses.
    """
    slices = slices_of(jax.devices() if devices is None else devices, section.slices)
    own, both = own_slice(slices), section.layout == "shared"
    parts = [(each, each) if both else split_devices(section.sampler.hosts, each) for each in slices]
    trainer_devices, own_sampler = parts[own]
    tp, count = section.trainer.tp, len(trainer_devices)
    fsdp = section.trainer.fsdp or max(1, count // tp)
    if fsdp * tp != count:
        fitting = [(count // t, t) for t in range(1, count + 1) if count % t == 0]
        raise ConfigError(
            f"meshes.trainer.fsdp x tp must be the number of the trainer's devices, {count}, got {fsdp} x {tp}; "
            f"use one of {fitting}"
        )
    tensor = section.sampler.tensor or default_tensor(checkpoint, model.dtype, len(own_sampler))
    make_replicas(own_sampler, tensor)  # raises for sizes that do not fit the hosts
    check_mesh(checkpoint, fsdp, tp)
    check_sampler_mesh(checkpoint, tensor)
    platform = trainer_devices[0].platform
    block = flash_block(model.attention, platform, row_tokens, checkpoint.config.widest_head)
    grids = np.asarray([training for training, _ in parts]).reshape(-1, fsdp, tp)
    joined = Mesh(grids, ("slice", "fsdp", "tp")) if len(slices) > 1 else None
    sampler = tuple(device for _, sampling in parts for device in sampling)
    if (
        platform == "cpu"
        and len(sampler) == 1
        and checkpoint.parameter_count <= SMALL_MODEL_PARAMETERS
        and not environment.is_on
    ):
        sampler *= 2
    meshes = Meshes(Mesh(grids[own], ("fsdp", "tp")), joined, sampler, own, tensor, block)
    check_turns(environment, meshes)
    return meshes


def check_turns(section: EnvironmentSection, meshes: Meshes) -> None:
    """Raise ConfigError if the hosts of a replica may not know at the same step that an environment has answered."""
    replicas = make_replicas(meshes.sampler_devices[: len(meshes.sampler_devices) // meshes.slices], meshes.tensor)
    if section.is_on and not section.tool_steps and len(replicas[0].hosts) > 1:
        raise ConfigError(
            "environment.tool_steps must be at least 1 for a replica over several hosts, got 0; or set "
            "meshes.sampler.tensor to at most a host's devices"
        )


def check_trainer(section: AlgorithmSection, checkpoint: Checkpoint, meshes: Meshes) -> None:
    """Check that the run can be trained on its meshes.

    Raises:
        ConfigError: a host both trains and samples in a run with algorithm.staleness=1, and for what `check_experts`
            refuses.
    """
    trainer, sampler = hosts_of(meshes.trainer.devices.flat), hosts_of(meshes.sampler_devices)
    if section.staleness and set(trainer) & set(sampler):
        raise ConfigError(
            f"algorithm.staleness={section.staleness} needs hosts that train and hosts that sample, got one "
            "host; start more hosts, or leave it out"
        )
    check_experts(checkpoint, meshes)


def check_experts(checkpoint: Checkpoint, meshes: Meshes) -> None:
    """Raise ConfigError if a model with experts is trained on more than 16 chips of v5e.

    libtpu 0.0.42.1 compiles no ragged all-to-all over 32, 64 or 256 chips of v5e, but over slices of v6e up to 256
    chips, of v5p up to 64, and of v4 and v7x up to 16.
    """
    trainer = list(meshes.trainer.devices.flat)
    if checkpoint.has_experts and is_v5e(trainer) and len(trainer) > 16:
        raise ConfigError(
            "models with experts need v5e slices of at most 16 chips, because the TPU compiler cannot send tokens to "
            f"experts over more, got {checkpoint.family.model_type} on {len(trainer)}; use a slice of v5p or v6e"
        )


def split_devices(sampling: int | None, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return (the trainer's devices, the sampler's devices) of a split, each listed host by host.

    The sampler has the last ``sampling`` hosts; if that is None, half of the hosts. A single host's devices are halved.

    Raises:
        ConfigError: if trainer or sampler would have no host, or hosts whose chips form no box; for a single host, if
            its number of devices is odd or ``sampling`` is not None.
    """
    devices, per_host, hosts = by_host(devices), devices_per_host(devices), len(hosts_of(devices))
    if hosts == 1 and (sampling is not None or per_host % 2):
        raise ConfigError(
            f"meshes.layout=split on one host halves its devices, which needs an even number, and no "
            f"meshes.sampler.hosts, got {per_host} and {sampling or 'none'}; use meshes.layout=shared, or start more "
            "hosts"
        )
    last = per_host // 2 if hosts == 1 else (sampling or hosts // 2) * per_host
    if last >= len(devices):
        raise ConfigError(
            f"meshes.sampler.hosts must leave a host to the trainer, at most {hosts - 1} of {hosts}, got {sampling}; "
            "lower it, or start more hosts"
        )
    parts = devices[:-last], devices[-last:]
    if hosts > 1 and not all(map(is_box, parts)):
        raise ConfigError(
            f"trainer and sampler must each have a box of chips, which the TPU compiler demands, got "
            f"meshes.sampler.hosts={last // per_host} of {hosts} hosts; use {hosts // 2}"
        )
    if refusal := compiler_refuses(*parts):
        raise ConfigError(f"{refusal}, got {len(parts[0])} chips that train and {len(parts[1])} that sample")
    return parts


def compiler_refuses(trainer: Sequence[Any], sampler: Sequence[Any]) -> str | None:
    """Return why libtpu 0.0.42.1 compiles no programs for such parts of a slice; None if it does, or there is no TPU.

    Boxes of whole hosts were tried on v4-64, on v5e and v6e from 16 to 256 chips, and on v5p from 32 to 128 cores.
    """
    kind = getattr(trainer[0], "device_kind", "")
    if is_v5e(trainer) and len(trainer) + len(sampler) > 16:
        return "the TPU compiler refuses split meshes on v5e slices of more than 16 chips; use meshes.layout=shared"
    if kind in ("TPU v6 lite", "TPU v6e") and len(trainer) > len(sampler):
        return "on v6e the TPU compiler needs meshes.sampler.hosts to be at least half of the hosts"
    return None


def is_v5e(devices: Sequence[Any]) -> bool:
    """Whether these are chips of v5e."""
    return getattr(devices[0], "device_kind", "") in ("TPU v5 lite", "TPU v5e")


def is_box(devices: Sequence[Any]) -> bool:
    """Whether chips fill a box of their slice; three of four hosts that lie two by two do not. True for other devices
    than TPUs, which have no coordinates."""
    places = {tuple(device.coords) for device in devices if hasattr(device, "coords")}
    sides = [len(set(along)) for along in zip(*places, strict=True)]
    return not places or math.prod(sides) == len(places)


def default_tensor(checkpoint: Checkpoint, dtype: str, devices: int) -> int:
    """Return the smallest number of devices per replica with at most SHARE_BYTES of weights on each device.

    If there is no such number, return the largest that the model allows. The result is the same on all hosts.
    """
    weight_bytes = checkpoint.parameter_count * jnp.dtype(dtype).itemsize
    possible = [size for size in sampler_sizes(checkpoint) if devices % size == 0]
    return next((size for size in possible if weight_bytes / size <= SHARE_BYTES), possible[-1])
