"""Relates each leaf (parameter array) of Tunix's models to the checkpoint's tensors and the sampler's leaves.

Shapes: D model width, N query heads, K key-value heads, H head width, P projections stacked in one leaf, F MLP width, V
vocabulary. An arrow leads from Tunix's shape to the sampler's. If the sampler has more devices than the model has
key-value heads, copies of each head lie side by side, and K' is the number of heads including copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array

Shape = tuple[int, ...]
Transform = Callable[["Array", Shape], "Array"]
"""Takes (the trainer's leaf, the shape of the sampler's leaf) and returns the sampler's leaf."""


@dataclass(frozen=True)
class Layout:
    """How a leaf of the trainer is stored in a checkpoint, where a matrix is [outputs, inputs]."""

    publish: Callable[[np.ndarray], np.ndarray]
    """Takes the trainer's array, and returns the checkpoint's array."""
    read: Callable[[np.ndarray, Shape], np.ndarray]
    """Takes a checkpoint's tensor and the shape of the trainer's array, and returns this array, without a copy."""


@dataclass(frozen=True)
class WeightRule:
    """Says which leaf of the trainer becomes which leaf of the sampler; ``*`` in names stands for the layer's number.

    Several rules with the same source make several leaves of the sampler from parts of the source.
    """

    source: str
    target: str
    transform: Transform
    input_axis: int = 0
    """The axis of the trainer's leaf to which the first axis (inputs) of an adapter's product A B is moved."""


@dataclass(frozen=True)
class Leaf:
    """A leaf (parameter array) of Tunix's model, how a checkpoint stores it, and the sampler's leaves made from it.

    ``*`` in names stands for the layer's number.
    """

    source: str
    tensors: tuple[str, ...]
    """The checkpoint tensors that store the leaf; several tensors are stacked along the leaf's first axis."""
    shape: Shape
    """The shape of each tensor."""
    layout: Layout
    targets: tuple[tuple[str, Transform], ...]
    """The names of the sampler's leaves made from this leaf, each with its transform."""
    input_axis: int = 0
    """See `WeightRule`."""
    layers: frozenset[int] | None = None
    """The numbers of the layers that have the leaf; None if all have it."""

    def of_layer(self, layer: int) -> Leaf:
        """Return the leaf of one layer, without ``targets``."""
        number = str(layer)
        names = tuple(name.replace("*", number, 1) for name in self.tensors)
        return replace(self, source=self.source.replace("*", number, 1), tensors=names, targets=())

    def publish(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, values) of every checkpoint tensor that stores this leaf, given the leaf's values."""
        parts = (value,) if len(self.tensors) == 1 else value
        for name, part in zip(self.tensors, parts, strict=True):
            yield name, self.layout.publish(part)

    def read(self, tensors: Sequence[np.ndarray], shape: Shape, index: tuple[slice, ...]) -> np.ndarray:
        """Read the slice ``index`` of this leaf from its tensors; ``shape`` is that of the whole leaf."""
        if len(tensors) == 1:
            return self.layout.read(tensors[0], shape)[index]
        return np.stack([self.layout.read(tensor, shape[1:])[index[1:]] for tensor in tensors[index[0]]])


_HELD: Mapping[str, tuple[str, ...]] = {
    "q_einsum": ("q_proj",),
    "k_einsum": ("k_proj",),
    "kv_einsum": ("k_proj", "v_proj"),
    "qkv_einsum": ("q_proj", "k_proj", "v_proj"),
    "attn_vec_einsum": ("o_proj",),
}


def projections(module: str) -> tuple[str, ...]:
    """Return the paths of the projections in a module of Tunix's models; most modules are one projection themselves.

    >>> projections("layers.3.attn.kv_einsum")
    ('layers.3.attn.k_proj', 'layers.3.attn.v_proj')
    >>> projections("layers.3.mlp.up_proj")
    ('layers.3.mlp.up_proj',)
    """
    parent, _, name = module.rpartition(".")
    return tuple(f"{parent}.{projection}" for projection in _HELD.get(name, (name,)))


def same(leaf: Array, shape: Shape) -> Array:
    """Return the leaf unchanged."""
    del shape
    return leaf


def transpose(leaf: Array, shape: Shape) -> Array:
    """Transpose [D, V] -> [V, D]."""
    del shape
    return leaf.T


def flatten(leaf: Array, shape: Shape) -> Array:
    """Merge the axes of heads: [D, N, H] -> [D, N*H], or [N, H, D] -> [N*H, D]."""
    return leaf.reshape(shape)


def flatten_kv(leaf: Array, shape: Shape) -> Array:
    """Repeat key-value heads and merge their axes: [D, K, H] -> [D, K'*H]."""
    heads, width = leaf.shape[1:]
    return leaf.repeat(shape[1] // (heads * width), axis=1).reshape(shape)


def repeat_kv(head_dim: int) -> Transform:
    """Make a transform that repeats the heads of a bias: [K*H] -> [K'*H], with H = ``head_dim``."""

    def transform(leaf: Array, shape: Shape) -> Array:
        return leaf.reshape(-1, head_dim).repeat(shape[0] // leaf.shape[0], axis=0).reshape(shape)

    return transform


@dataclass(frozen=True)
class InputsFirst:
    """Puts inputs first and merges heads: [N, D, H] -> [D, N*H], or with ``part`` [P, K, D, H][part] -> [D, K'*H]."""

    part: int | None = None
    """The index of the stacked projection to take; None if the leaf is a single projection."""

    def __call__(self, leaf: Array, shape: Shape) -> Array:
        """See `Transform`."""
        heads = leaf if self.part is None else leaf[self.part]
        return flatten_kv(heads.transpose(1, 0, 2), shape)

    def __str__(self) -> str:
        """Name the transform, for a plan."""
        return "inputs first" if self.part is None else f"inputs first, part {self.part}"


unchanged = Layout(lambda leaf: leaf, np.reshape)
inputs_first = Layout(lambda leaf: leaf.reshape(leaf.shape[0], -1).T, lambda tensor, shape: tensor.T.reshape(shape))
"""A checkpoint stores [D, N, H] as [N*H, D], and [D, F] as [F, D]."""
outputs_last = Layout(lambda leaf: leaf.reshape(-1, leaf.shape[-1]).T, lambda tensor, shape: tensor.T.reshape(shape))
"""A checkpoint stores [N, H, D] as [D, N*H]."""
heads_first = Layout(
    lambda leaf: leaf.transpose(0, 2, 1).reshape(-1, leaf.shape[1]),
    lambda tensor, shape: tensor.reshape(shape[0], -1, shape[1]).transpose(0, 2, 1),
)
"""A checkpoint stores [N, D, H] as [N*H, D]."""
