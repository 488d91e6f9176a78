"""Everything of Tunix's cluster that is replaced, with the reason. Written for google-tunix 0.1.7.

1. **No second copy of the parameters.** ``RLCluster`` puts a copy of the actor on pinned host memory when it is built
   and at every ``sync_weights``. Only the agentic learners read it (``get_actor_per_token_logps``); on several hosts
   the copy fails, because ``device_put`` refuses a global array. `Cluster` keeps none.
2. **What was measured is handed over.** Tunix's trainer keeps losses for a metrics logger and drops what else the loss
   function returned. ``RLCluster`` names its trainer class; `Cluster` gives it `CollectingTrainer` while it is built.

Nothing happens at import.
"""

from typing import Any, NamedTuple
from unittest import mock

import jax
from tunix.rl import rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl import utils as rl_utils

from tpu_grpo.models.tunix_repairs import require_reviewed_tunix


class MicroStep(NamedTuple):
    """Holds what one forward and backward pass left, still on the devices."""

    loss: jax.Array
    aux: dict[str, Any]
    """What the loss function returned beside the loss."""


class CollectingTrainer(rl_trainer.Trainer):
    """Is Tunix's trainer, and keeps a `MicroStep` of every pass until `take_micro_steps` is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._last_loss: jax.Array | None = None
        self._micro_steps: list[MicroStep] = []

    def take_micro_steps(self) -> list[MicroStep]:
        """Hand over the passes since the last call, in order."""
        taken, self._micro_steps = self._micro_steps, []
        return taken

    def _buffer_metrics(self, metrics_buffer: Any, loss: Any, step: int, additional_metrics: Any = None) -> Any:
        self._last_loss = loss
        return super()._buffer_metrics(metrics_buffer, loss, step, additional_metrics)

    def _post_process_train_step(self, aux: Any) -> None:
        assert self._last_loss is not None  # _buffer_metrics comes first
        self._micro_steps.append(MicroStep(self._last_loss, aux))
        super()._post_process_train_step(aux)


class Cluster(rl_cluster.RLCluster):
    """Tunix's ``RLCluster`` with a `CollectingTrainer` and no copy of the parameters on the host."""

    actor_trainer: CollectingTrainer  # type: ignore[assignment]  # a property of the parent, of a wider type

    def _init_cluster(self) -> None:
        require_reviewed_tunix()
        with mock.patch.object(rl_trainer, "Trainer", CollectingTrainer), _no_host_copy():
            super()._init_cluster()

    def sync_weights(self) -> None:
        """Push the actor's parameters to the sampler; counts a step, as Tunix's own does."""
        with _no_host_copy():
            super().sync_weights()


def _no_host_copy() -> Any:
    return mock.patch.object(rl_utils, "put_params_on_memory_kind", return_value=None)
