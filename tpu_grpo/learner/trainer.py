"""Tunix's trainer, with what it measures handed over instead of logged.

Tunix's own keeps losses for a metrics logger (which clears every listener of ``jax.monitoring`` when it is closed),
computes a perplexity from the loss, and may show a progress bar. Ours hands the numbers of every train step to whoever
called, and saves nothing by itself.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.interpreters import pxla
from tunix.rl import trainer as rl_trainer


class MicroStep(NamedTuple):
    """What one forward and backward pass left, still on the devices."""

    loss: jax.Array
    aux: dict[str, Any]
    """What the loss function returned beside the loss."""


class CollectingTrainer(rl_trainer.Trainer):
    """Runs train steps and keeps their `MicroStep` until `take_micro_steps` is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._loss: jax.Array | None = None
        self._shard_optimizer(pxla.thread_resources.env.physical_mesh)  # now, so that whoever saves finds it so
        self._micro_steps: list[MicroStep] = []

    def take_micro_steps(self) -> list[MicroStep]:
        """The train steps since the last call, in order."""
        taken, self._micro_steps = self._micro_steps, []
        return taken

    def _shard_optimizer(self, mesh: jax.sharding.Mesh) -> None:
        super()._shard_optimizer(mesh)
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, self._trained(self.model, self.optimizer))

    def _train_step(self, model: nnx.Module, optimizer: nnx.Optimizer, inputs: Any) -> Any:
        # The compiler chooses the layout of what a program returns. Held to the layout of the arguments, the next call
        # finds the same program, and the sampler the same layout.
        result = super()._train_step(model, optimizer, inputs)
        constrained = jax.lax.with_sharding_constraint(self._trained(model, optimizer), self._layout)
        for node, state in zip((model, optimizer), constrained, strict=True):
            nnx.update(node, state)
        return result

    @staticmethod
    def _trained(model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[nnx.State, nnx.State]:
        return nnx.state(model, nnx.Param), nnx.state(optimizer, nnx.optimizer.OptState)

    def _buffer_metrics(self, metrics_buffer: Any, loss: Any, step: int, additional_metrics: Any = None) -> Any:
        self._loss = loss

    def _post_process_train_step(self, aux: Any) -> None:
        assert self._loss is not None  # _buffer_metrics comes first
        self._micro_steps.append(MicroStep(self._loss, aux))

    def _write_train_metrics(self) -> None:
        """Nothing is buffered, so nothing is written."""
