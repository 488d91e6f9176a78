"""Adds up a plan's memory: the bytes on a device in each stage of a step.

    rollout     parameters, optimizer, reference, sampler weights, cache, and the work of decode or prefill, or of a
                teacher on the sampler's devices
    logprobs    as in rollout, but without what ``rollout.release_during_update`` frees; the work of a forward pass
    update      as in logprobs, but with the work of a micro-batch (accumulated gradients included) or of the
                optimizer's step, which makes new parameters while the sampler still shares the old ones
    sync        all of the arrays except a released cache, and the work of the largest group of the weight sync

With meshes.layout=split, a stage uses either the trainer's or the sampler's devices; the sync counts the
devices that hold more bytes. The bytes that stay on a device between programs follow from the shardings of the run's
arrays (`resident_bytes`). The work of a program is the memory that the compiler reports.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_grpo.config import MeshesSection, RolloutSection, TeacherSpec
from tpu_grpo.hosts.sharded_arrays import bytes_per_device
from tpu_grpo.learner import frozen_leaves, parameters
from tpu_grpo.planning.compiled_programs import OPTIMIZER_STEP, SUM, TEACHER, TRAIN_STEP, CompiledProgram, Stage
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.weights.plan import named_leaves

COLUMNS = ("parameters", "optimizer", "reference", "sampler", "cache", "work", "code")
"""The uses of a stage's memory; work means gradients, activations, results, inputs and other temporaries."""


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes on a device, by what they hold; all but ``gradients`` stay there between programs."""

    parameters: int
    optimizer: int
    """The optimizer's state, and the bits of trained parameters beyond ``model.dtype``."""
    trained: int
    """The trained part of ``parameters``."""
    reference: int
    """The part of reference and teachers that the policy does not share after its first update; with
    algorithm.staleness, also the copy of the previous policy."""
    sampler: int
    """The engines' weights in separate arrays."""
    shared: int
    """The engines' weights that share the trainer's arrays, until an update makes new ones."""
    cache: int
    """The KV cache of an engine."""
    batch: int
    """The waiting micro-batches of a step, while one is processed."""
    gradients: int
    """The sums of gradients, which are float32; there only during an update."""
    teachers: int = 0
    """The teachers on the sampler's devices."""
    offloaded: tuple[str, ...] = ()
    """The programs of teachers that are kept in the hosts' memory, and on the devices only as these programs' work."""


def resident_bytes(run: AbstractRun) -> ResidentBytes:
    """Add up what stays on a device between programs; compiles nothing."""

    def per_device(leaves: Iterable[Any]) -> int:
        return sum(bytes_per_device(leaf) for leaf in leaves)

    config, params = run.config, parameters(run.policy)
    leaves, frozen = named_leaves(params), frozen_leaves(params)
    trained = per_device(leaf for name, leaf in leaves.items() if name not in frozen)
    adapters, own_adapters = config.model.lora.rank is not None, config.algorithm.reference_reset_every is not None
    reference = trained if run.learner.reference is not None and (own_adapters or not adapters) else 0
    teachers = list(_teacher_bytes(run, per_device, trained))
    reference += sum(size for spec, size in teachers if spec.mesh == "trainer")
    moves, waiting = run.moves, config.micro_batches(run.meshes.trainer.shape["fsdp"]) - 1
    if config.algorithm.tunix is not None:
        waiting = 0  # they wait in the host's memory
    return ResidentBytes(
        parameters=per_device(leaves.values()),
        optimizer=per_device(jax.tree.leaves(run.learner.held)),
        trained=trained,
        reference=reference + trained * config.algorithm.staleness,
        sampler=per_device(move.spec for move in moves if not move.aliased),
        shared=per_device(move.spec for move in moves if move.aliased),
        cache=per_device(run.engine.cache_specs),
        batch=waiting * per_device(jax.tree.leaves(run.learner.batch)),
        gradients=trained * 4 // jnp.dtype(config.model.dtype).itemsize,
        teachers=sum(size for spec, size in teachers if spec.mesh == "sampler"),
        offloaded=tuple(f"{TEACHER}{spec.shown}" for spec in config.teachers if spec.offload),
    )


def _teacher_bytes(
    run: AbstractRun, per_device: Callable[[Iterable[Any]], int], trained: int
) -> Iterator[tuple[TeacherSpec, int]]:
    """Yield the bytes that each teacher does not share with the policy, and that are not in the hosts' memory."""
    own = run.config.model.dtype
    for teacher in run.learner.teachers.teachers if run.config.teachers else ():
        spec, leaves = teacher.spec, parameters(teacher.frozen.model)
        if spec.update_rate:
            yield spec, trained * 4 // jnp.dtype(own).itemsize
        elif spec.path is None and not spec.offload and (spec.dtype or own) == own:
            yield spec, trained
        elif not spec.offload:
            yield spec, per_device(named_leaves(leaves).values())


@dataclass(frozen=True)
class StageMemory:
    """The memory of one stage, in bytes per device."""

    stage: Stage
    program: str
    """The stage's program that needs the most memory."""
    parts: Mapping[str, float]
    """Name in COLUMNS -> bytes."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def stage_memory(
    meshes: MeshesSection,
    rollout: RolloutSection,
    updates_per_step: int,
    resident: ResidentBytes,
    programs: Sequence[CompiledProgram],
    sync_bytes: float,
) -> list[StageMemory]:
    """Return the memory of each stage: what it holds, the work of its largest program, and the code of all programs.

    ``sync_bytes`` is the temporary memory of the weight sync.
    """
    split, released = meshes.layout == "split", rollout.release_during_update
    keeps_old = updates_per_step > 1 and not released
    work: list[tuple[Stage, str, float]] = [(p.stage, p.name, _work(resident, p, keeps_old)) for p in programs]
    work.append(("sync", "largest group", sync_bytes))
    code, worst = sum(program.code_bytes for program in programs), dict[Stage, StageMemory]()
    for stage, name, size in work:
        held = _resident_parts(resident, stage, split, released) | {"work": size, "code": code}
        memory = StageMemory(stage, name, held)
        if stage not in worst or memory.total > worst[stage].total:
            worst[stage] = memory
    return list(worst.values())


def _resident_parts(resident: ResidentBytes, stage: Stage, split: bool, released: bool) -> dict[str, float]:
    """Return what a device holds in a stage, besides the work of the stage's programs."""
    trainer: dict[str, float] = {
        "parameters": resident.parameters,
        "optimizer": resident.optimizer,
        "reference": resident.reference,
    }
    sampler: dict[str, float] = {"sampler": resident.sampler, "cache": resident.cache}
    if split:
        sampler["reference"] = resident.teachers
    if split and stage == "sync":
        return dict(max(trainer, sampler, key=lambda parts: sum(parts.values())))
    if stage == "rollout":
        return dict(sampler) if split else trainer | sampler
    if split or (released and stage in ("logprobs", "update")):
        return dict(trainer)
    return trainer | (sampler if stage != "sync" or not released else {"sampler": resident.sampler})


def _work(resident: ResidentBytes, program: CompiledProgram, keeps_old: bool) -> float:
    """Return the bytes that a program needs in addition to its resident arguments."""
    arguments = resident.parameters
    if program.name.startswith(TEACHER):
        arguments = 0 if program.name in resident.offloaded else program.argument_bytes  # see `_teacher_bytes`
    elif program.stage == "rollout":
        arguments = resident.sampler + resident.shared + resident.cache
    elif program.name == OPTIMIZER_STEP:
        arguments = resident.trained + resident.optimizer
    elif program.name == TRAIN_STEP:
        arguments = resident.parameters + resident.optimizer
    elif program.name == SUM:
        arguments = program.argument_bytes - resident.gradients  # all gradients are work
    if program.fits:
        inputs = max(0.0, program.argument_bytes - arguments)
        work = inputs + program.output_bytes + program.temporary_bytes
    else:
        work = max(0.0, program.temporary_bytes - arguments)  # the figure of a refused program includes its arguments
    if program.stage != "rollout":
        work += resident.batch
    if program.stage == "update" and keeps_old:
        work += resident.shared  # from the second update on, the sampler's arrays are extra ones
    return work
