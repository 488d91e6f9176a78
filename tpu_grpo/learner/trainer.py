"""Tunix's trainer, with what it measures handed over instead of logged.

Tunix's own keeps losses for a metrics logger (which clears every listener of ``jax.monitoring`` when it is closed),
computes a perplexity from the loss, and may show a progress bar. Ours hands the numbers of every train step to whoever
called, and saves nothing by itself.

Its train step returns the whole model, so that what is not trained would be copied at every step. Ours returns what is
trained; the rest stays the same arrays, which the reference and the sampler may share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.interpreters import pxla
from tunix.rl import trainer as rl_trainer

from tpu_grpo.learner.trained import trained_type


class MicroStep(NamedTuple):
    """Holds what one forward and backward pass left, still on the devices."""

    loss: jax.Array
    aux: dict[str, Any]
    """What the loss function returned beside the loss."""


class CollectingTrainer(rl_trainer.Trainer):
    """Runs train steps and keeps their `MicroStep` until `take_micro_steps` is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._kind = trained_type(self.model)
        self._loss: jax.Array | None = None
        self._shard_optimizer(pxla.thread_resources.env.physical_mesh)  # now, so that whoever saves finds it so
        self._micro_steps: list[MicroStep] = []

    def take_micro_steps(self) -> list[MicroStep]:
        """Hand over the train steps since the last call, in order."""
        taken, self._micro_steps = self._micro_steps, []
        return taken

    def _shard_optimizer(self, mesh: jax.sharding.Mesh) -> None:
        super()._shard_optimizer(mesh)
        self._keep_layout()

    def _keep_layout(self) -> None:
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, self._changing(self.model, self.optimizer))

    def create_train_step_fn(self) -> Callable[[Any], Any]:
        """Return the train step, already compiled: train with ``skip_jit``."""
        if self._jitted_train_step_fn is None:  # reset by Tunix with every new loss
            self._jitted_train_step_fn = self._compiled_step()
        return self._run

    def _compiled_step(self) -> Any:
        definition, _ = nnx.split(self.model)
        optimizer_definition, _ = nnx.split(self.optimizer)

        def step(trained: nnx.State, frozen: nnx.State, optimizer_state: nnx.State, inputs: Any) -> Any:
            model = nnx.merge(definition, trained, frozen)
            optimizer = nnx.merge(optimizer_definition, optimizer_state)
            result = self._train_step(model, optimizer, inputs)
            # The compiler chooses the layout of what a program returns. Held to the layout of the arguments, the next
            # call finds the same program, and the sampler the same layout.
            return result, jax.lax.with_sharding_constraint(self._changing(model, optimizer), self._layout)

        return jax.jit(step, donate_argnames="optimizer_state")

    def _run(self, inputs: Any) -> Any:
        _, trained, frozen = nnx.split(self.model, self._kind, ...)
        result, changed = self._jitted_train_step_fn(trained, frozen, nnx.state(self.optimizer), inputs)
        for node, state in zip((self.model, self.optimizer), changed, strict=True):
            nnx.update(node, state)
        return result

    def lower(self, inputs: Any) -> jax.stages.Lowered:
        """Lower the train step for these inputs, or for their shapes."""
        _, trained, frozen = nnx.split(self.model, self._kind, ...)
        self.create_train_step_fn()
        return self._jitted_train_step_fn.lower(trained, frozen, nnx.state(self.optimizer), inputs)

    def _changing(self, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[nnx.State, nnx.State]:
        return nnx.state(model, self._kind), nnx.state(optimizer)

    def _buffer_metrics(self, metrics_buffer: Any, loss: Any, step: int, additional_metrics: Any = None) -> Any:
        self._loss = loss

    def _post_process_train_step(self, aux: Any) -> None:
        assert self._loss is not None  # _buffer_metrics comes first
        self._micro_steps.append(MicroStep(self._loss, aux))

    def _write_train_metrics(self) -> None:
        """Nothing is buffered, so nothing is written."""
