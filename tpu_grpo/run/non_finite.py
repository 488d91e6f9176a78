"""The files of an update or a rollout with a number that is not finite, and `replay`, which does such an update again.

    <run.dir>/non_finite/7.npz            of an update: its passes, as arrays, with the config and what it came to
    <run.dir>/non_finite/7.jsonl          the samples of step 7; of a rollout with tokens and log-probabilities
    <run.dir>/non_finite/checkpoints/7/   policy and optimizer as they were before the update, or in the rollout

The newest failure alone is kept: a checkpoint is large.
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
from jax.sharding import Mesh

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.sampler import BrokenRollout
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.batches import PassArrays, pass_arrays, placed_pass
from tpu_grpo.learner.building import build_parts
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.failed import FailedUpdate
from tpu_grpo.learner.forward import logprobs
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.parameters import by_name, parameters, whole
from tpu_grpo.learner.update import Updater
from tpu_grpo.observe.json_lines import encode_line, replace_bytes
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, NON_FINITE_DIR
from tpu_grpo.observe.sample_rows import conversation_fields, sample_fields, sample_rows
from tpu_grpo.observe.summary import versions
from tpu_grpo.records.errors import DataError
from tpu_grpo.run.inputs import open_model
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.policies import load_inputs

FORMAT = 1
_ABOUT = "about"


@dataclass(frozen=True)
class FailureFiles:
    """Writes the files; every host calls it, and host 0 writes all but the checkpoint."""

    config: RunConfig
    hosts: Hosts
    save: Callable[[Path, int], None]
    """Saves policy and optimizer in a directory as a step."""

    def __call__(self, failed: FailedUpdate) -> Path:
        """Keep an update in place of the one before, and return its file once it is complete on every host."""
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
                **{name: _json(getattr(failed, name)) for name in ("loss", "grad_norm")},
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
        """Keep what was sampled, and return its file once it is complete on every host."""
        path = self._with_checkpoint(broken.step) / f"{broken.step or 'evaluation'}.jsonl"
        if self.hosts.is_first:
            replace_bytes(path, (encode_line(record) for record in _rows(broken)))
        self.hosts.barrier("the file of a rollout that is not finite")
        return path

    def _with_checkpoint(self, step: int) -> Path:
        """Empty the directory, and save policy and optimizer there."""
        directory = self.config.run_dir / NON_FINITE_DIR
        if self.hosts.is_first:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self.hosts.barrier("the directory of what is not finite")
        self.save(directory / CHECKPOINTS_DIR, step)
        return directory


@dataclass(frozen=True)
class KeptUpdate:
    """What the file of an update holds."""

    path: Path
    step: int
    update: int
    updates: int
    loss: float
    grad_norm: float
    settings: dict[str, Any]
    """The resolved config of the run, as nested sections."""
    versions: Mapping[str, str]
    passes: tuple[PassArrays, ...]

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoint of its parameters lies."""
        return self.path.parent / CHECKPOINTS_DIR


def read_update(path: Path) -> KeptUpdate:
    """Read the file of an update.

    Raises:
        DataError: for one that is not there, or is not such a file.
    """
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
    return KeptUpdate(
        path=path,
        step=about["step"],
        update=about["update"],
        updates=about["updates"],
        loss=float(about["loss"]),
        grad_norm=float(about["grad_norm"]),
        settings=about["config"],
        versions=about["versions"],
        passes=tuple(passes),
    )


def _json(value: float) -> float | str:
    """Return a number as JSON has it, which has no infinities."""
    return value if math.isfinite(value) else str(value)


def _rows(broken: BrokenRollout) -> Iterator[dict[str, Any]]:
    """Yield the rows as people read them, with null for a log-probability that is not finite."""
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
        if (episode := completion.episode) is not None:  # every branch has a prompt of its own
            branches = [
                {"prompt_token_ids": list(branch.prompt), "start": branch.start, "end": branch.end}
                for branch in episode.branches
            ]
            row["prompt"], row["prompt_token_ids"] = episode.prompt, branches[0]["prompt_token_ids"] if branches else []
            row |= {**conversation_fields(completion), "branches": branches}
        yield row


# --- an update done again --------------------------------------------------------------------------------------------


def replay(kept: KeptUpdate, config: RunConfig, hosts: Hosts) -> Iterator[str]:
    """Do the update again, up to the optimizer's step, and say line by line what it came to; every host must call it.

    Parameters and optimizer are those of the checkpoint beside the file: the ones that the update had. What is not
    finite is looked for in the order in which an update computes: parameters, what the passes were given, the
    log-probabilities of the sampled tokens, the loss, the gradients.

    Raises:
        CheckpointError: if its parameters are missing, damaged, or of another model or optimizer than the config's.
        DataError: for passes that the trainer's mesh cannot split.
    """
    checkpoint, _ = open_model(config, hosts)
    meshes = build_meshes(config, checkpoint)
    parts = build_parts(config, load_inputs(config, checkpoint, meshes))
    checkpoints = Checkpoints(kept.checkpoints, keep=1, reference=parts.saved_reference, hosts=hosts)
    step = checkpoints.restore(parts.updater, resume="require")
    checkpoints.close()
    of_several = f", update {kept.update} of {kept.updates}" if kept.updates > 1 else ""
    yield f"step {kept.step}{of_several}: {len(kept.passes)} passes; in the run {_came_to(kept.loss, kept.grad_norm)}"
    values = by_name(parameters(parts.updater.model)) | parts.updater.stepped()
    yield f"parameters  as they were before the update, {kept.checkpoints / str(step)}: {_finite_of(values)}"
    yield from _updated(parts.updater, parts.settings, meshes.trainer, kept)


def _updated(updater: Updater, settings: LossSettings, mesh: Mesh, kept: KeptUpdate) -> Iterator[str]:
    loss = 0.0
    for number, arrays in enumerate(kept.passes, start=1):
        batch = placed_pass(arrays, mesh)
        with mesh:
            measured = jax.device_get(updater.accumulate(batch))
        loss += float(measured.loss)
        given, tokens = _finite_of(pass_arrays(batch)), _finite_tokens(updater, settings, batch)
        yield f"pass {number:<5}  given {given}; {tokens}; loss {float(measured.loss):g}"
    gradients = updater.gradients()
    yield f"gradients   {_finite_of(gradients)}"
    norm = float(jax.device_get(_norm(gradients)))
    same = np.array_equal([loss, norm], [kept.loss, kept.grad_norm], equal_nan=True)
    yield f"in all      {_came_to(loss, norm)}: {'as in the run' if same else 'not as in the run'}"


def _finite_tokens(updater: Updater, settings: LossSettings, batch: TrainBatch) -> str:
    """Say of which sampled tokens the policy's log-probability is not finite."""
    found = whole(logprobs(updater.model, batch.rows, **settings.forward))
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
    """Say which of some arrays hold a number that is not finite."""
    bad = [name for name, value in arrays.items() if not bool(_is_finite(value))]
    return f"{len(bad)} of {len(arrays)} arrays not finite, the first {bad[0]}" if bad else "all finite"


def _came_to(loss: float, norm: float) -> str:
    return f"the loss is {loss:g}, the gradient norm {norm:g}"
