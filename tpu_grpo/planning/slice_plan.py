"""Compiles a run's programs for a slice, and compares the memory they need with that of its chips.

plan = make_plan(config, open_slice("v5e-16"), fast=False, say=print)
plan.fits, plan.worst
suggest(plan, say=print)      # changed settings with which the run fits
alternatives(plan, 256, compiled=True, say=print)     # other settings that may make a step faster, fastest first
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tpu_grpo.config import (
    BUILTIN,
    MICRO_BATCHES,
    SHIPPED_CONFIGS,
    AlgorithmSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    TeacherSpec,
    changed_config,
)
from tpu_grpo.learner import parameters
from tpu_grpo.models.checkpoint import Checkpoint, abstract_checkpoint
from tpu_grpo.models.families.gemma2 import FULL, SLIDING, Gemma2Config
from tpu_grpo.planning.compiled_programs import (
    FAST_COMPILE_OPTIONS,
    GRADIENTS,
    SUM,
    TEACHER,
    CompiledProgram,
    compile_all,
    programs_to_lower,
    sync_compiler,
)
from tpu_grpo.planning.slices import Target, replica_devices
from tpu_grpo.planning.stage_memory import ResidentBytes, StageMemory, resident_bytes, stage_memory
from tpu_grpo.planning.step_seconds import StepWork
from tpu_grpo.records.errors import ConfigError, TpuGrpoError
from tpu_grpo.run.abstract import AbstractRun, open_abstract_checkpoint, open_abstract_teachers
from tpu_grpo.run.inputs import check_model
from tpu_grpo.run.meshes import build_meshes, check_trainer
from tpu_grpo.run.parts import open_run_algorithm, with_routing_replay
from tpu_grpo.weights.plan import named_leaves

FEW_LAYERS = (2, 4)
"""The numbers of layers of the two models that a fast plan compiles."""
ANY_GROWTH = (0.0, math.inf)
"""The bounds of what a layer adds to a program's temporary memory, where none are known."""
GATHERED = 0.5
"""The most of its gathered weights by which a layer raises an update's temporary memory. In full plans of Gemma with 1
to 4 billion parameters it was 0 to 0.31."""
PUBLISHED = SHIPPED_CONFIGS / "models"
"""This directory has a folder for each published model, named after the model, with its config.json."""
NO_STOP = (0,)
"""A placeholder for the stop token, because there is no tokenizer; no shape depends on it."""
MOST_TRIED = 8
"""`suggest` tries at most this many changes of settings."""
PARTIAL_EXTRAS = (0.5, 1.0)
"""The values of rollout.partial_extra that `alternatives` tries for a run without rollout.partial_extra."""
SPLIT_SYNC_MIB = 2048
"""What splits among the alternatives get for meshes.sync_temporary_mib: between unlike meshes more has to be moved."""
AHEAD_DEVICES = 32
"""Slices of at least so many devices get algorithm.staleness among the alternatives; smaller ones gain little."""
SPARE = 0.05
"""The share of the chip's memory that a suggested number of cache tokens leaves free."""


@dataclass(frozen=True)
class Plan:
    """What a run needs of a slice."""

    config: RunConfig
    target: Target
    model: str
    """The model's family and number of parameters, in words."""
    meshes: str
    attention: str
    fast: bool
    """Whether models of FEW_LAYERS layers were compiled, and their figures extrapolated."""
    resident: ResidentBytes
    programs: tuple[CompiledProgram, ...]
    sync: tuple[str, ...]
    """A description of the weight sync."""
    memory: tuple[StageMemory, ...]
    work: StepWork
    """All that the seconds of a step depend on; `work.step` estimates these seconds."""

    @property
    def worst(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def excess(self) -> float:
        """Bytes per device that the plan exceeds the chip's memory by; negative if it fits."""
        return self.worst.total - self.target.chip.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage fits and the compiler has accepted all programs."""
        return self.excess <= 0 and all(program.fits for program in self.programs)


def make_plan(config: RunConfig, target: Target, *, fast: bool, say: Callable[[str], None]) -> Plan:
    """Compile the run's programs for a slice; ``say`` gets a line per compilation. Raises ConfigError for settings that
    are wrong whatever the memory."""
    config = config.model_copy(
        update={"model": known_model(config.model), "teachers": _known_teachers(config.teachers)}
    )
    with (
        target.as_jax_devices(),
        open_abstract_checkpoint(config.model) as checkpoint,
        open_abstract_teachers(config.teachers, config.model.dtype) as teachers,
    ):
        check_model(config, checkpoint)
        section = with_routing_replay(config.algorithm, config.model, config.rollout, checkpoint)
        config = config.model_copy(update={"algorithm": section})
        meshes = build_meshes(
            config.meshes, config.model, config.environment, config.row_tokens, checkpoint, target.devices
        )
        check_trainer(section, checkpoint, meshes)
        devices = replica_devices(target, meshes.tensor)
        run = AbstractRun(
            config, checkpoint, meshes, NO_STOP, devices, teachers=teachers, sync_compiler=sync_compiler(say)
        )
        sync_bytes = run.sync.temporary_bytes
        resident = resident_bytes(run)
        programs = _extrapolated_programs(run, say) if fast else compile_all(run, programs_to_lower(run), {}, say)
        if meshes.slices > 1:  # adds few arrays, however many layers there are
            programs += compile_all(run, [(SUM, "update", run.learner.lower_sum_over_slices)], {}, say)
        return Plan(
            config=config,
            target=target,
            model=f"{checkpoint.family.model_type}, {checkpoint.parameter_count:,} parameters",
            meshes=f"trainer {dict(meshes.trainer.shape)}, sampler {meshes.replicas} x tensor {meshes.tensor}",
            attention=f"rollout {run.options.attention} attention, trainer {meshes.attention}",
            fast=fast,
            resident=resident,
            programs=tuple(programs),
            sync=tuple(run.sync.describe()),
            memory=tuple(
                stage_memory(config.meshes, config.rollout, config.updates_per_step, resident, programs, sync_bytes)
            ),
            work=StepWork.of(run, target.slice.generation, resident, programs),
        )


def _known_teachers(teachers: Sequence[TeacherSpec]) -> tuple[TeacherSpec, ...]:
    """Do for the teachers what `known_model` does for the policy."""
    found = list[TeacherSpec]()
    for spec in teachers:
        if (model := spec.as_model()) is not None:
            path = known_model(model, f"path of the teacher {spec.shown}").path
            spec = spec.model_copy(update={"path": path, "label": spec.shown})
        found.append(spec)
    return tuple(found)


def known_model(section: ModelSection, setting: str = "model.path") -> ModelSection:
    """If model.path is not on this machine, replace it with the published model of that name; raises ConfigError, which
    names the ``setting``, if there is none."""
    path = Path(section.path).expanduser()
    if section.path.startswith(BUILTIN) or (path / "config.json").exists():
        return section
    if not (PUBLISHED / path.name / "config.json").exists():
        known = sorted(directory.name for directory in PUBLISHED.iterdir())
        raise ConfigError(
            f"{setting} must be a directory with a config.json, or end in the name of a published model that is known "
            f"({', '.join(known)}), got {section.path}; correct it, or put the model's config.json there"
        )
    return section.model_copy(update={"path": str(PUBLISHED / path.name)})


def packed_algorithm(section: AlgorithmSection, data: DataSection, optimizer: OptimizerSection) -> AlgorithmSection:
    """Convert the section of Tunix's learner to this package's learner, with equal passes, mini-batches and beta."""
    options: Any = open_run_algorithm(section, data, optimizer).objective
    changed: dict[str, Any] = {"name": "grpo", "options": {}, "beta": options.beta}
    changed |= {"iterations": options.num_iterations, "old_policy": section.old_policy.replace("tunix", "rollout")}
    return section.model_copy(update=changed)


# --- fast plans ------------------------------------------------------------------------------------------------------


def _extrapolated_programs(run: AbstractRun, say: Callable[[str], None]) -> list[CompiledProgram]:
    """Compile two models of few layers, and extrapolate their figures linearly in the number of layers."""
    layers, compiled, model = run.checkpoint.config.num_hidden_layers, [], run.config.model
    lora = model.lora.model_copy(update={"layers": None, "path": None})
    model = model.model_copy(update={"train_layers": None, "lora": lora})  # the small models may lack the chosen layers
    for count in FEW_LAYERS:
        with with_layers(run.checkpoint, count) as smaller, ExitStack() as stack:
            teachers = tuple(each and stack.enter_context(with_layers(each, count)) for each in run.teachers)
            config = run.config.model_copy(update={"model": model})
            small = replace(run, config=config, checkpoint=smaller, teachers=teachers)
            compiled.append(compile_all(small, programs_to_lower(small), FAST_COMPILE_OPTIONS, say))
    of_teachers = {
        f"{TEACHER}{spec.shown}": (each or run.checkpoint).config.num_hidden_layers
        for spec, each in zip(run.config.teachers, run.teachers, strict=True)
    }
    bounds = {} if run.config.algorithm.tunix is not None else {GRADIENTS: _growth_of_a_layer(run)}
    return [
        extrapolated(few, more, of_teachers.get(few.name, layers), bounds.get(few.name, ANY_GROWTH))
        for few, more in zip(*compiled, strict=True)
    ]


def _growth_of_a_layer(run: AbstractRun) -> tuple[float, float]:
    """Return the least and the most bytes by which a layer can raise an update's temporary memory on a device.

    At least its input is kept for the backward pass. If nothing else is kept, weights that are gathered from all
    devices ahead of their use are in memory, too. Which schedule the compiler chooses moves what models of few layers
    need by more than a GiB, and a line through two of them would multiply that.
    """
    config, mesh = run.config, run.meshes.trainer
    itemsize = jnp.dtype(config.model.dtype).itemsize
    kept = run.learner.batch.weights.size / mesh.shape["fsdp"] * run.checkpoint.config.hidden_size * itemsize
    leaves = named_leaves(parameters(run.policy)).items()
    weights = sum(math.prod(leaf.shape) for name, leaf in leaves if name.startswith("layers."))
    gathered = weights / run.checkpoint.config.num_hidden_layers / mesh.shape["tp"] * itemsize
    return kept, kept + GATHERED * gathered if config.model.remat == "decoder" else math.inf


@contextmanager
def with_layers(checkpoint: Checkpoint, count: int) -> Iterator[Checkpoint]:
    """Yield an abstract checkpoint of the model with only its first ``count`` layers.

    If these have no layer that attends to everything, and the model has, the last of them becomes one.
    """
    changed: dict[str, Any] = {"num_hidden_layers": count}
    if isinstance(checkpoint.config, Gemma2Config):
        windows = checkpoint.config.has_window[:count]
        if all(windows) and not all(checkpoint.config.has_window):
            windows = (*windows[:-1], False)
        changed["layer_types"] = [SLIDING if window else FULL for window in windows]
    elif types := checkpoint.hf_config.get("layer_types"):
        changed["layer_types"] = types[:count]
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps({**checkpoint.hf_config, **changed})
        (Path(directory) / "config.json").write_text(text)
        yield abstract_checkpoint(Path(directory))


def extrapolated(
    few: CompiledProgram, more: CompiledProgram, layers: int, growth: tuple[float, float] = ANY_GROWTH
) -> CompiledProgram:
    """Extrapolate a program's figures linearly from FEW_LAYERS to ``layers``; no figure may decrease.

    ``growth`` has the least and the most bytes that a layer adds to the temporary memory.
    """
    first, second = FEW_LAYERS
    added = layers - second
    names = ("argument_bytes", "output_bytes", "code_bytes", "flops", "accessed_bytes")
    found = ((name, getattr(few, name), getattr(more, name)) for name in names)
    values = {name: high + added / (second - first) * max(0.0, high - low) for name, low, high in found}
    low, high = few.temporary_bytes, more.temporary_bytes
    of_layer = min(max((high - low) / (second - first), growth[0]), growth[1])
    return replace(
        more,
        **values,
        temporary_bytes=max(low, high) + added * of_layer,
        kernels=more.kernels + round(added / (second - first) * (more.kernels - few.kernels)),
        fits=few.fits and more.fits,
        seconds=few.seconds + more.seconds,
    )


# --- suggestions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suggestion:
    """Overrides, as on the command line, and the plan of the run with them."""

    overrides: tuple[str, ...]
    plan: Plan


def suggest(plan: Plan, say: Callable[[str], None]) -> Suggestion | None:
    """Find changed settings with which the run fits, by planning the run with each change; None if nothing helps.

    A change that does not reduce the memory of the largest stage is undone; all other changes are kept and combined.
    """
    best, chosen, tried = plan, dict[str, str](), set[str]()
    while not best.fits and len(tried) < MOST_TRIED:
        overrides = {f"{name}={json.dumps(value).strip('"')}": name for name, value in _changes(best)}
        if (override := next((each for each in overrides if each not in tried), None)) is None:
            return None
        tried.add(override)
        say(f"trying {override}")
        try:
            config = changed_config(best.config.model_dump(mode="json"), [override])
            changed = make_plan(config, plan.target, fast=plan.fast, say=say)
        except TpuGrpoError as error:  # the changed settings exclude each other
            say(f"  {error}")
            continue
        needed = {memory.stage: memory.total for memory in changed.memory}
        if needed[best.worst.stage] < best.worst.total:
            best, chosen[overrides[override]] = changed, override
    return Suggestion(tuple(chosen.values()), best) if best.fits else None


def _changes(plan: Plan) -> Iterator[tuple[str, object]]:
    """Yield pairs (setting, value) that reduce the memory of the largest stage, ordered by the speed that they cost."""
    stage, narrower = plan.worst.stage, [("meshes.trainer.tp", 1)] if (plan.config.meshes.trainer.tp or 1) > 1 else []
    if stage == "rollout":
        yield from (*_rollout_changes(plan), *narrower)
    elif stage == "sync":
        yield from (*narrower, *_update_changes(plan))
    else:
        yield from (*_update_changes(plan), *narrower)


def _update_changes(plan: Plan) -> Iterator[tuple[str, object]]:
    config = plan.config
    if config.meshes.layout == "shared" and not config.rollout.release_during_update:
        yield "rollout.release_during_update", True
    if config.model.attention == "dot":
        yield "model.attention", "auto"
    if config.model.remat != "decoder":
        yield "model.remat", "decoder"
    prompts = config.mini_batch_prompts
    largest = config.algorithm.micro_batch_prompts or min(prompts, -(-config.data.prompts_per_step // MICRO_BATCHES))
    yield from (("algorithm.micro_batch_prompts", size) for size in range(largest - 1, 0, -1) if prompts % size == 0)


def _rollout_changes(plan: Plan) -> Iterator[tuple[str, object]]:
    config, tokens = plan.config, plan.config.rollout.kv_tokens
    if tokens is not None:  # the number that should fit, rounded down to two digits; then half
        excess = plan.excess + SPARE * plan.target.chip.memory_bytes
        fitting = int(tokens * (1 - excess / plan.resident.cache))
        if 0 < fitting < tokens:
            digit = 10 ** max(0, len(str(fitting)) - 2)
            yield "rollout.kv_tokens", fitting // digit * digit
        yield "rollout.kv_tokens", tokens // 2
    decoding = next(program.name for program in plan.programs if program.name.startswith("decode"))
    if (rows := int(decoding.split()[2])) > 8:
        yield "rollout.max_running_requests", rows // 2
    tensor = config.meshes.sampler.tensor
    sizes = [2, 4, 8, 16, 32] if tensor is None else [tensor * 2]
    yield from (("meshes.sampler.tensor", size) for size in sizes if size <= plan.target.slice.devices)


# --- alternatives ----------------------------------------------------------------------------------------------------


def alternatives(plan: Plan, mean: float, *, compiled: bool, say: Callable[[str], None]) -> list[Suggestion]:
    """Plan the run with other settings that may make a step faster, where completions have this mean length.

    The settings are the CARRIES, which need no compiling, and with ``compiled`` also splits that give the sampler a
    quarter, half and three quarters of the hosts (from AHEAD_DEVICES devices on, also with algorithm.staleness), int8
    weights, and an 8-bit cache; the latter two with more rows. Plans that fit come first, the fastest first.
    """
    found = [Suggestion((), plan)]
    for overrides in _other_layouts(plan) if compiled else ():
        say(f"planning {' '.join(overrides)}")
        try:
            config = changed_config(plan.config.model_dump(mode="json"), list(overrides))
            found.append(Suggestion(overrides, make_plan(config, plan.target, fast=plan.fast, say=say)))
        except TpuGrpoError as error:  # such as meshes for which the model has too few heads
            say(f"  {error}")
    if plan.config.excludes_partial_rollouts is None and not plan.config.rollout.partial_extra:
        found += [_carrying(other, carry) for other in tuple(found) for carry in PARTIAL_EXTRAS]
    return sorted(found[1:], key=lambda each: (not each.plan.fits, each.plan.work.step(mean).seconds))


def _other_layouts(plan: Plan) -> Iterator[tuple[str, ...]]:
    config, hosts = plan.config, plan.target.slice.hosts
    if config.meshes.layout == "shared":
        released = ("rollout.release_during_update=false",) * config.rollout.release_during_update
        small = config.meshes.sync_temporary_mib < SPLIT_SYNC_MIB
        room = (f"meshes.sync_temporary_mib={SPLIT_SYNC_MIB}",) * small
        for count in sorted({hosts // 4, hosts // 2, 3 * hosts // 4} - {0}):
            split = "meshes.layout=split", f"meshes.sampler.hosts={count}", *released, *room
            yield split
            if config.excludes_staleness is None and plan.target.slice.devices >= AHEAD_DEVICES:
                yield (*split, "algorithm.staleness=1")
    slots, wanted = plan.work.rungs[-1], max(rows for host in plan.work.hosts for rows in host)
    if config.rollout.weights_dtype == "auto" and plan.work.engine.experts == 1:
        yield ("rollout.weights_dtype=int8", *_corrected(config.algorithm), *_more_rows(plan, slots, wanted))
    if wanted > slots and config.rollout.kv_dtype == "auto" and config.rollout.batch_paddings is None:
        tokens = config.rollout.kv_tokens
        more = () if tokens is None else (f"rollout.kv_tokens={2 * tokens}",)
        yield ("rollout.kv_dtype=fp8", f"rollout.max_running_requests={min(2 * slots, wanted)}", *more)


def _corrected(algorithm: AlgorithmSection) -> tuple[str, ...]:
    """Return the override without which a config that names its old policy would not correct for int8 weights."""
    return ("algorithm.old_policy=trainer",) * (algorithm.old_policy == "rollout")


def _more_rows(plan: Plan, slots: int, wanted: int) -> tuple[str, ...]:
    """Return overrides that give the memory that int8 weights free, half of the engine's weights, to waiting rows."""
    rollout, resident = plan.config.rollout, plan.resident
    rows = min(wanted, slots + int(resident.sampler / 2 / (resident.cache / slots)))
    if rows == slots or rollout.batch_paddings is not None:
        return ()
    tokens = () if rollout.kv_tokens is None else (f"rollout.kv_tokens={rollout.kv_tokens * rows // slots}",)
    return (f"rollout.max_running_requests={rows}", *tokens)


def _carrying(suggestion: Suggestion, carry: float) -> Suggestion:
    """Add rollout.partial_extra, with which the programs and the memory of devices stay the same."""
    work = suggestion.plan.work.carrying(carry)
    plan = replace(suggestion.plan, config=work.config, work=work)
    return Suggestion((*suggestion.overrides, f"rollout.partial_extra={carry:g}"), plan)
