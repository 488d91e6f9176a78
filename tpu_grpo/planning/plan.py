"""A plan: compile what a run would run, for a slice, and hold it against the chip's memory.

plan = make_plan(config, open_slice("v5e-16"), fast=False, say=print)
plan.fits, plan.worst
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.errors import ConfigError
from tpu_grpo.models import Checkpoint
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.planning.budget import Need, needs
from tpu_grpo.planning.estimate import Work, stages
from tpu_grpo.planning.programs import QUICK, Compiled, compile_all
from tpu_grpo.planning.sizes import Sizes, sizes
from tpu_grpo.planning.slices import Target, replica_devices
from tpu_grpo.run.abstract import AbstractRun, checkpoint_without_weights
from tpu_grpo.run.meshes import build_meshes

FEW_LAYERS = (2, 4)
"""What a fast plan compiles."""
PUBLISHED = Path(__file__).resolve().parents[2] / "configs" / "models"
"""The config.json of published models, by name."""
NO_STOP = (0,)
"""A stop token for tokenizers that are not there; it decides no shape."""


@dataclass(frozen=True)
class Plan:
    """What a run needs of a slice."""

    config: RunConfig
    target: Target
    model: str
    """Family and number of parameters."""
    meshes: str
    attention: str
    fast: bool
    """Whether programs were compiled of FEW_LAYERS layers and extrapolated."""
    held: Sizes
    programs: tuple[Compiled, ...]
    sync: tuple[str, ...]
    """The weight sync, described."""
    stages: tuple[Need, ...]
    works: tuple[Work, ...]

    @property
    def worst(self) -> Need:
        """The stage that needs most."""
        return max(self.stages, key=lambda need: need.total)

    @property
    def excess(self) -> float:
        """Bytes per device that are missing; negative when there is room."""
        return self.worst.total - self.target.chip.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage does, and the compiler agreed."""
        return self.excess <= 0 and all(program.fits for program in self.programs)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(work.seconds(self.target.chip) for work in self.works)


def make_plan(config: RunConfig, target: Target, *, fast: bool, say: Callable[[str], None]) -> Plan:
    """Compile the run's programs for a slice; ``say`` is told what is under way.

    Raises:
        ConfigError: for settings that no memory would help.
    """
    config = with_known_model(config)
    with target.pretended(), checkpoint_without_weights(config) as checkpoint:
        outline = _outline(config, checkpoint, target)
        say("compiling the weight sync")
        sync_bytes = outline.sync.temporary_bytes
        held = sizes(outline)
        programs = _few_layers(outline, say) if fast else compile_all(outline, {}, say)
        return Plan(
            config=config,
            target=target,
            model=f"{checkpoint.family.model_type}, {checkpoint.parameter_count:,} parameters",
            meshes=f"trainer {dict(outline.meshes.trainer.shape)}, sampler {outline.meshes.replicas} x tensor "
            f"{outline.meshes.tensor}",
            attention=f"rollout {outline.options.attention} attention, trainer {outline.meshes.attention}",
            fast=fast,
            held=held,
            programs=tuple(programs),
            sync=tuple(outline.sync.describe()),
            stages=tuple(needs(config, held, programs, sync_bytes)),
            works=tuple(stages(outline, held, programs)),
        )


def with_known_model(config: RunConfig) -> RunConfig:
    """The config, with a model.path that is not on this machine replaced by the published model of that name.

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


def _outline(config: RunConfig, checkpoint: Checkpoint, target: Target) -> AbstractRun:
    meshes = build_meshes(config, checkpoint, target.devices)
    return AbstractRun(config, checkpoint, meshes, NO_STOP, replica_devices(target, meshes.tensor))


def _few_layers(outline: AbstractRun, say: Callable[[str], None]) -> list[Compiled]:
    """The programs as they would be, by those of two models of few layers; memory and work grow with each layer."""
    layers, compiled = outline.checkpoint.config.num_hidden_layers, []
    for count in FEW_LAYERS:
        with _of_layers(outline.checkpoint, count) as smaller:
            small = replace(outline, config=_all_trained(outline.config), checkpoint=smaller)
            compiled.append(compile_all(small, QUICK, say))
    return [extrapolated(few, more, layers) for few, more in zip(*compiled, strict=True)]


def _all_trained(config: RunConfig) -> RunConfig:
    """Without a choice of layers, which a model of few layers may lack."""
    lora = config.model.lora.model_copy(update={"layers": None, "path": None})
    return config.model_copy(update={"model": config.model.model_copy(update={"train_layers": None, "lora": lora})})


@contextmanager
def _of_layers(checkpoint: Checkpoint, count: int) -> Iterator[Checkpoint]:
    """The same model with fewer layers."""
    with tempfile.TemporaryDirectory() as directory:
        text = json.dumps({**checkpoint.hf_config, "num_hidden_layers": count})
        (Path(directory) / "config.json").write_text(text)
        yield abstract_checkpoint(Path(directory))


def extrapolated(few: Compiled, more: Compiled, layers: int) -> Compiled:
    """A program of ``layers`` layers, by two of FEW_LAYERS: a line through both, that does not fall."""
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
