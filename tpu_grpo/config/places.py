"""Where a run computes: meshes and processes."""

from typing import Literal

from pydantic import Field

from tpu_grpo.config.section import PositiveInt, Section


class TrainerMeshSection(Section):
    """Shape of the trainer's mesh."""

    fsdp: PositiveInt | None = None
    """Devices that parameters and batch rows are split over; all that tp leaves when unset."""
    tp: PositiveInt = 1
    """Devices that heads and hidden units are split over."""


class SamplerMeshSection(Section):
    """How the sampler's devices are cut into replicas, each an engine of its own."""

    tensor: PositiveInt | None = None
    """Devices of one replica, over which the model's heads and hidden units are split; when unset, the fewest that
    hold at most 4 GiB of weights each."""
    shard_vocab: bool | None = None
    """Split the embedding and the output head over those devices by vocabulary. true: refuse a number of devices that
    does not divide the vocabulary; false: a copy on every device; unset: split where it divides. Same tokens."""


class MeshesSection(Section):
    """How devices are used."""

    layout: Literal["shared", "split"] = "shared"
    """shared: trainer and sampler both use all devices, in turn; split: of every host's devices the first half is the
    trainer's and the second the sampler's."""
    sync_temporary_mib: PositiveInt = 512
    """Memory in MiB that moving the weights may need per device, beside the weights themselves."""
    probe_every: int = Field(default=50, ge=0)
    """Compare engines and trainer, by a few tokens and leaf by leaf, after the first sync and every this many; 0 is
    never."""
    probe_bound: float | None = Field(default=None, gt=0.0)
    """Mean difference of log-probabilities that stops the run; 1e-3 in float32 and 0.2 in bfloat16 when unset."""
    trainer: TrainerMeshSection = TrainerMeshSection()
    sampler: SamplerMeshSection = SamplerMeshSection()


class HostsSection(Section):
    """Processes of the run."""

    coordinator: str | None = None
    """host:port of process 0, for several processes off a TPU slice."""
    count: PositiveInt = 1
    """Number of processes."""
    index: int = Field(default=0, ge=0)
    """Which of them this is."""
    check: Literal["rollout", "step"] = "rollout"
    """How often processes that share a replica compare its scheduling and tokens: after every rollout, or before every
    step of the engine, which names the first step that differs."""
    start_timeout_seconds: float = Field(default=300.0, gt=0.0)
    """How long to wait for the other processes at start-up."""
    lost_timeout_seconds: float = Field(default=40.0, ge=2.0)
    """A process that gives no sign of life for this long is lost, and ends the others; a slow one does give signs."""
