"""Where a plan's memory is added up: for each stage of a step, the bytes on a device, held against those of a chip.

    rollout     parameters, optimizer, reference, sampler weights, cache, and the work of decode or prefill
    logprobs    the same without what ``rollout.release_during_update`` frees, and the work of a forward pass
    update      as logprobs, with the work of a micro-batch, accumulated gradients among it, or of the optimizer's step,
                which makes new parameters beside those old ones that the sampler shares
    sync        everything, and the work of the most demanding group

With meshes.layout=split a stage has the trainer's devices or the sampler's, and the sync has the fuller of both. The
bytes that stay on a device between programs follow from the shardings of the run's own trees (`resident_bytes`); the
work of a program is what the compiler reports of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tpu_grpo.config import RunConfig
from tpu_grpo.learner import frozen_leaves, parameters
from tpu_grpo.planning.compiled_programs import OPTIMIZER_STEP, TRAIN_STEP, CompiledProgram, Stage
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.weights.plan import bytes_per_device, named_leaves

COLUMNS = ("parameters", "optimizer", "reference", "sampler", "cache", "work", "code")
"""What a stage's memory is for; work is gradients, activations, results, inputs and other temporaries."""


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that stay on a device between programs, by what they hold."""

    parameters: int
    optimizer: int
    """The optimizer's state, and what the trained parameters have beyond ``model.dtype``."""
    trained: int
    """The part of ``parameters`` that is trained."""
    reference: int
    """The part of the reference that the policy no longer shares once it has been updated."""
    sampler: int
    """The engines' weights in arrays of their own."""
    shared: int
    """The engines' weights that are the trainer's arrays, until an update makes new ones."""
    cache: int
    """The KV cache of an engine."""
    batch: int
    """The micro-batches of a step that wait while one of them is worked on."""


def resident_bytes(run: AbstractRun) -> ResidentBytes:
    """Add up what stays on a device between programs; only the programs of the weight sync are compiled for it."""

    def per_device(leaves: Iterable[Any]) -> int:
        return sum(bytes_per_device(leaf) for leaf in leaves)

    config, params = run.config, parameters(run.policy)
    leaves, frozen = named_leaves(params), frozen_leaves(params)
    trained = per_device(leaf for name, leaf in leaves.items() if name not in frozen)
    adapters, own_adapters = config.model.lora.rank is not None, config.algorithm.reference_reset_every is not None
    moves, waiting = run.sync.moves, config.micro_batches(run.meshes.trainer.shape["fsdp"]) - 1
    if config.algorithm.tunix is not None:
        waiting = 0  # in the host's memory
    return ResidentBytes(
        parameters=per_device(leaves.values()),
        optimizer=per_device(jax.tree.leaves(run.learner.held)),
        trained=trained,
        reference=trained if run.learner.reference is not None and (own_adapters or not adapters) else 0,
        sampler=per_device(move.spec for move in moves if not move.aliased),
        shared=per_device(move.spec for move in moves if move.aliased),
        cache=per_device(run.engine.cache_specs),
        batch=waiting * per_device(jax.tree.leaves(run.learner.batch)),
    )


@dataclass(frozen=True)
class StageMemory:
    """The memory of one stage, in bytes per device."""

    stage: Stage
    program: str
    """The stage's most demanding program."""
    parts: Mapping[str, float]
    """Bytes by the names of COLUMNS."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def stage_memory(
    config: RunConfig, resident: ResidentBytes, programs: Sequence[CompiledProgram], sync_bytes: float
) -> list[StageMemory]:
    """Return the stages of a step, in the order of the programs, each with its most demanding one and the code of all.

    ``sync_bytes`` is the temporary memory of the weight sync.
    """
    work: list[tuple[Stage, str, float]] = [(p.stage, p.name, _work(config, resident, p)) for p in programs]
    work.append(("sync", "largest group", sync_bytes))
    code, worst = sum(program.code_bytes for program in programs), dict[Stage, StageMemory]()
    for stage, name, size in work:
        held = _resident_parts(config, resident, stage) | {"work": size, "code": code}
        memory = StageMemory(stage, name, held)
        if stage not in worst or memory.total > worst[stage].total:
            worst[stage] = memory
    return list(worst.values())


def _resident_parts(config: RunConfig, resident: ResidentBytes, stage: Stage) -> dict[str, float]:
    """Return what the devices of a stage hold besides its programs' own work."""
    trainer: dict[str, float] = {
        "parameters": resident.parameters,
        "optimizer": resident.optimizer,
        "reference": resident.reference,
    }
    sampler: dict[str, float] = {"sampler": resident.sampler, "cache": resident.cache}
    split, released = config.meshes.layout == "split", config.rollout.release_during_update
    if split and stage == "sync":
        return dict(max(trainer, sampler, key=lambda parts: sum(parts.values())))
    if stage == "rollout":
        return dict(sampler) if split else trainer | sampler
    if split or (released and stage in ("logprobs", "update")):
        return dict(trainer)
    return trainer | (sampler if stage != "sync" or not released else {"sampler": resident.sampler})


def _work(config: RunConfig, resident: ResidentBytes, program: CompiledProgram) -> float:
    """Return the bytes that a program takes beside those of its arguments that are resident."""
    arguments = resident.parameters
    if program.stage == "rollout":
        arguments = resident.sampler + resident.shared + resident.cache
    elif program.name == OPTIMIZER_STEP:
        arguments = resident.trained + resident.optimizer
    elif program.name == TRAIN_STEP:
        arguments = resident.parameters + resident.optimizer
    if program.fits:
        inputs = max(0.0, program.argument_bytes - arguments)
        work = inputs + program.output_bytes + program.temporary_bytes
    else:
        work = max(0.0, program.temporary_bytes - arguments)  # the compiler's figure is of the whole program
    if program.stage != "rollout":
        work += resident.batch
    if program.stage == "update" and not config.rollout.release_during_update and config.updates_per_step > 1:
        work += resident.shared  # from the second on, the sampler's are neither the old parameters nor the new
    return work
