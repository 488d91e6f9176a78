"""Everything of Tunix that is replaced, with the reason. Written for google-tunix 0.1.7; nothing happens at import.

1. **No second copy of the parameters.** ``RLCluster`` puts a copy of the actor on pinned host memory when it is built
   and at every ``sync_weights``. Only the agentic learners read it (``get_actor_per_token_logps``); on several hosts
   the copy fails, because ``device_put`` refuses a global array. `Cluster` keeps none.
2. **Our trainer.** ``RLCluster`` names its trainer class; `Cluster` gives it `CollectingTrainer` while it is built.
3. **Arrays are saved whole.** Tunix's checkpoint manager takes Orbax's defaults, by which an array that several devices
   hold is cut into pieces, by a program compiled for each shape at the first save. Only small arrays are held so.
4. **A train step that returns what is trained.** Tunix's returns the whole model, and so copies what is not trained.
   `CollectingTrainer` compiles its own; `Cluster` has it used, by telling Tunix not to compile.
"""

from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
from tunix.rl import rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl import utils as rl_utils
from tunix.sft.checkpoint_manager import CheckpointManager

from tpu_grpo.families.tunix_version import require_reviewed_tunix
from tpu_grpo.learner.trainer import CollectingTrainer


class Cluster(rl_cluster.RLCluster):
    """Tunix's ``RLCluster`` with a `CollectingTrainer` and no copy of the parameters on the host."""

    actor_trainer: CollectingTrainer  # type: ignore[assignment]  # a property of the parent, of a wider type
    trainer_class: type[CollectingTrainer] = CollectingTrainer

    def _init_cluster(self) -> None:
        require_reviewed_tunix()
        with mock.patch.object(rl_trainer, "Trainer", self.trainer_class), _no_host_copy():
            super()._init_cluster()

    def update_actor(self, train_ds: Any, eval_ds: Any, skip_jit: bool = True) -> None:
        """Train on some examples."""
        del skip_jit
        super().update_actor(train_ds, eval_ds, skip_jit=True)

    def sync_weights(self) -> None:
        """Push the actor's parameters to the sampler; counts a step, as Tunix's own does."""
        with _no_host_copy():
            super().sync_weights()


class WholeArrayCheckpointManager(CheckpointManager):
    """Tunix's checkpoint manager, that compiles nothing."""

    def __init__(self, directory: str, options: ocp.CheckpointManagerOptions):
        require_reviewed_tunix()
        super().__init__(root_directory=None)
        whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
        self._checkpoint_manager = ocp.CheckpointManager(
            directory,
            item_handlers={
                "model_params": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
                "optimizer_state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
                "custom_metadata": ocp.JsonCheckpointHandler(),
            },
            options=options,
        )


def _no_host_copy() -> Any:
    return mock.patch.object(rl_utils, "put_params_on_memory_kind", return_value=None)
