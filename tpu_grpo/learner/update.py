"""The update: gradients of micro-batches add up in float32, and the optimizer steps once.

    updater = Updater(model, optimizer, settings, max_grad_norm=1.0, ...)
    sums = [updater.accumulate(batch) for batch in micro_batches]      # any number of them
    record = updater.step()

The parameters exist once or twice:

    model.dtype     model.param_dtype   optimizer.state   the optimizer steps
    float32         float32             any               the model's own parameters
    bfloat16        float32             any               a float32 copy, cast to the model's after every step
    bfloat16        bfloat16            compact           the model's own, with 8 bits more of each

Three programs run: `accumulate`, `measure` and `step`. Nothing is fetched between passes, so that the devices are never
waited for there. If the loss or a gradient is not finite, there is no step, on all hosts alike: what is measured is the
same on all of them. To choose between old and new values inside of the step would cost it memory and time.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tpu_grpo.learner.compact import join_residual, split_residual
from tpu_grpo.learner.entropy import EntropyState, EntropySums, add_entropy, described_sums
from tpu_grpo.learner.loss import LossSettings, LossSums, TrainBatch, policy_loss
from tpu_grpo.learner.numbers import LossNumbers
from tpu_grpo.learner.optimizers import state_shardings
from tpu_grpo.learner.trained import trained_type
from tpu_grpo.learner.update_records import PassSums, UpdateRecord, UpdateState, Values


class Updater:
    """Updates a model in place.

    Args:
        model: its trained parameters are arrays, or descriptions of some if nothing is to be run.
        stepped: the trained parameters in the type in which they are stepped, by name; where they have the model's
            type they are the model's own, and else they are taken over.
        optimizer: an optax transformation of a flat dict.
        schedule: gives the learning rate that is reported.
        settings: the loss.
        mesh: the trainer's.
        max_grad_norm: gradients are scaled down to this global norm.
        residual: keep 8 bits more of bfloat16 parameters.
    """

    def __init__(
        self,
        model: nnx.Module,
        stepped: Values,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule,
        settings: LossSettings,
        mesh: Mesh,
        *,
        max_grad_norm: float,
        residual: bool,
    ):
        self.model = model
        self._optimizer, self._schedule, self._settings = optimizer, schedule, settings
        self._max_grad_norm, self._residual = max_grad_norm, residual
        self._kind = trained_type(model)
        self._mesh = mesh
        self._definition = nnx.split(model)[0]
        self._layout = {name: leaf.sharding for name, leaf in stepped.items()}
        self._dtypes = {name: leaf.dtype for name, leaf in self.trained.items()}
        self._shared: frozenset[str] = frozenset(self.trained)
        self._sums: PassSums | None = None
        self._numbers = LossNumbers(settings, mesh)
        self._read: tuple[Values, nnx.State] | None = None  # the model's arrays, taken apart once for all micro-batches
        self.state: UpdateState = self._initial(stepped)

    @property
    def trained(self) -> Values:
        """The trained parameters as the model computes with them, by name."""
        return by_name(nnx.state(self.model, self._kind))

    def stepped(self) -> Values:
        """Return the trained parameters as they are stepped, float32, by name."""
        if not self._residual:
            return self._joined(self.trained, self.state.kept)
        return self._compiled("stepped", self._joined)(self.trained, self.state.kept)

    def share(self, names: Collection[str]) -> None:
        """Say whose arrays others hold: an update reuses the memory of the others. Until then it reuses none."""
        self._shared = frozenset(names)

    def accumulate(self, batch: TrainBatch) -> LossSums:
        """Add a micro-batch's gradient to those since the last step, and return what its forward pass measured."""
        if self._sums is None or self._read is None:
            self._sums, self._read = self._zeros(), self._model_values()
        numbers = self._numbers.placed(self.state.entropy)
        self._sums, measured = self._accumulate(self._sums, *self._read, batch, numbers)
        return measured

    def gradients(self) -> Values:
        """Return the gradients that were added up since the last step, float32, by name."""
        assert self._sums is not None, "accumulate comes before gradients"
        return self._sums.gradients

    def step(self) -> UpdateRecord:
        """Let the optimizer step once along the sum of the gradients, which is empty afterwards.

        If the loss or the gradient is not finite, as the record says, it makes no step.
        """
        assert self._sums is not None, "accumulate comes before step"
        sums, self._sums, self._read = self._sums, None, None
        record = self._measure(sums, self.state.count, self.state.entropy)
        if not bool(record.finite):  # the first time that anything is waited for
            return record
        changed, self.state, kept = self._step(*self._step_arguments(sums, self._shared), record.grad_norm)
        self._install(changed)
        return record._replace(step_kept=kept)

    def lower_accumulate(self, batch: Any) -> jax.stages.Lowered:
        """Lower the forward and backward pass of a micro-batch, for arrays or their descriptions."""
        return self._accumulate.lower(self._described_sums, *self._model_values(), batch, self._numbers.described())

    def lower_step(self, shared: Collection[str]) -> jax.stages.Lowered:
        """Lower the optimizer's step, with the memory of all but the ``shared`` parameters reused."""
        sums = self._described_sums
        return self._step.lower(*self._step_arguments(sums, shared), sums.loss)  # a norm is described as a loss is

    # --- the programs -------------------------------------------------------------------------------------------------

    @property
    def _accumulate(self) -> Any:
        return self._compiled("accumulate", self._accumulated, donate_argnums=0)

    @property
    def _measure(self) -> Any:
        return self._compiled("measure", self._measured)

    @property
    def _step(self) -> Any:
        # Where float32 copies are stepped, the model's own are not computed with: kept, their memory is still reused.
        return self._compiled("step", self._stepped, donate_argnums=(2, 3, 4), keep_unused=True)

    def _accumulated(
        self, sums: PassSums, trained: Values, others: nnx.State, batch: TrainBatch, numbers: Values
    ) -> tuple[PassSums, LossSums]:
        def loss(values: Values) -> tuple[Float[Array, ""], LossSums]:
            own = jax.tree.map(lambda leaf: leaf, others)  # nnx.remat refuses variables from outside of the gradient
            return policy_loss(nnx.merge(self._definition, self._as_state(values), own), batch, self._settings, numbers)

        gradients, measured = jax.grad(loss, has_aux=True)(trained)
        added = {name: value + gradients[name].astype(jnp.float32) for name, value in sums.gradients.items()}
        entropy = add_entropy(sums.entropy, measured.entropy, measured.agreement.tokens)
        return PassSums(self._laid_out(added), sums.loss + measured.loss, entropy), measured

    def _measured(self, sums: PassSums, count: Int[Array, ""], entropy: EntropyState | tuple[()]) -> UpdateRecord:
        """Measure what does not depend on the step."""
        norm, rate = optax.global_norm(sums.gradients), jnp.asarray(self._schedule(count), jnp.float32)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        coefficient = entropy.applied if isinstance(entropy, EntropyState) else None
        return UpdateRecord(norm, rate, jnp.ones(()), finite, coefficient)

    def _stepped(
        self,
        held: Values,
        read: PassSums,
        free: Values,
        state: UpdateState,
        reused: Values,
        norm: Float[Array, ""],
    ) -> tuple[Values, UpdateState, Float[Array, ""]]:
        gradients = read.gradients | reused
        values = self._joined(held | free, state.kept)
        scale = jnp.where(norm > self._max_grad_norm, self._max_grad_norm / norm, 1.0)
        scaled = {name: gradient * scale for name, gradient in gradients.items()}
        update: Any = self._optimizer.update
        meant, optimizer = update(scaled, state.optimizer, values)
        trained, kept = self._split({name: values[name] + meant[name] for name in values}, state.count)
        arrived = self._joined(trained, kept)
        length = sum((jnp.square(step).sum() for step in meant.values()), jnp.zeros(()))
        along = sum(((arrived[name] - values[name]) * meant[name]).sum() for name in values)
        entropy, control = state.entropy, self._settings.entropy_control
        if control is not None and isinstance(entropy, EntropyState) and isinstance(read.entropy, EntropySums):
            entropy = control.following(entropy, read.entropy)
        after = UpdateState(state.count + 1, optimizer, self._laid_out(kept), entropy)
        return self._laid_out(trained), after, jnp.where(length > 0.0, along / length, 1.0)

    def _joined(self, trained: Values, kept: Values) -> Values:
        """The parameters that are stepped, float32."""
        if self._residual:
            return {name: join_residual(value, kept[name]) for name, value in trained.items()}
        return {name: kept.get(name, value) for name, value in trained.items()}

    def _split(self, values: Values, count: Int[Array, ""]) -> tuple[Values, Values]:
        """The parameters that the model computes with, and what they lack of ``values``."""
        if self._residual:
            key = jax.random.fold_in(jax.random.key(0), count)
            parts = {
                name: split_residual(value, jax.random.fold_in(key, index))
                for index, (name, value) in enumerate(sorted(values.items()))
            }
            return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
        cast = {name: value.astype(self._dtypes[name]) for name, value in values.items()}
        return cast, {name: value for name, value in values.items() if value.dtype != self._dtypes[name]}

    def _step_arguments(self, sums: PassSums, shared: Collection[str]) -> tuple[Any, ...]:
        """Sort the arguments of the step: parameters and sums that stay, and those whose memory is reused.

        The new values of a parameter that others hold take the memory of its gradient, where they have the same type.
        """
        trained, gradients = self.trained, sums.gradients
        held = {name: value for name, value in trained.items() if name in shared}
        free = {name: value for name, value in trained.items() if name not in shared}
        reused = {name: gradients[name] for name, value in held.items() if value.dtype == gradients[name].dtype}
        read = {name: value for name, value in gradients.items() if name not in reused}
        return held, sums._replace(gradients=read), free, self.state, reused

    # --- their arguments ----------------------------------------------------------------------------------------------

    def _initial(self, stepped: Values) -> UpdateState:
        """Make the state before the first update, of descriptions if the parameters are such."""
        shapes = jax.eval_shape(self._first_state, stepped)
        whole = NamedSharding(self._mesh, PartitionSpec())
        shardings: Any = UpdateState(
            whole,  # type: ignore[arg-type]  # a sharding in the place of its array
            state_shardings(shapes.optimizer, stepped),
            {name: self._layout[name] for name in shapes.kept},
            jax.tree.map(lambda _: whole, shapes.entropy),
        )
        if isinstance(next(iter(stepped.values())), jax.ShapeDtypeStruct):
            return jax.tree.map(_described, shapes, shardings)
        copies = bool(shapes.kept) and not self._residual  # they are the very arrays, which nobody else holds
        return jax.jit(self._first_state, out_shardings=shardings, donate_argnums=0 if copies else ())(stepped)

    def _first_state(self, stepped: Values) -> UpdateState:
        values = {name: value.astype(jnp.float32) for name, value in stepped.items()}
        kept = {name: value for name, value in values.items() if value.dtype != self._dtypes[name]}
        if self._residual:
            kept = {name: jnp.zeros(value.shape, jnp.int8) for name, value in values.items()}
        control = self._settings.entropy_control
        entropy = () if control is None else control.initial()
        return UpdateState(jnp.zeros((), jnp.int32), self._optimizer.init(values), kept, entropy)

    @property
    def _described_sums(self) -> PassSums:
        """Describe what passes add up: float32, the gradients sharded like the parameters."""
        number: Any = _described(_Float32(()), NamedSharding(self._mesh, PartitionSpec()))
        gradients = {name: _described(_Float32(leaf.shape), self._layout[name]) for name, leaf in self.trained.items()}
        return PassSums(gradients, number, described_sums(self._settings.entropy_control, self._mesh))

    def _zeros(self) -> PassSums:
        kinds = self._described_sums
        layout = jax.tree.map(lambda kind: kind.sharding, kinds)
        made = lambda: jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)  # noqa: E731
        return self._compiled("zeros", made, out_shardings=layout)()

    def _model_values(self) -> tuple[Values, nnx.State]:
        _, trained, others = nnx.split(self.model, self._kind, ...)
        return by_name(trained), others

    def _as_state(self, values: Mapping[str, Any]) -> nnx.State:
        template = nnx.to_flat_state(nnx.state(self.model, self._kind))
        return nnx.from_flat_state([(path, leaf.replace(values[dotted(path)])) for path, leaf in template])

    def _install(self, values: Values) -> None:
        nnx.update(self.model, self._as_state(values))

    def _laid_out(self, values: Values) -> Values:
        # The compiler chooses the layout of what a program returns. Held to the layout of the parameters, the next call
        # finds the same program, and the sampler the same layout.
        return {name: jax.lax.with_sharding_constraint(value, self._layout[name]) for name, value in values.items()}

    def _compiled(self, name: str, function: Callable[..., Any], **options: Any) -> Any:
        programs = self.__dict__.setdefault("_programs", {})
        if name not in programs:
            programs[name] = jax.jit(function, **options)
        return programs[name]


class _Float32(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any = jnp.float32


def by_name(state: nnx.State) -> Values:
    """Return the arrays of a state by their dotted names."""
    return {dotted(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)}


def dotted(path: tuple[Any, ...]) -> str:
    """Write the path of a parameter in a state as its name."""
    return ".".join(map(str, path))


def _described(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
