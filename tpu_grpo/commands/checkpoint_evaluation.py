"""Evaluates one checkpoint of a run, without training, which is what scripts/eval.py does.

    name, step = "best", 40            ->  <run.dir>/checkpoints/40
    answers, rewards, estimates        ->  <run.dir>/evaluations/checkpoint_40.jsonl and .json

With the config of the run, the numbers are those that the run found after that step.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import CheckpointError, ConfigError
from tpu_grpo.evaluation import Evaluation, record_of, write_samples
from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.learner import cast_to_compute, freeze_untrained, parameters, read_policy
from tpu_grpo.metrics.jsonl import write_json
from tpu_grpo.metrics.run_files import BEST_FILE, CHECKPOINTS_DIR, EVALUATIONS_DIR
from tpu_grpo.models import Checkpoint, load_model
from tpu_grpo.rollout.sampler import Sampler
from tpu_grpo.run.meshes import Meshes, build_meshes
from tpu_grpo.run.parts import evaluate_policy, open_engines, open_held_out, open_model, with_adapters

INITIAL, LATEST, BEST = "initial", "latest", "best"


@dataclass(frozen=True)
class Chosen:
    """Says which weights are evaluated: a step of a directory of checkpoints, or the model that a run starts from."""

    directory: Path
    step: int | None
    """The step of a checkpoint; None for the model that the run starts from."""

    @property
    def name(self) -> str:
        """Name the files of the evaluation."""
        return INITIAL if self.step is None else f"checkpoint_{self.step}"


def choose(config: RunConfig, which: str) -> Chosen:
    """Find the checkpoint that ``which`` names: initial, latest, best, a step of the run, or a directory of a step.

    Raises:
        ConfigError: for anything else.
        CheckpointError: for a run that has no such checkpoint.
    """
    directory = config.run_dir / CHECKPOINTS_DIR
    if which == INITIAL:
        return Chosen(directory, None)
    if which == BEST:
        return _best(config, directory)
    if which == LATEST:
        steps = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
        if not steps:
            raise CheckpointError(f"there must be a checkpoint in {directory}, found none; check run.dir")
        return Chosen(directory, max(steps))
    if which.isdigit():
        return Chosen(directory, int(which))
    path = Path(which).expanduser()
    if not path.name.isdigit() or not path.is_dir():
        raise ConfigError(
            f"--checkpoint must be {INITIAL}, {LATEST}, {BEST}, a step, or a directory .../checkpoints/STEP, got "
            f"{which!r}"
        )
    return Chosen(path.parent, int(path.name))


def _best(config: RunConfig, directory: Path) -> Chosen:
    path = config.run_dir / BEST_FILE
    if not path.exists():
        raise CheckpointError(f"a best checkpoint needs {path}, which a run writes when it evaluates; it is missing")
    step = json.loads(path.read_text())["step"]
    return Chosen(directory, step or None)


def evaluate_checkpoint(config: RunConfig, which: str, hosts: Hosts, watch: Watch) -> tuple[Chosen, Evaluation]:
    """Evaluate a checkpoint, and keep samples and numbers in the run's directory; every host calls it, host 0 writes.

    Raises:
        TpuGrpoError: for anything wrong with the config, the checkpoint, the data or a reward.
    """
    chosen = choose(config, which)
    hosts.agree("the checkpoint that is evaluated", chosen.name)
    checkpoint, tokenizer = open_model(config, hosts)
    held_out = open_held_out(config, tokenizer, hosts)
    if held_out is None:
        raise ConfigError("an evaluation needs held-out data, got none; set evaluation.path")
    with closing(held_out.rewards):
        meshes = build_meshes(config, checkpoint)
        with watch.stage(f"loading {chosen.name}"):
            engines = open_engines(config, hosts, checkpoint, tokenizer, meshes)
            engines.install(parameters(_model(config, checkpoint, meshes, chosen, hosts.index)))
            engines.replicas.compile_all()
        sampler = Sampler(engines.replicas, tokenizer, config)
        with watch.stage(f"evaluation of {chosen.name}"):
            evaluation, samples = evaluate_policy(sampler, held_out, chosen.step or 0)
            hosts.agree(f"tokens of the evaluation of {chosen.name}", evaluation.digest)
    if hosts.is_first:
        write_samples(config.run_dir, chosen.name, samples)
        write_json(config.run_dir / EVALUATIONS_DIR / f"{chosen.name}.json", record_of(evaluation))
    return chosen, evaluation


def _model(config: RunConfig, checkpoint: Checkpoint, meshes: Meshes, chosen: Chosen, host: int) -> nnx.Module:
    base = load_model(checkpoint, meshes.trainer, dtype=jnp.dtype(config.model.dtype), remat="none")
    model = with_adapters(base, checkpoint, config)
    freeze_untrained(model, config)
    cast_to_compute(model, config)
    if chosen.step is not None:
        read_policy(chosen.directory, chosen.step, model, host)
    return model
