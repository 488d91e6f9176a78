"""The memory of each stage of a step, to be held against the memory of a chip.

    rollout     parameters, optimizer, reference, sampler weights, cache, and the work of decode or prefill
    logprobs    the same without what ``rollout.release_during_update`` frees, and the work of a forward pass
    update      as logprobs, with the work of a micro-batch, accumulated gradients among it, or of the optimizer's step,
                which makes new parameters beside those old ones that the sampler shares
    sync        everything, and the work of the most demanding group

With meshes.layout=split a stage has the trainer's devices or the sampler's, and the sync has the fuller of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_grpo.config import RunConfig
from tpu_grpo.planning.programs import OPTIMIZER_STEP, CompiledProgram, Stage
from tpu_grpo.planning.resident import ResidentBytes

COLUMNS = ("parameters", "optimizer", "reference", "sampler", "cache", "work", "code")
"""What a stage's memory is for; work is gradients, activations, results, inputs and other temporaries."""


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
    """Return the stages of a step, in order, each with its most demanding program."""
    stages: dict[Stage, StageMemory] = {}
    for program in programs:
        memory = _with_program(config, resident, program)
        if program.stage not in stages or memory.total > stages[program.stage].total:
            stages[program.stage] = memory
    in_sync = _resident_parts(config, resident, "sync")
    stages["sync"] = StageMemory("sync", "largest group", in_sync | {"work": sync_bytes})
    code = sum(program.code_bytes for program in programs)
    return [StageMemory(memory.stage, memory.program, {**memory.parts, "code": code}) for memory in stages.values()]


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


def _with_program(config: RunConfig, resident: ResidentBytes, program: CompiledProgram) -> StageMemory:
    parts = _resident_parts(config, resident, program.stage)
    arguments = {
        "rollout": resident.sampler + resident.shared + resident.cache,
        "logprobs": resident.parameters,
        "update": resident.parameters,
    }[program.stage]
    if program.name == OPTIMIZER_STEP:
        arguments = resident.trained + resident.optimizer
    if program.fits:
        inputs = max(0.0, program.argument_bytes - arguments)
        work = inputs + program.output_bytes + program.temporary_bytes
    else:
        work = max(0.0, program.temporary_bytes - arguments)  # the compiler's figure is of the whole program
    if program.stage != "rollout":
        work += resident.batch
    if program.stage == "update" and not config.rollout.release_during_update and config.updates_per_step > 1:
        work += resident.shared  # from the second on, the sampler's are neither the old parameters nor the new
    return StageMemory(program.stage, program.name, parts | {"work": work})
