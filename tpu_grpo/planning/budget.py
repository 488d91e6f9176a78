"""Each stage of a step against the memory of a chip.

    rollout     parameters, optimizer, reference, sampler weights, cache, and what decode or prefill need
    logprobs    the same without what ``rollout.release_during_update`` frees, and what a forward pass needs
    update      likewise; a step's results are new parameters beside the old, which the sampler may share
    sync        everything, and what the most demanding group needs

With meshes.layout=split a stage has the trainer's devices or the sampler's, and the sync the fuller of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_grpo.config import RunConfig
from tpu_grpo.planning.programs import Compiled, Stage
from tpu_grpo.planning.sizes import Sizes

COLUMNS = ("parameters", "optimizer", "reference", "sampler", "cache", "work", "code")
"""What a stage's memory is for; work is gradients, activations, results, inputs and other temporaries."""


@dataclass(frozen=True)
class Need:
    """Of one stage, in bytes per device."""

    stage: Stage
    program: str
    """The most demanding."""
    parts: Mapping[str, float]
    """By the names of COLUMNS."""

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


def needs(config: RunConfig, held: Sizes, programs: Sequence[Compiled], sync_bytes: float) -> list[Need]:
    """The stages of a step, in order; of each its most demanding program."""
    stages: dict[Stage, Need] = {}
    for program in programs:
        need = _of_program(config, held, program)
        if program.stage not in stages or need.total > stages[program.stage].total:
            stages[program.stage] = need
    stages["sync"] = Need("sync", "largest group", _resident(config, held, "sync") | {"work": sync_bytes})
    code = sum(program.code_bytes for program in programs)
    return [Need(need.stage, need.program, {**need.parts, "code": code}) for need in stages.values()]


def _resident(config: RunConfig, held: Sizes, stage: Stage) -> dict[str, float]:
    """What lies there anyway."""
    trainer: dict[str, float] = {
        "parameters": held.parameters,
        "optimizer": held.optimizer,
        "reference": held.reference,
    }
    sampler: dict[str, float] = {"sampler": held.sampler, "cache": held.cache}
    split, released = config.meshes.layout == "split", config.rollout.release_during_update
    if split and stage == "sync":
        return dict(max(trainer, sampler, key=lambda parts: sum(parts.values())))
    if stage == "rollout":
        return dict(sampler) if split else trainer | sampler
    if split or (released and stage in ("logprobs", "update")):
        return dict(trainer)
    return trainer | (sampler if stage != "sync" or not released else {"sampler": held.sampler})


def _of_program(config: RunConfig, held: Sizes, program: Compiled) -> Need:
    parts = _resident(config, held, program.stage)
    arguments = {
        "rollout": held.sampler + held.shared + held.cache,
        "logprobs": held.parameters,
        "update": held.parameters + held.optimizer,
    }[program.stage]
    if program.fits:
        inputs = max(0.0, program.argument_bytes - arguments)
        work = inputs + program.output_bytes + program.temporary_bytes
    else:
        work = max(0.0, program.temporary_bytes - arguments)  # the compiler's figure is of the whole program
    if program.stage != "rollout":
        work += held.batch
    if program.stage == "update" and not config.rollout.release_during_update and _updates(config) > 1:
        work += held.shared  # from the second on, the sampler's are neither the old parameters nor the new
    return Need(program.stage, program.name, parts | {"work": work})


def _updates(config: RunConfig) -> int:
    """Train steps between two syncs."""
    prompts = config.data.prompts_per_step
    return prompts // (config.algorithm.micro_batch_prompts or prompts) * config.algorithm.iterations
