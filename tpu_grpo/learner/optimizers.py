"""The optimizers, by name, and the learning rate of every update.

    optimizer = build_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.updates), params)
    state = optimizer.init(params)
    updates, state = optimizer.update(gradients, state, params)      # params + updates is the step

Parameters are a flat dict by name. The optimizers are optax's. A new shipped optimizer is a function here and a line in
`SHIPPED`; the config can also name a user's own function.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tpu_grpo.config import OptimizerSection
from tpu_grpo.config.plugins import find_function, not_shipped
from tpu_grpo.hosts.sharded_arrays import mesh_axes
from tpu_grpo.learner.compact import block_size, compact, parameter_name
from tpu_grpo.records.errors import ConfigError

Params = Mapping[str, Any]
"""The trained parameters, arrays or their descriptions, by dotted name."""
Direction = Callable[..., optax.GradientTransformation]
"""A function of the optimizer section, the parameters and the optimizer's own options. It returns the transformation
of gradients into a step, to which weight decay and learning rate are applied later."""


def _adamw(section: OptimizerSection, params: Params, *, eps: float = 1e-8) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""
    return optax.scale_by_adam(b1=section.b1, b2=section.b2, eps=eps)


def _lion(section: OptimizerSection, params: Params) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023, arXiv 2302.06675) steps by the sign of a momentum. The paper advises a third of
    AdamW's learning rate."""
    return optax.scale_by_lion(b1=section.b1, b2=section.b2)


def _sgd(
    section: OptimizerSection, params: Params, *, momentum: float = 0.0, nesterov: bool = False
) -> optax.GradientTransformation:
    return optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()


def _adafactor(
    section: OptimizerSection, params: Params, *, decay_rate: float = 0.8, clip_rms: float = 1.0
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without momentum, at the learning rate of the config."""
    return optax.chain(optax.scale_by_factored_rms(decay_rate=decay_rate), optax.clip_by_block_rms(clip_rms))


def _muon(
    section: OptimizerSection, params: Params, *, beta: float = 0.95, ns_steps: int = 5, rms: float = 0.2
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices in the layers, Adam for all other parameters. Muon's steps have the root mean
    square ``rms``; with 0.2, AdamW's learning rates can be used (arXiv 2502.16982)."""
    axes = {name: matrix_axes(name, tuple(leaf.shape)) for name, leaf in params.items()}

    def of_matrices(tree: Any) -> Any:
        return {n: _tall(params[n].shape, found) if (found := axes[n]) else optax.MaskedNode() for n in tree}

    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=beta, ns_steps=ns_steps, weight_dimension_numbers=of_matrices),
        _multiplied({name: rms * math.sqrt(longer_side(params[name].shape, axes[name])) for name in axes}),
    )
    return optax.partition(
        {"muon": matrices, "adam": optax.scale_by_adam(b1=section.b1, b2=section.b2)},
        {name: "adam" if found is None else "muon" for name, found in axes.items()},
    )


SHIPPED: Mapping[str, Direction] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
    "lion": _lion,
    "sgd": _sgd,
}
"""The optimizers that ship, by ``optimizer.name``; adamw_8bit is AdamW with ``optimizer.state`` compact."""


def build_optimizer(
    section: OptimizerSection, schedule: optax.Schedule, params: Params
) -> optax.GradientTransformation:
    """Build a run's optimizer for these parameters, arrays or their descriptions.

    Raises ConfigError for an unknown name, or options that the optimizer does not take.
    """
    if ":" in section.name:
        optimizer = _own(section, schedule)
    else:
        decay = section.weight_decay
        decayed = optax.add_decayed_weights(decay) if decay else optax.identity()
        optimizer = optax.chain(_shipped(section, params), decayed, optax.scale_by_learning_rate(schedule))
    if section.compact:
        optimizer = compact(optimizer, {name: block_size(leaf) for name, leaf in params.items()})
    return optimizer


def learning_rate_schedule(section: OptimizerSection, updates: int) -> optax.Schedule:
    """Return the learning rate as a function of the update u = 0, 1, ..., N - 1 of a run with N = ``updates``.

    With W warm-up updates the rate is p * u / W for u < W, where p is the peak. For u >= W:

        constant          stays p
        linear, cosine    falls from p at u = W to 0 at u = N, just after the last update
        wsd               stays p, and falls linearly to 0 over the last D updates (warm-up, stable, decay)

    For example, linear with N = 4 and W = 2 gives 0, p/2, p, p/2. ``optimizer.schedule_steps`` sets an N that is larger
    than the run's number of updates. Raises ConfigError if N is smaller than this number, if N <= W with a schedule
    other than constant, or if N <= W + D with wsd.
    """
    peak, warmup, decay = section.learning_rate, section.warmup_steps, section.decay_steps
    total, counted = updates, "run.max_steps * updates of a step"
    if (steps := section.schedule_steps) is not None:
        if steps < total:
            raise ConfigError(
                f"optimizer.schedule_steps must be >= {counted} = {total}, got {steps}; raise it: later updates "
                "would have a rate of 0"
            )
        total, counted = steps, "optimizer.schedule_steps"
    if section.schedule != "constant" and warmup >= total:
        raise ConfigError(
            f"optimizer.warmup_steps must be < {counted} = {total} with optimizer.schedule={section.schedule}, got "
            f"{warmup}; lower it, or use schedule=constant"
        )
    if section.schedule == "wsd" and warmup + decay >= total:
        raise ConfigError(
            f"optimizer.warmup_steps + optimizer.decay_steps must be < {counted} = {total} with "
            f"optimizer.schedule=wsd, got {warmup} + {decay}; lower them, or use schedule=linear"
        )
    schedules: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, max(total - warmup, 1)),
        "cosine": optax.cosine_decay_schedule(peak, max(total - warmup, 1)),
        "wsd": optax.linear_schedule(peak, 0.0, max(decay, 1), transition_begin=max(total - warmup - decay, 0)),
    }
    after = schedules[section.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def matrix_axes(name: str, shape: tuple[int, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Return the axes of a parameter that are a matrix's rows and columns; None for a parameter that is not a
    matrix of a layer.

    Embeddings and the output head give None, because Muon's own code leaves them to Adam. With width D and N attention
    heads of size H, a projection to heads [D, N, H] is a D x NH matrix, and the output projection [N, H, D] is an
    NH x D matrix. Gemma's [N, D, H] is a D x NH matrix, and its [2, N, D, H] are two such matrices. [E, D, F] is a
    D x F matrix for each of E experts.
    """
    axes = len(shape)
    if axes < 2 or not name.startswith("layers."):
        return None
    if axes == 2 or ".attn." not in name:
        return optax.contrib.MuonDimensionNumbers(axes - 2, axes - 1)
    if "o_proj" in name or "attn_vec_einsum" in name:
        return optax.contrib.MuonDimensionNumbers((axes - 3, axes - 2), (axes - 1,))
    if "einsum" in name and "_lora_" not in name:
        return optax.contrib.MuonDimensionNumbers((axes - 2,), (axes - 3, axes - 1))
    return optax.contrib.MuonDimensionNumbers((axes - 3,), (axes - 2, axes - 1))


def longer_side(shape: tuple[int, ...], axes: optax.contrib.MuonDimensionNumbers | None) -> int:
    """Return the larger of a matrix's numbers of rows and columns; 1 for a parameter that is not a matrix."""
    return 1 if axes is None else max(_entries(shape, axis) for axis in axes)


def _entries(shape: tuple[int, ...], axes: int | Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes))


def _tall(shape: tuple[int, ...], axes: optax.contrib.MuonDimensionNumbers) -> optax.contrib.MuonDimensionNumbers:
    """Swap the axes of a matrix with more columns than rows, so that ``scale_by_muon`` of optax 0.2.6 does not multiply
    its update by sqrt(columns / rows). The orthogonalisation is the same."""
    if _entries(shape, axes.reduction_axis) >= _entries(shape, axes.output_axis):
        return axes
    return optax.contrib.MuonDimensionNumbers(axes.output_axis, axes.reduction_axis)


def state_shardings(state: Any, params: Params) -> Any:
    """Return the sharding of every part of an optimizer's state, described by ``jax.eval_shape``.

    An array of a parameter's shape is sharded like the parameter, and so are the scales of its eight-bit blocks. An
    array that lacks one axis (the sums of a factored second moment) is sharded like the axes that it has. All other
    arrays are replicated.
    """
    mesh = next(iter(params.values())).sharding.mesh

    def leaf(path: tuple[Any, ...], value: Any) -> NamedSharding:
        name = parameter_name(path)
        if name is None or name not in params:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, _spec_of_part(value.shape, params[name]))

    return jax.tree_util.tree_map_with_path(leaf, state)


def _spec_of_part(shape: tuple[int, ...], param: Any) -> PartitionSpec:
    spec = mesh_axes(param)
    shards = param.shape[-1] // param.sharding.shard_shape(param.shape)[-1] if param.shape else 1
    same = len(shape) == len(param.shape) and shape[:-1] == param.shape[:-1]
    if shape == param.shape or (same and shape[-1] % shards == 0):  # itself, or the scales of its blocks
        return PartitionSpec(*spec)
    for axis in range(len(param.shape)):
        if shape == param.shape[:axis] + param.shape[axis + 1 :]:
            return PartitionSpec(*spec[:axis], *spec[axis + 1 :])
    return PartitionSpec()


def _shipped(section: OptimizerSection, params: Params) -> optax.GradientTransformation:
    if section.name not in SHIPPED:
        raise not_shipped(f"optimizer.name={section.name}", section.name, "optimizer", SHIPPED, ConfigError)
    try:
        return SHIPPED[section.name](section, params, **section.options)
    except TypeError as error:
        raise ConfigError(
            f"optimizer.options must be keyword arguments of {section.name}, got {section.options} ({error}); correct "
            "them"
        ) from error


def _own(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    function = find_function(section.name, "optimizer", ConfigError)
    if section.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay is the function's own affair with optimizer.name={section.name}, got "
            f"{section.weight_decay}; pass it in optimizer.options"
        )
    try:
        made = function(learning_rate=schedule, **section.options)
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"optimizer {section.name}: calling it with learning_rate and the options {section.options} raised "
            f"{type(error).__name__}: {error}; repair it"
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer {section.name} must return an optax.GradientTransformation, got a {type(made).__name__}; "
            "return e.g. optax.adamw(learning_rate)"
        )
    return made


def _multiplied(rates: Mapping[str, float]) -> optax.GradientTransformation:
    def multiplied(updates: Any, _: Any) -> Any:
        return {n: v if isinstance(v, optax.MaskedNode) else rates[n] * v for n, v in updates.items()}

    return optax.stateless(multiplied)
