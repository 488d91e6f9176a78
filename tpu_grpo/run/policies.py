"""Loads the weights with which a run starts, or those of a checkpoint that the user names."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tpu_grpo.algorithms import RunAlgorithm
from tpu_grpo.config import ExportSection, ModelSection
from tpu_grpo.learner import LearnerInputs, cast_to_compute, freeze_untrained, read_policy, read_stepped
from tpu_grpo.learner.parameters import Values
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.tunix_model import abstract_model, check_finite, is_abstract, load_model
from tpu_grpo.observe.run_files import BEST_FILE, CHECKPOINTS_DIR, saved_steps
from tpu_grpo.records.errors import CheckpointError, ConfigError
from tpu_grpo.records.json_files import read_json
from tpu_grpo.run.meshes import Meshes

INITIAL, LATEST, BEST = "initial", "latest", "best"


@dataclass(frozen=True)
class Chosen:
    """The chosen weights: a step in a directory of checkpoints, or the model that a run starts from."""

    directory: Path
    step: int | None
    """The step of a checkpoint; None for the model that the run starts from."""

    @property
    def name(self) -> str:
        """The name of these weights in files and messages."""
        return INITIAL if self.step is None else f"checkpoint_{self.step}"


def choose(run_dir: Path, which: str) -> Chosen:
    """Find the weights that ``which`` names: initial, latest, best, a step of the run, or the directory of a step.

    Raises:
        ConfigError: if ``which`` is none of these.
        CheckpointError: for best or latest, if the run has none. Whether a step has a checkpoint is checked later, by
            `load_policy`.
    """
    directory = run_dir / CHECKPOINTS_DIR
    if which == INITIAL:
        return Chosen(directory, None)
    if which == BEST:
        path = run_dir / BEST_FILE
        if not path.exists():
            raise CheckpointError(
                f"a best checkpoint needs {path}, which a run writes when it evaluates; it is missing"
            )
        return Chosen(directory, read_json(path, step=int)["step"] or None)  # step 0 is the initial model
    if which == LATEST:
        if not (steps := saved_steps(directory)):
            raise CheckpointError(f"there must be a checkpoint in {directory}, found none; check run.dir")
        return Chosen(directory, steps[-1])
    if which.isdigit():
        return Chosen(directory, int(which))
    path = Path(which).expanduser()
    if not path.name.isdigit() or not path.is_dir():
        raise ConfigError(
            f"--checkpoint must be {INITIAL}, {LATEST}, {BEST}, a step, or a directory .../checkpoints/STEP, got "
            f"{which!r}"
        )
    return Chosen(path.parent, int(path.name))


def load_policy(
    section: ModelSection, seed: int, checkpoint: Checkpoint, mesh: Mesh, chosen: Chosen, host: int = 0
) -> nnx.Module:
    """Load a policy, in the dtype in which the run computes, onto a trainer's mesh; every host reads its own part.

    If a checkpoint holds the whole model, the original tensors are not loaded first. On a host without devices of the
    mesh, the policy is abstract.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, or of another model.
    """
    dtype = jnp.dtype(section.dtype)
    if chosen.step is None or section.lora.rank is not None:
        base = load_model(checkpoint, mesh, dtype=dtype, remat="none")
        model = with_adapters(base, checkpoint, section, seed)
    else:
        model = abstract_model(checkpoint, mesh, dtype=dtype, remat="none")
    freeze_untrained(model, section)
    cast_to_compute(model, section)
    if chosen.step is not None and mesh.local_devices:
        read_policy(chosen.directory, chosen.step, model, host)
    return model


def exported_values(
    export: ExportSection, section: ModelSection, model: nnx.Module, chosen: Chosen, host: int = 0
) -> Values:
    """Read the trained parameters in float32, by name, for a float32 export of a run that computes in bfloat16.

    ``model`` is the policy of ``chosen``. The result is empty for any other export, which needs only ``model``, and on
    a host where the policy is abstract, because that host exports nothing.

    Raises:
        CheckpointError: as in `load_policy`.
    """
    if chosen.step is None or export.dtype != "float32" or section.dtype == "float32":
        return {}
    if is_abstract(nnx.state(model)):
        return {}
    residual = section.param_dtype == "bfloat16"
    return read_stepped(chosen.directory, chosen.step, model, residual=residual, host=host)


def load_inputs(
    section: ModelSection,
    seed: int,
    checkpoint: Checkpoint,
    meshes: Meshes,
    algorithm: RunAlgorithm | None = None,
) -> LearnerInputs:
    """Load the policy, and the reference if there is one, onto the trainer's devices; other hosts get abstract ones.
    ``algorithm`` is the run's, if it is open already."""
    base = load_model(
        checkpoint,
        meshes.trainer,
        dtype=jnp.dtype(section.dtype),
        remat=section.remat,
        flash_block=meshes.flash_block,
        param_dtype=jnp.dtype(section.dtype if section.lora.rank else section.param_dtype),
    )
    check_finite(base, checkpoint.directory)
    model = with_adapters(base, checkpoint, section, seed)
    return LearnerInputs(model, base, meshes.trainer, meshes.joined, algorithm)


def with_adapters(base: nnx.Module, checkpoint: Checkpoint, section: ModelSection, seed: int) -> nnx.Module:
    """Return the model that is trained: the base itself, or a model with adapters around the same arrays."""
    lora = section.lora
    if lora.rank is None:
        return base
    from tpu_grpo.models.lora import adapted_modules, apply_lora, cast_adapters, load_adapters  # only needed here

    model = apply_lora(base, adapted_modules(checkpoint, lora), lora, seed=seed)
    cast_adapters(model, section.param_dtype)
    if lora.path is not None and not is_abstract(nnx.state(base)):
        load_adapters(model, lora, checkpoint)
    return model
