"""The update: gradients of micro-batches add up in float32, and the optimizer steps once.

    updater = Updater(config.optimizer, config.updates, model, stepped, settings)
    sums = updater.accumulate(micro_batches)      # any number of them
    record = updater.step()

The parameters exist once or twice:

    model.dtype     model.param_dtype   optimizer.state   the optimizer updates
    float32         float32             any               the model's own parameters
    bfloat16        float32             any               a float32 copy, cast to model.dtype after every step
    bfloat16        bfloat16            compact           the model's own parameters, plus 8 residual bits of each

Three compiled programs accumulate gradients, measure their sum, and step. Hosts fetch nothing between micro-batches
(passes), so that devices never wait. After the last micro-batch, hosts fetch whether loss and gradient norm are
finite, and skip the step if they are not. All hosts decide alike, because they have the same sums. Choosing between old
and new values on the devices would cost memory and time.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tpu_grpo.algorithms import correction_metrics
from tpu_grpo.config import OptimizerSection
from tpu_grpo.learner.compact import join_residual, split_residual
from tpu_grpo.learner.loss import (
    AgreementSums,
    EntropyState,
    EntropySums,
    LossSettings,
    LossSums,
    TrainBatch,
    agreement_by_age,
    policy_loss,
)
from tpu_grpo.learner.optimizers import build_optimizer, learning_rate_schedule, state_shardings
from tpu_grpo.learner.parameters import Values, by_name, dotted, trained_type
from tpu_grpo.learner.slices import ONE_SLICE, Slices
from tpu_grpo.records.stages import Histogram

BUCKETS = 64


class PassSums(NamedTuple):
    """Sums over the micro-batches of an update."""

    gradients: Values
    loss: Float[Array, ""]
    """float32; not finite if the loss of any micro-batch is not finite."""
    entropy: EntropySums | tuple[()]
    """The sums from which the entropy bonus's coefficient is adapted; empty if it is not adapted."""


class UpdateRecord(NamedTuple):
    """The measurements of an update; scalars on the devices."""

    grad_norm: Float[Array, ""]
    """The global norm of the step's gradient before clipping."""
    learning_rate: Float[Array, ""]
    step_kept: Float[Array, ""]
    """How far the parameters moved in the direction of the intended step, relative to the step's length; 1 if rounding
    lost nothing. Movement perpendicular to the step, which stochastic rounding adds, does not count."""
    finite: Bool[Array, ""]
    """Whether loss and norm are finite. If not, the update was skipped: parameters and state are unchanged."""
    entropy_coefficient: Float[Array, ""] | None = None
    """The coefficient of the update's entropy bonus; None if it is not adapted."""


class UpdateState(NamedTuple):
    """The state that an update needs beside the model's parameters; checkpoints hold it."""

    count: Int[Array, ""]
    """The number of updates so far."""
    optimizer: Any
    kept: Values
    """What the optimizer updates in addition to the model's own parameters: float32 copies, or int8 residuals; empty
    if neither is used."""
    entropy: EntropyState | tuple[()] = ()
    """The coefficient of the entropy bonus; empty if it is not adapted."""


class Updater:
    """Updates a model in place. Raises the ConfigErrors of `learning_rate_schedule` and `build_optimizer`.

    Args:
        section: the optimizer.
        updates: the number of updates of the run, for the learning rate.
        model: its trained parameters are arrays, or descriptions of arrays if nothing is to be run.
        stepped: the trained parameters in the type in which the optimizer updates them, by name. Where this is also the
            model's type, they are the model's own arrays. Others are donated: the caller must not use them again.
        settings: the loss, and the trainer's mesh.
        slices: the slices whose gradients are added.
        concurrent: how many micro-batches the device computes at the same time, each added to a sum of its own. More
            than 1 is for CPUs, whose cores wait for each other in every operation of a small micro-batch.
    """

    def __init__(
        self,
        section: OptimizerSection,
        updates: int,
        model: nnx.Module,
        stepped: Values,
        settings: LossSettings,
        slices: Slices = ONE_SLICE,
        concurrent: int = 1,
    ):
        self.model, self._slices, self._concurrent = model, slices, concurrent
        self._kind, self._settings, self._mesh = trained_type(model), settings, settings.mesh
        self._shared = frozenset(self.trained)
        self._sums: PassSums | None = None
        self.broken: tuple[str, ...] = ()
        """The names of the gradients that were not finite in the last step."""
        self._layout = {name: leaf.sharding for name, leaf in stepped.items()}
        schedule = learning_rate_schedule(section, updates)
        self._functions = functions = _Functions(
            model,
            nnx.split(model)[0],
            build_optimizer(section, schedule, stepped),
            schedule,
            settings,
            {name: leaf.dtype for name, leaf in self.trained.items()},
            section.max_grad_norm,
            residual=any(leaf.dtype == jnp.bfloat16 for leaf in stepped.values()),
        )
        whole, kinds = settings.everywhere, self._described_sums
        sums_layout = jax.tree.map(lambda kind: kind.sharding, kinds)
        self.state, state_layout = self._initial(stepped)
        # Results get exactly the shardings of the arguments that they replace. The compiler would choose others, or
        # spell them otherwise, and the next call would trace its program again.
        self._accumulate = jax.jit(functions.accumulated, donate_argnums=0, out_shardings=(sums_layout, whole))
        added = lambda some, others: jax.tree.map(jnp.add, some, others)  # noqa: E731
        self._add = jax.jit(added, donate_argnums=0, out_shardings=sums_layout)
        self._measure = jax.jit(functions.measured)
        # With float32 copies, the step does not read the model's own arrays; keep_unused allows their donation.
        step_layout = self._layout, state_layout, whole
        self._step = jax.jit(functions.stepped, donate_argnums=(2, 3, 4), keep_unused=True, out_shardings=step_layout)
        self._join = jax.jit(functions.joined)
        made = lambda: jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)  # noqa: E731
        self._zeros = jax.jit(made, out_shardings=sums_layout)
        self._histogram = jax.jit(histogram, out_shardings=whole)

    @property
    def trained(self) -> Values:
        """The trained parameters by name, in the type in which the model computes."""
        return by_name(nnx.state(self.model, self._kind))

    def stepped(self) -> Values:
        """Return the trained parameters in float32, the precision in which the optimizer updates them, by name."""
        return (self._join if self._functions.residual else self._functions.joined)(self.trained, self.state.kept)

    def share(self, names: Collection[str]) -> None:
        """Name the parameters whose arrays the sampler also uses; an update donates the buffers of all other
        parameters. Before the first call, updates donate the buffer of no parameter."""
        self._shared = frozenset(names)

    def accumulate(self, batches: Sequence[TrainBatch]) -> list[LossSums]:
        """Sum the gradients of the next step over its micro-batches, and over all slices, each of which passes its own.
        Return the sums of each micro-batch's forward pass."""
        read, numbers = self._model_values(), self._settings.placed_numbers(self.state.entropy)
        sums = [self._zeros() for _ in batches[: self._concurrent]]
        measured: list[Any] = [None] * len(batches)

        def compute(number: int, places: Iterable[int]) -> None:
            with self._mesh:
                for place in places:
                    sums[number], measured[place] = self._accumulate(sums[number], *read, batches[place], numbers)

        def compute_rest(number: int) -> None:
            compute(number, range(number or self._concurrent, len(batches), self._concurrent))

        compute(0, [0])  # compiles the program, once
        if self._concurrent == 1:
            compute_rest(0)
        else:
            with ThreadPoolExecutor(self._concurrent) as pool:  # jax runs in order what one thread asks for
                list(pool.map(compute_rest, range(len(sums))))
        self._sums = self._slices.add(functools.reduce(self._add, sums))
        return measured

    def gradients(self) -> Values:
        """Return the sum of the gradients since the last step, float32, by name."""
        assert self._sums is not None, "accumulate comes before gradients"
        return self._sums.gradients

    def forget_gradients(self) -> None:
        """Drop the sum of the gradients since the last step."""
        self._sums = None

    def histograms(self) -> dict[str, Histogram]:
        """Make histograms of the gradients since the last step and of the trained parameters, on the devices."""
        arrays = {"gradients": self.gradients(), "parameters": self.trained}
        with self._mesh:
            return {
                f"{kind}/{name}": self._histogram(v) for kind, values in arrays.items() for name, v in values.items()
            }

    def step(self) -> UpdateRecord:
        """Let the optimizer step once with the sum of the gradients, and clear the sum.

        No step is made if the loss or the gradient norm is not finite; the record's ``finite`` is then False.
        """
        assert self._sums is not None, "accumulate comes before step"
        sums, self._sums = self._sums, None
        with self._mesh:
            record = self._measure(sums, self.state.count, self.state.entropy)
            finite = bool(record.finite)  # the first time that the host waits
            self.broken = () if finite else tuple(n for n, g in sums.gradients.items() if not bool(_is_finite(g)))
            if not finite:
                return record
            changed, self.state, kept = self._step(*self._step_arguments(sums, self._shared), record.grad_norm)
        nnx.update(self.model, _as_state(self.model, self._kind, changed))
        return record._replace(step_kept=kept)

    def lower_accumulate(self, batch: Any) -> jax.stages.Lowered:
        """Lower the forward and backward pass of a micro-batch, for arrays or their descriptions."""
        arguments = (*self._model_values(), batch, self._settings.described_numbers)
        with self._mesh:
            return self._accumulate.lower(self._described_sums, *arguments)

    def lower_step(self, shared: Collection[str]) -> jax.stages.Lowered:
        """Lower the optimizer's step, which donates the buffers of all parameters but the ``shared`` ones."""
        sums = self._described_sums
        with self._mesh:  # the description of the loss also fits the norm
            return self._step.lower(*self._step_arguments(sums, shared), sums.loss)

    def lower_sum_over_slices(self) -> jax.stages.Lowered:
        """Lower the program that sums gradients over slices, for several slices."""
        return self._slices.lower_add(self._described_sums)

    def _step_arguments(self, sums: PassSums, shared: Collection[str]) -> tuple[Any, ...]:
        """Divide the step's arguments into arrays that stay intact (the first two) and arrays that are donated. The
        new value of a shared parameter gets the buffer of its gradient, if both have the same type."""
        trained, gradients = self.trained, sums.gradients
        held = {name: value for name, value in trained.items() if name in shared}
        free = {name: value for name, value in trained.items() if name not in shared}
        reused = {name: gradients[name] for name, value in held.items() if value.dtype == gradients[name].dtype}
        read = {name: value for name, value in gradients.items() if name not in reused}
        return held, sums._replace(gradients=read), free, self.state, reused

    def _initial(self, stepped: Values) -> tuple[UpdateState, Any]:
        """Make the state before the first update, and its shardings; if parameters are described, so is the state."""
        functions, whole = self._functions, self._settings.everywhere
        shapes = jax.eval_shape(functions.first_state, stepped)
        shardings: Any = UpdateState(
            whole,  # pyrefly: ignore[bad-argument-type]  # a sharding in the place of its array
            state_shardings(shapes.optimizer, stepped),
            {name: self._layout[name] for name in shapes.kept},
            jax.tree.map(lambda _: whole, shapes.entropy),
        )
        if isinstance(next(iter(stepped.values())), jax.ShapeDtypeStruct):
            describe = lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of)  # noqa: E731
            return jax.tree.map(describe, shapes, shardings), shardings
        copies = bool(shapes.kept) and not functions.residual  # these are ``stepped``'s arrays, which nobody else holds
        made = jax.jit(functions.first_state, out_shardings=shardings, donate_argnums=0 if copies else ())(stepped)
        return made, shardings

    @property
    def _described_sums(self) -> PassSums:
        """The shapes, types and shardings of `PassSums`: all float32, the gradients sharded like the parameters."""
        number: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._settings.everywhere)
        gradients = {
            name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=self._layout[name])
            for name, leaf in self.trained.items()
        }
        adapted = self._settings.section.entropy_target is not None
        return PassSums(gradients, number, EntropySums(number, number) if adapted else ())

    def _model_values(self) -> tuple[Values, nnx.State]:
        _, trained, others = nnx.split(self.model, self._kind, ...)
        return by_name(trained), others


@dataclass(frozen=True, eq=False)
class _Functions:
    """What the programs of an update compute, as functions of arrays."""

    model: nnx.Module
    """Only says which parameters are trained; the functions take the values as arguments."""
    definition: nnx.GraphDef[Any]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    settings: LossSettings
    dtypes: Mapping[str, Any]
    """The type in which the model computes with each trained parameter."""
    max_grad_norm: float
    residual: bool

    def accumulated(
        self, sums: PassSums, trained: Values, others: nnx.State, batch: TrainBatch, numbers: Values
    ) -> tuple[PassSums, LossSums]:
        kind = trained_type(self.model)

        def loss(values: Values) -> tuple[Float[Array, ""], LossSums]:
            own = jax.tree.map(lambda leaf: leaf, others)  # nnx.remat refuses variables from outside of the gradient
            model = nnx.merge(self.definition, _as_state(self.model, kind, values), own)
            return policy_loss(model, batch, self.settings, numbers)

        gradients, measured = jax.grad(loss, has_aux=True)(trained)
        added = {name: value + gradients[name].astype(jnp.float32) for name, value in sums.gradients.items()}
        entropy = sums.entropy
        if isinstance(entropy, EntropySums):
            entropy = EntropySums(entropy.entropy + measured.entropy, entropy.tokens + measured.agreement.tokens)
        return PassSums(added, sums.loss + measured.loss, entropy), measured

    def measured(self, sums: PassSums, count: Int[Array, ""], entropy: EntropyState | tuple[()]) -> UpdateRecord:
        """Make the update's record before the step; `stepped` computes ``step_kept``, which is 1 here."""
        norm: Any = optax.global_norm(sums.gradients)  # Any, because optax declares that it may be a Python number
        rate = jnp.asarray(self.schedule(count), jnp.float32)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        coefficient = entropy.applied if isinstance(entropy, EntropyState) else None
        return UpdateRecord(norm, rate, jnp.ones(()), finite, coefficient)

    def stepped(
        self, held: Values, read: PassSums, free: Values, state: UpdateState, reused: Values, norm: Float[Array, ""]
    ) -> tuple[Values, UpdateState, Float[Array, ""]]:
        gradients = read.gradients | reused
        values = self.joined(held | free, state.kept)
        scale = jnp.where(norm > self.max_grad_norm, self.max_grad_norm / norm, 1.0)
        scaled = {name: gradient * scale for name, gradient in gradients.items()}
        update: Any = self.optimizer.update
        meant, optimizer = update(scaled, state.optimizer, values)
        trained, kept = self._split({name: values[name] + meant[name] for name in values}, state.count)
        arrived = self.joined(trained, kept)
        length = sum((jnp.square(step).sum() for step in meant.values()), jnp.zeros(()))
        along = sum(((arrived[name] - values[name]) * meant[name]).sum() for name in values)
        entropy = state.entropy
        if isinstance(entropy, EntropyState) and isinstance(read.entropy, EntropySums):
            entropy = entropy.after(read.entropy, self.settings.section)
        after = UpdateState(state.count + 1, optimizer, kept, entropy)
        return trained, after, jnp.where(length > 0.0, along / length, 1.0)

    def first_state(self, stepped: Values) -> UpdateState:
        values = {name: value.astype(jnp.float32) for name, value in stepped.items()}
        kept = {name: value for name, value in values.items() if value.dtype != self.dtypes[name]}
        if self.residual:
            kept = {name: jnp.zeros(value.shape, jnp.int8) for name, value in values.items()}
        entropy = EntropyState.first(self.settings.section)
        return UpdateState(jnp.zeros((), jnp.int32), self.optimizer.init(values), kept, entropy)

    def joined(self, trained: Values, kept: Values) -> Values:
        """Return the float32 parameters that the optimizer updates, from the model's and `UpdateState.kept`."""
        if self.residual:
            return {name: join_residual(value, kept[name]) for name, value in trained.items()}
        return {name: kept.get(name, value) for name, value in trained.items()}

    def _split(self, values: Values, count: Int[Array, ""]) -> tuple[Values, Values]:
        """Split ``values`` into the parameters that the model computes with, and the ``kept`` of `UpdateState`."""
        if self.residual:
            key = jax.random.fold_in(jax.random.key(0), count)
            parts = {
                name: split_residual(value, jax.random.fold_in(key, index))
                for index, (name, value) in enumerate(sorted(values.items()))
            }
            return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
        cast = {name: value.astype(self.dtypes[name]) for name, value in values.items()}
        return cast, {name: value for name, value in values.items() if value.dtype != self.dtypes[name]}


@jax.jit
def _is_finite(values: Float[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(values).all()


def histogram(values: Float[Array, "..."]) -> Histogram:
    """Count an array's elements in buckets, one edge at a time: this needs no extra memory, whatever the sharding."""
    values = values.astype(jnp.float32)
    low, high = values.min(), values.max()
    half = jnp.where(low == high, 0.5, 0.0)  # as in NumPy, so that buckets of equal values have a width
    edges = jnp.linspace(low - half, high + half, BUCKETS + 1)
    below = jax.lax.map(lambda edge: (values < edge).sum(), edges[1:-1])
    counts = jnp.diff(below, prepend=0, append=values.size)
    return Histogram(edges, counts, values.sum(), jnp.square(values).sum())  # pyrefly: ignore[bad-argument-type]  # as jax.Arrays


def _as_state(model: nnx.Module, kind: Any, values: Mapping[str, Any]) -> nnx.State:
    template = nnx.to_flat_state(nnx.state(model, kind))
    return nnx.from_flat_state([(path, leaf.replace(values[dotted(path)])) for path, leaf in template])


# --- metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredUpdate:
    """One of a step's updates, on the host."""

    sums: list[LossSums]
    """The sums of each of the update's micro-batches."""
    record: UpdateRecord
    histograms: Mapping[str, Histogram]
    """Histograms of the gradients, and of the parameters before the update; empty in steps that log none."""
    sampled_by: AgreementSums | None = None
    """With algorithm.staleness, the engine's agreement with the policy it sampled with; for a step's first update."""
    broken: tuple[str, ...] = ()
    """The names of the gradients that are not finite; also empty if each is, but the sum of their squares is not."""

    @property
    def loss(self) -> float:
        """The loss over all micro-batches."""
        return sum(float(each.loss) for each in self.sums)


def update_metrics(updates: Sequence[MeasuredUpdate], *, stale: bool = False) -> dict[str, float]:
    """Compute ``update/*`` and ``correction/*`` over all updates, and ``agreement/*`` over the first update's tokens.

    The first update starts from the parameters that the engine sampled with or, with algorithm.staleness (``stale``),
    from those after one more step.

    Loss, and gradient norm before clipping, are means over the updates. Entropy, KL, clip fraction and ratio are means
    over tokens. The learning rate is that of the last update, and ``step_kept`` is the smallest of all updates. These
    metrics leave out skipped updates, unless every update was skipped.
    """
    made = [update for update in updates if update.record.finite] or list(updates)
    micro, records = [sums for update in made for sums in update.sums], [update.record for update in made]
    tokens = sum(float(sums.agreement.tokens) for sums in micro)
    excess = [sums.agreement.excess_sum if sums.ratio_excess is None else sums.ratio_excess for sums in micro]
    corrected = [sums.correction for sums in micro if sums.correction is not None]
    coefficient = updates[-1].record.entropy_coefficient

    def mean(values: Sequence[Any], count: float) -> float:
        numbers = [float(value) for value in values]
        total = math.fsum if all(map(math.isfinite, numbers)) else sum  # fsum raises for infinities of both signs
        return total(numbers) / count

    return {
        "update/loss": mean([sums.loss for sums in micro], len(made)),
        "update/grad_norm": mean([record.grad_norm for record in records], len(made)),
        "update/applied_fraction": min(float(record.step_kept) for record in records),
        "update/kl": mean([sums.kl for sums in micro], tokens),
        "update/entropy": mean([sums.entropy for sums in micro], tokens),
        "update/clip_fraction": mean([sums.clipped for sums in micro], tokens),
        "update/ratio_mean": 1.0 + mean(excess, tokens),
        "update/learning_rate": float(records[-1].learning_rate),
        "update/skipped": sum(not update.record.finite for update in updates),
        **agreement_by_age(updates[0].sums, stale=stale, sampled_by=updates[0].sampled_by),
        **(correction_metrics(corrected) if corrected else {}),
        **({} if coefficient is None else {"update/entropy_coefficient": float(coefficient)}),
    }
