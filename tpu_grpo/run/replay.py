"""Does an update again that was not finite, alone, and finds where the first number that is not finite comes from.

    kept = read_update(path)
    for line in replay(kept, config, Hosts()):
        print(line)

Parameters and optimizer are those of the checkpoint beside the file: the ones that the update had. What is not finite
is looked for in the order in which an update computes: parameters, what the passes were given, the log-probabilities
of the sampled tokens, the loss, the gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.building import build_parts, saved_reference
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.digest import whole
from tpu_grpo.learner.failed import pass_arrays, placed_pass
from tpu_grpo.learner.forward import logprobs
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.trained import parameters
from tpu_grpo.learner.update import Updater, by_name
from tpu_grpo.run.failures import KeptUpdate
from tpu_grpo.run.meshes import build_meshes
from tpu_grpo.run.parts import open_inputs, open_model


def replay(kept: KeptUpdate, config: RunConfig, hosts: Hosts) -> Iterator[str]:
    """Do the update again, up to the optimizer's step, and say line by line what it came to; every host must call it.

    Raises:
        CheckpointError: if its parameters are missing, damaged, or of another model or optimizer than the config's.
        DataError: for passes that the trainer's mesh cannot split.
    """
    checkpoint, _ = open_model(config, hosts)
    meshes = build_meshes(config, checkpoint)
    parts = build_parts(config, open_inputs(config, checkpoint, meshes))
    checkpoints = Checkpoints(kept.checkpoints, keep=1, reference=saved_reference(config, parts), hosts=hosts)
    step = checkpoints.restore(parts.updater, resume="require")
    checkpoints.close()
    of_several = f", update {kept.update} of {kept.updates}" if kept.updates > 1 else ""
    yield f"step {kept.step}{of_several}: {len(kept.passes)} passes; in the run {_came_to(kept.loss, kept.grad_norm)}"
    values = by_name(parameters(parts.updater.model)) | parts.updater.stepped()
    yield f"parameters  as they were before the update, {kept.checkpoints / str(step)}: {_finite_of(values)}"
    batches = [placed_pass(arrays, meshes.trainer) for arrays in kept.passes]
    yield from _Replay(parts.updater, parts.settings, meshes.trainer).lines(batches, kept)


@dataclass(frozen=True)
class _Replay:
    """An updater as it was before the update."""

    updater: Updater
    settings: LossSettings
    mesh: Mesh

    def lines(self, batches: Sequence[TrainBatch], kept: KeptUpdate) -> Iterator[str]:
        loss = 0.0
        for number, batch in enumerate(batches, start=1):
            with self.mesh:
                measured = jax.device_get(self.updater.accumulate(batch))
            loss += float(measured.loss)
            given = _finite_of(pass_arrays(batch))
            yield f"pass {number:<5}  given {given}; {self._tokens(batch)}; loss {float(measured.loss):g}"
        gradients = self.updater.gradients()
        yield f"gradients   {_finite_of(gradients)}"
        norm = float(jax.device_get(_norm(gradients)))
        same = np.array_equal([loss, norm], [kept.loss, kept.grad_norm], equal_nan=True)
        yield f"in all      {_came_to(loss, norm)}: {'as in the run' if same else 'not as in the run'}"

    def _tokens(self, batch: TrainBatch) -> str:
        """Say of which sampled tokens the policy's log-probability is not finite."""
        found = whole(logprobs(self.updater.model, batch.rows, **self.settings.forward))
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
