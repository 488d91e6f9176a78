"""Compiles a run's programs for a slice, and compares the memory they need with what its chips have.

plan = make_plan(config, open_slice("v5e-16"), fast=False, say=print)
plan.fits, plan.worst
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.models import Checkpoint
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.planning.budget import StageMemory, stage_memory
from tpu_grpo.planning.estimate import StepWork
from tpu_grpo.planning.programs import FAST_COMPILE_OPTIONS, CompiledProgram, compile_all
from tpu_grpo.planning.resident import ResidentBytes, resident_bytes
from tpu_grpo.planning.slices import Target, replica_devices
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.abstract import AbstractRun, open_abstract_checkpoint
from tpu_grpo.run.meshes import build_meshes

FEW_LAYERS = (2, 4)
"""The numbers of layers of the two models that a fast plan compiles."""
PUBLISHED = Path(__file__).resolve().parents[2] / "configs" / "models"
"""The directory with the config.json of published models, by name."""
NO_STOP = (0,)
"""A stop token in place of that of a tokenizer that is not there; it decides no shape."""


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
    """Whether models of FEW_LAYERS layers were compiled and their figures extrapolated."""
    resident: ResidentBytes
    programs: tuple[CompiledProgram, ...]
    sync: tuple[str, ...]
    """The weight sync, in words."""
    memory: tuple[StageMemory, ...]
    work: StepWork
    """What the seconds of a step are estimated from: `work.step`."""

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def excess(self) -> float:
        """Bytes per device that are missing; negative when there is room."""
        return self.worst.total - self.target.chip.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage fits, and the compiler refused no program."""
        return self.excess <= 0 and all(program.fits for program in self.programs)

    @property
    def seconds(self) -> float:
        """The estimated duration of a step whose completions are all as long as they may be."""
        return self.work.step().seconds


def make_plan(config: RunConfig, target: Target, *, fast: bool, say: Callable[[str], None]) -> Plan:
    """Compile the run's programs for a slice; ``say`` is told what is under way.

    Raises:
        ConfigError: for settings that would be wrong with any amount of memory.
    """
    config = with_known_model(config)
    with target.as_jax_devices(), open_abstract_checkpoint(config) as checkpoint:
        meshes = build_meshes(config, checkpoint, target.devices)
        run = AbstractRun(config, checkpoint, meshes, NO_STOP, replica_devices(target, meshes.tensor))
        say("compiling the weight sync")
        sync_bytes = run.sync.temporary_bytes
        resident = resident_bytes(run)
        programs = _extrapolated_programs(run, say) if fast else compile_all(run, {}, say)
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
            memory=tuple(stage_memory(config, resident, programs, sync_bytes)),
            work=StepWork.of(run, target.slice.generation, resident, programs),
        )


def with_known_model(config: RunConfig) -> RunConfig:
    """Replace a model.path that is not on this machine by the published model of that name.

    Raises:
        ConfigError: if there is none.
    """
    path = Path(config.model.path).expanduser()
    if config.model.path.startswith(BUILTIN) or (path / "config.json").exists():
        return config
    if not (PUBLISHED / path.name / "config.json").exists():
        known = sorted(directory.name for directory in PUBLISHED.iterdir())
        raise ConfigError(
            f"model.path must be a directory with a config.json, or end in the name of a published model that is known "
            f"({', '.join(known)}), got {config.model.path}; correct it, or put the model's config.json there"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(PUBLISHED / path.name)})})


def _extrapolated_programs(run: AbstractRun, say: Callable[[str], None]) -> list[CompiledProgram]:
    """Compile two models of few layers and extend their figures, because memory and work grow with each layer."""
    layers, compiled = run.checkpoint.config.num_hidden_layers, []
    for count in FEW_LAYERS:
        with _with_layers(run.checkpoint, count) as smaller:
            small = replace(run, config=_all_layers_trained(run.config), checkpoint=smaller)
            compiled.append(compile_all(small, FAST_COMPILE_OPTIONS, say))
    return [extrapolated(few, more, layers) for few, more in zip(*compiled, strict=True)]


def _all_layers_trained(config: RunConfig) -> RunConfig:
    """Drop a choice of layers, which a model of few layers may lack."""
    lora = config.model.lora.model_copy(update={"layers": None, "path": None})
    return config.model_copy(update={"model": config.model.model_copy(update={"train_layers": None, "lora": lora})})


@contextmanager
def _with_layers(checkpoint: Checkpoint, count: int) -> Iterator[Checkpoint]:
    """Make the same model with its first ``count`` layers, for as long as the context lasts."""
    changed: dict[str, Any] = {"num_hidden_layers": count}
    if types := checkpoint.hf_config.get("layer_types"):
        changed["layer_types"] = types[:count]
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps({**checkpoint.hf_config, **changed})
        (Path(directory) / "config.json").write_text(text)
        yield abstract_checkpoint(Path(directory))


def extrapolated(few: CompiledProgram, more: CompiledProgram, layers: int) -> CompiledProgram:
    """Extend the line through a program's figures at both FEW_LAYERS to ``layers``; a figure never falls."""
    first, second = FEW_LAYERS
    grown = (layers - second) / (second - first)
    names = ("argument_bytes", "output_bytes", "temporary_bytes", "code_bytes", "flops", "accessed_bytes")
    values = {}
    for name in names:
        low, high = getattr(few, name), getattr(more, name)
        values[name] = high + grown * max(0.0, high - low)
    return replace(
        more,
        **values,
        kernels=more.kernels + round(grown * (more.kernels - few.kernels)),
        fits=few.fits and more.fits,
        seconds=few.seconds + more.seconds,
    )
