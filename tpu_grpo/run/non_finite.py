"""Writes files about an update or rollout in which a number is not finite; `replay` repeats such an update.

    <run.dir>/non_finite/7.npz            for an update: the arrays of its passes, the config, loss and gradient norm
    <run.dir>/non_finite/7.jsonl          the samples of step 7; for a rollout, with tokens and log-probabilities
    <run.dir>/non_finite/checkpoints/7/   policy and optimizer before the update, or during the rollout

Only the newest failure is kept, because a checkpoint is large.
"""

import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.sampler import BrokenRollout
from tpu_grpo.hosts import Hosts, hosts_of
from tpu_grpo.learner.batches import PassArrays, pass_arrays, placed_pass
from tpu_grpo.learner.building import LearnerParts, build_parts
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.forward import logprobs
from tpu_grpo.learner.learner import FailedUpdate
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.parameters import by_name, parameters, whole
from tpu_grpo.observe.json_lines import encode_line, replace_bytes
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, NON_FINITE_DIR
from tpu_grpo.observe.sample_rows import conversation_fields, sample_fields, sample_rows
from tpu_grpo.observe.summary import versions
from tpu_grpo.records.errors import DataError
from tpu_grpo.run.inputs import open_model
from tpu_grpo.run.meshes import build_meshes, check_experts
from tpu_grpo.run.policies import load_inputs

FORMAT = 1
_ABOUT = "about"


@dataclass(frozen=True)
class FailureFiles:
    """Writes the files about an update or rollout that is not finite; every host must call it.

    Host 0 writes all files but the checkpoint, which all hosts write.
    """

    config: RunConfig
    hosts: Hosts
    save: Callable[[Path, int], None]
    """Saves policy and optimizer in a directory, under a step."""

    def __call__(self, failed: FailedUpdate) -> Path:
        """Write the files of an update, replacing earlier ones; return the .npz path once it is complete."""
        directory = self._with_checkpoint(failed.step)
        path, passes = directory / f"{failed.step}.npz", failed.arrays()
        if self.hosts.is_first:
            rows = sample_rows(failed.scored, failed.advantages)
            lines = [encode_line({"step": failed.step, **sample_fields(row)}) for row in rows]
            replace_bytes(path.with_suffix(".jsonl"), lines)
            about = {
                "format": FORMAT,
                "step": failed.step,
                "update": failed.update,
                "updates": failed.updates,
                "passes": len(passes),
                "loss": failed.loss if math.isfinite(failed.loss) else str(failed.loss),  # JSON has no infinities
                "grad_norm": failed.grad_norm if math.isfinite(failed.grad_norm) else str(failed.grad_norm),
                "config": self.config.model_dump(mode="json"),
                "versions": versions(),
            }
            arrays: dict[str, Any] = {_ABOUT: np.array(json.dumps(about))}
            arrays |= {f"{n}/{name}": array for n, each in enumerate(passes) for name, array in each.items()}
            np.savez_compressed(file := io.BytesIO(), **arrays)
            replace_bytes(path, [file.getvalue()])
        self.hosts.barrier("the files of an update that is not finite")
        return path

    def of_rollout(self, broken: BrokenRollout) -> Path:
        """Write the samples of a rollout, replacing earlier files; return the file's path once it is complete."""
        path = self._with_checkpoint(broken.step) / f"{broken.step or 'evaluation'}.jsonl"
        if self.hosts.is_first:
            replace_bytes(path, (encode_line(record) for record in _rows(broken)))
        self.hosts.barrier("the file of a rollout that is not finite")
        return path

    def _with_checkpoint(self, step: int) -> Path:
        """Empty the directory of failures, save policy and optimizer there, and return it."""
        directory = self.config.run_dir / NON_FINITE_DIR
        if self.hosts.is_first:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self.hosts.barrier("the directory of what is not finite")
        self.save(directory / CHECKPOINTS_DIR, step)
        return directory


@dataclass(frozen=True)
class KeptUpdate:
    """The content of the .npz file of an update in which a number was not finite."""

    path: Path
    step: int
    update: int
    updates: int
    loss: float
    grad_norm: float
    settings: dict[str, Any]
    """The resolved config of the run, as nested sections."""
    passes: tuple[PassArrays, ...]

    @property
    def checkpoints(self) -> Path:
        """The directory with the checkpoint from before the update."""
        return self.path.parent / CHECKPOINTS_DIR


def read_update(path: Path) -> KeptUpdate:
    """Read the .npz file of an update; raises DataError if it is missing, or `FailureFiles` has not written it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file[_ABOUT]))
            if about["format"] != FORMAT:
                raise DataError(
                    f"{path} must have format {FORMAT}, got {about['format']}; use the version that wrote it"
                )
            passes: list[PassArrays] = [{} for _ in range(about["passes"])]
            for name in file.files:
                number, _, array = name.partition("/")
                if array:
                    passes[int(number)][array] = file[name]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"--replay needs a file that a run has written, <run.dir>/{NON_FINITE_DIR}/<step>.npz, got {path} "
            f"({type(error).__name__}: {error}); correct the path"
        ) from error
    step, update, updates, settings = (about[name] for name in ("step", "update", "updates", "config"))
    loss, norm = float(about["loss"]), float(about["grad_norm"])
    return KeptUpdate(path, step, update, updates, loss, norm, settings, tuple(passes))


def _rows(broken: BrokenRollout) -> Iterator[dict[str, Any]]:
    """Yield a JSON record for each completion, with texts, tokens and log-probabilities."""
    for prompt, completion, text in zip(broken.prompts, broken.completions, broken.texts, strict=True):
        row = {
            "step": broken.step,
            "prompt": prompt.text,
            "completion": text,
            "finish_reason": completion.finish_reason,
            "prompt_token_ids": list(prompt.token_ids),
            "token_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
        }
        if (episode := completion.episode) is not None:  # every branch has its own prompt
            branches = [
                {"prompt_token_ids": list(branch.prompt), "start": branch.start, "end": branch.end}
                for branch in episode.branches
            ]
            row["prompt"], row["prompt_token_ids"] = episode.prompt, branches[0]["prompt_token_ids"] if branches else []
            row |= {**conversation_fields(completion), "branches": branches}
        yield row


def replay(kept: KeptUpdate, config: RunConfig, hosts: Hosts) -> Iterator[str]:
    """Repeat the update, without the optimizer's step, and yield findings line by line; every host must call it.

    Parameters and optimizer state come from the checkpoint beside the file, saved before the update. The search for
    numbers that are not finite follows the order of the computation: parameters, inputs of the passes,
    log-probabilities of the sampled tokens, loss, gradients.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, or of another model or optimizer than the config's.
        ConfigError: for devices on which the trainer cannot run.
        DataError: for passes that the trainer's mesh cannot split.
    """
    checkpoint, _ = open_model(config, hosts)
    if hosts.count == 1:  # one process repeats the passes of all slices
        config = config.model_copy(update={"meshes": config.meshes.model_copy(update={"slices": 1})})
    meshes = build_meshes(config, checkpoint)
    check_experts(checkpoint, meshes)  # a run one step off policy is repeated on one host, too
    if not meshes.trainer.local_devices:
        return  # the trainer's hosts repeat the update
    trainers = hosts.among(hosts_of(meshes.trainer.devices.flat))
    parts = build_parts(config, load_inputs(config, checkpoint, meshes))
    checkpoints = Checkpoints(kept.checkpoints, keep=1, reference=parts.saved_reference, hosts=trainers)
    step = checkpoints.restore(parts.updater, resume="require")
    of_several = f", update {kept.update} of {kept.updates}" if kept.updates > 1 else ""
    yield f"step {kept.step}{of_several}: {len(kept.passes)} passes; in the run {_came_to(kept.loss, kept.grad_norm)}"
    values = by_name(parameters(parts.updater.model)) | parts.updater.stepped()
    yield f"parameters  as they were before the update, {kept.checkpoints / str(step)}: {_finite_of(values)}"
    yield from _updated(parts, meshes.trainer, kept)


def _updated(parts: LearnerParts, mesh: Mesh, kept: KeptUpdate) -> Iterator[str]:
    loss, updater = 0.0, parts.updater
    for number, arrays in enumerate(kept.passes, start=1):
        batch = placed_pass(arrays, mesh)
        measured = jax.device_get(updater.accumulate(batch))
        loss += float(measured.loss)
        given, tokens = _finite_of(pass_arrays(batch)), _finite_tokens(parts, batch)
        yield f"pass {number:<5}  given {given}; {tokens}; loss {float(measured.loss):g}"
    gradients = updater.gradients()
    yield f"gradients   {_finite_of(gradients)}"
    norm = float(jax.device_get(_norm(gradients)))
    same = np.array_equal([loss, norm], [kept.loss, kept.grad_norm], equal_nan=True)
    yield f"in all      {_came_to(loss, norm)}: {'as in the run' if same else 'not as in the run'}"


def _finite_tokens(parts: LearnerParts, batch: TrainBatch) -> str:
    """Say how many sampled tokens have a log-probability that is not finite, and where the first is."""
    found = whole(logprobs(*nnx.split(parts.updater.model), batch.rows, **parts.settings.forward))
    mask, ids = whole(batch.rows.mask), whole(batch.rows.token_ids)
    bad = np.argwhere(mask & ~np.isfinite(found))
    if not len(bad):
        return f"the log-probabilities of its {mask.sum()} sampled tokens are finite"
    row, place = bad[0].tolist()
    return (
        f"of its {mask.sum()} sampled tokens {len(bad)} have a log-probability that is not finite, the first in "
        f"row {row} at place {place}, token {ids[row, place]}"
    )


_norm = jax.jit(optax.global_norm)


@jax.jit
def _is_finite(value: Any) -> Any:
    return jnp.isfinite(value).all()


def _finite_of(arrays: Mapping[str, Any]) -> str:
    """Say how many arrays hold a number that is not finite, and name the first."""
    bad = [name for name, value in arrays.items() if not bool(_is_finite(value))]
    return f"{len(bad)} of {len(arrays)} arrays not finite, the first {bad[0]}" if bad else "all finite"


def _came_to(loss: float, norm: float) -> str:
    return f"the loss is {loss:g}, the gradient norm {norm:g}"
