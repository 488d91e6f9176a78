"""The plan of a weight sync: it pairs the trainer's leaves (parameter arrays) with the sampler's, and groups them.

    moves = plan_sync(checkpoint.weight_rules, named_leaves(trainer_params), replicas.weight_specs)
    groups = group_moves([move for move in moves if not move.aliased], limit_bytes=32 * 2**20)

A leaf whose shape, type and sharding are the same on both sides is aliased: the sampler uses the trainer's buffers, and
nothing is copied. That is safe because an update does not donate the buffers of such leaves (`Learner.share`). A weight
with a LoRA adapter is merged with the adapter during the move.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import Precision
from jaxtyping import Array, Float

from tpu_grpo.hosts.sharded_arrays import Spec, bytes_per_device, named_sharding
from tpu_grpo.models.families.leaves import Transform, WeightRule, same
from tpu_grpo.records.errors import WeightsError

WEIGHT, QUANTIZED, SCALE = ".weight", ".weight_q", ".weight_scale"
"""The suffixes of a matrix of the sampler, and of the two leaves that it has in its place with int8 weights."""
LARGEST = 127
"""The largest magnitude of an int8 weight; -128 has no counterpart."""


@dataclass(frozen=True)
class Quantized:
    """Makes the sampler's matrix [inputs, outputs] by ``dense``, and returns it in 8 bits, or its scales.

    An output's scale is its largest magnitude / 127, in float32. Weights are divided by it, and rounded to the nearest
    integer, halves to even, which has no bias; sglang-jax's `quantize_tensor` would truncate towards zero.
    """

    dense: Transform
    shape: tuple[int, ...]
    """The shape of the matrix."""
    part: Literal[".weight_q", ".weight_scale"]

    def __call__(self, leaf: Array, shape: tuple[int, ...]) -> Array:
        """Return int8 [outputs, inputs], or float32 [outputs]; see `Transform`."""
        del shape
        matrix = self.dense(leaf, self.shape).astype(jnp.float32)
        scales = jnp.abs(matrix).max(axis=0) / LARGEST
        if self.part == SCALE:
            return scales
        return jnp.round(matrix / jnp.where(scales > 0, scales, 1.0)).astype(jnp.int8).T

    def __str__(self) -> str:
        """Name the transform, for a plan."""
        return f"{getattr(self.dense, '__name__', str(self.dense))}, in 8 bits"


A, B = "_lora_a", "_lora_b"
"""The suffixes that qwix appends to a weight's name for the two matrices of its adapter."""


def adapters_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map the name of every weight that has an adapter to the names of the adapter's two matrices."""
    return {name.removesuffix(A): (name, name.removesuffix(A) + B) for name in names if name.endswith(A)}


def merged(
    weight: Array, a: Float[Array, "*inputs r"], b: Float[Array, "r *outputs"], scale: float, input_axis: int = 0
) -> Array:
    """Return weight + scale * a b, with the product's first axis moved to ``input_axis``, computed in float32."""
    product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=Precision.HIGHEST)
    return weight.astype(jnp.float32) + scale * jnp.moveaxis(product, 0, input_axis)


Leaves = Mapping[str, Array]


@dataclass(frozen=True)
class LeafMove:
    """How one leaf (parameter array) of the sampler is made from the trainer's leaves."""

    sources: tuple[str, ...]
    """Names the trainer's leaf and, if it has an adapter, the adapter's two matrices."""
    target: str
    """Names the sampler's leaf."""
    transform: Transform
    source_specs: tuple[Spec, ...]
    spec: Spec
    """Shape, type and sharding of the sampler's leaf."""
    aliased: bool
    """Whether the sampler uses the trainer's buffers, so that nothing moves."""
    frozen: bool = False
    """Whether no update changes the leaf, so that it moves only once."""
    scale: float = 0.0
    """The factor of the adapter, alpha / rank."""
    input_axis: int = 0
    """The axis of the trainer's leaf that corresponds to the first axis of the adapter's product."""

    @property
    def source(self) -> str:
        """The name of the trainer's leaf: the first of ``sources``."""
        return self.sources[0]

    @property
    def merges(self) -> bool:
        """Whether the leaf has an adapter, which is merged with it."""
        return len(self.sources) > 1

    def result(self, leaves: Sequence[Array]) -> Array:
        """Compute the sampler's leaf from the values of ``sources``."""
        leaf, *adapter = leaves
        if self.merges:
            leaf = merged(leaf, adapter[0], adapter[1], self.scale, self.input_axis)
        return self.transform(leaf, self.spec.shape).astype(self.spec.dtype)

    @property
    def bytes(self) -> int:
        """Bytes that the move writes, counting one copy of the leaf; an aliased leaf writes none."""
        return 0 if self.aliased else int(np.prod(self.spec.shape)) * self.spec.dtype.itemsize

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything that the compiled program of this move depends on; moves with equal signatures share a program.

        It holds the index ranges of each device instead of shardings, because after an update a leaf may have another
        sharding with the same ranges.
        """
        specs = (*self.source_specs, self.spec)
        return self.transform, self.scale, self.input_axis, *((s.shape, s.dtype, _places(s)) for s in specs)


def _places(spec: Spec) -> tuple[Any, ...]:
    """Return the index ranges of an array that each device holds."""
    places = named_sharding(spec).devices_indices_map(spec.shape)
    return tuple((device.id, *((part.start, part.stop) for part in parts)) for device, parts in places.items())


def named_leaves(params: nnx.State) -> dict[str, Array]:
    """Name the arrays of a trainer's state by their dotted paths, such as ``layers.0.attn.q_proj.w``."""
    return {".".join(map(str, path)): leaf.value for path, leaf in nnx.to_flat_state(params)}


def plan_sync(
    rules: Sequence[WeightRule],
    source: Leaves | Mapping[str, Spec],
    target: Mapping[str, Spec],
    *,
    lora_alpha: float = 0.0,
    frozen: Collection[str] = (),
) -> tuple[LeafMove, ...]:
    """Match every leaf of the trainer with the leaves of the sampler that are made from it (mostly one).

    Args:
        rules: the weight rules of the model's family.
        source: the trainer's leaves or their specs, by name.
        target: the specs of the sampler's leaves, by name.
        lora_alpha: the alpha of the adapters among the trainer's leaves.
        frozen: names of the trainer's leaves that no update changes.

    Raises:
        WeightsError: if a name has no counterpart (the message lists them), or the shapes of a pair do not correspond.
    """
    adapters = adapters_of(source)
    parts = {part for pair in adapters.values() for part in pair}
    found = {name: _matches(name, rules) for name in source if name not in parts}
    pairs = [(target, (name, rule)) for name, matches in found.items() for target, rule in matches]
    filled_by = {filled: by for each, by in pairs for filled, by in _quantized(each, by, target)}
    unknown = sorted(name for name, matches in found.items() if not matches)
    missing, extra = sorted(target.keys() - filled_by.keys()), sorted(filled_by.keys() - target.keys())
    if unknown or missing or extra:
        raise WeightsError(
            f"trainer and sampler parameters do not correspond: trainer leaves without a rule {unknown}, "
            f"sampler leaves that nothing fills {missing}, rules whose target the sampler lacks {extra}"
        )
    moves = []
    for name, spec in target.items():
        leaf, rule = filled_by[name]
        sources = {part: source[part] for part in (leaf, *adapters.get(leaf, ()))}
        moves.append(plan_move(sources, rule, name, spec, lora_alpha, leaf in frozen and leaf not in adapters))
    return tuple(moves)


def shared_leaves(moves: Iterable[LeafMove]) -> frozenset[str]:
    """Return the trainer's leaves whose arrays the sampler uses as well."""
    return frozenset(move.source for move in moves if move.aliased)


def _quantized(
    name: str, by: tuple[str, WeightRule], target: Mapping[str, Spec]
) -> Iterable[tuple[str, tuple[str, WeightRule]]]:
    """Yield (sampler leaf, (trainer leaf, rule)): the pair itself, or the pairs of a matrix that is in 8 bits."""
    matrix = target.get(name.removesuffix(WEIGHT) + QUANTIZED)
    if matrix is None:
        yield name, by
        return
    for part in (QUANTIZED, SCALE):
        transform = Quantized(by[1].transform, matrix.shape[::-1], part)
        yield name.removesuffix(WEIGHT) + part, (by[0], replace(by[1], transform=transform))


def group_moves(moves: Sequence[LeafMove], limit_bytes: int) -> list[tuple[LeafMove, ...]]:
    """Group moves, so that each group gets one program; a group's results take at most ``limit_bytes`` per device.

    A group holds as many whole layers as fit. A layer that does not fit is split into groups of as many leaves as fit,
    and a leaf above the limit is a group of its own. Equal layers are grouped alike and therefore share programs.
    """
    groups: list[list[LeafMove]] = [[]]
    for layer in _layers(moves):
        fits = _bytes_per_device(layer) <= limit_bytes
        for unit in [layer] if fits else [[move] for move in layer]:
            if groups[-1] and _bytes_per_device([*groups[-1], *unit]) > limit_bytes:
                groups.append([])
            groups[-1] += unit
        if not fits:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _layers(moves: Iterable[LeafMove]) -> Iterable[list[LeafMove]]:
    """Collect the moves of each layer; each leaf outside the layers has a list of its own."""
    layers: dict[str, list[LeafMove]] = {}
    for move in moves:
        layer = re.search(r"\.\d+\.", move.target)
        layers.setdefault(layer[0] if layer else move.target, []).append(move)
    return layers.values()


def _bytes_per_device(moves: Iterable[LeafMove]) -> int:
    return sum(bytes_per_device(move.spec) for move in moves)


def _matches(name: str, rules: Sequence[WeightRule]) -> list[tuple[str, WeightRule]]:
    """List (name, rule) of each sampler leaf that is made from this trainer leaf."""
    matches = []
    for rule in rules:
        if found := re.fullmatch(re.escape(rule.source).replace(r"\*", r"(\d+)"), name):
            matches.append((rule.target.replace("*", found.group(1)) if found.groups() else rule.target, rule))
    return matches


def plan_move(
    sources: Mapping[str, Array | Spec], rule: WeightRule, target: str, spec: Spec, alpha: float, frozen: bool
) -> LeafMove:
    """Plan the move of one leaf. See ``plan_sync`` for the arguments and errors."""
    (name, leaf), *adapter = sources.items()
    try:
        shape = jax.eval_shape(lambda x: rule.transform(x, spec.shape), leaf).shape
    except (TypeError, ValueError, IndexError) as error:
        raise WeightsError(f"{name} {list(leaf.shape)} cannot become {list(spec.shape)}: {error}") from error
    if shape != spec.shape:
        raise WeightsError(f"{name} {list(leaf.shape)} becomes {list(shape)}, the sampler wants {list(spec.shape)}")
    alike = leaf.dtype == spec.dtype and _same_layout(leaf.sharding, spec.sharding, leaf.ndim)
    return LeafMove(
        sources=tuple(sources),
        target=target,
        transform=rule.transform,
        source_specs=tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding) for s in sources.values()),
        spec=spec,
        aliased=rule.transform is same and alike and not adapter,
        frozen=frozen,
        scale=alpha / adapter[0][1].shape[-1] if adapter else 0.0,
        input_axis=rule.input_axis,
    )


def _same_layout(source: Any, target: Any, rank: int) -> bool:
    return source is not None and source.device_set == target.device_set and source.is_equivalent_to(target, rank)
