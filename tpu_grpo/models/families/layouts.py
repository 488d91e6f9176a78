"""Turns leaves of the trainer's model into leaves of the sampler's.

Shapes are Tunix's before the arrow and sglang-jax's after it, with D width, N query heads, K key-value heads, H head
width, V vocabulary. Key-value heads are repeated where the sampler has more devices than the model has such heads. K'
is then the sampler's number of heads, and the copies of a head stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array

Transform = Callable[["Array", tuple[int, ...]], "Array"]
"""Takes (trainer leaf, shape of the sampler's leaf) and returns an array of that shape."""


@dataclass(frozen=True)
class WeightRule:
    """Names a leaf of the trainer and one of the sampler; ``*`` in both names stands for the layer's number.

    Several rules may name the same source, whose parts then become several leaves of the sampler.
    """

    source: str
    target: str
    transform: Transform
    input_axis: int = 0
    """The axis of the trainer's leaf where the module's inputs begin; the product of an adapter has them first."""


def same(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Return the leaf unchanged."""
    del shape
    return leaf


def transpose(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Transpose [D, V] -> [V, D]."""
    del shape
    return leaf.T


def flatten(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Merge the axes of heads: [D, N, H] -> [D, N*H], or [N, H, D] -> [N*H, D]."""
    return leaf.reshape(shape)


def flatten_kv(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Repeat key-value heads and merge their axes: [D, K, H] -> [D, K'*H]."""
    heads, width = leaf.shape[1:]
    return leaf.repeat(shape[1] // (heads * width), axis=1).reshape(shape)


def repeat_kv(head_dim: int) -> Transform:
    """Make a transform that repeats the heads of a bias: [K*H] -> [K'*H], with H = ``head_dim``."""

    def transform(leaf: Array, shape: tuple[int, ...]) -> Array:
        return leaf.reshape(-1, head_dim).repeat(shape[0] // leaf.shape[0], axis=0).reshape(shape)

    return transform


@dataclass(frozen=True)
class InputsFirst:
    """Moves the inputs in front of the heads: [N, D, H] -> [D, N*H], and part p of [P, K, D, H] -> [D, K'*H]."""

    part: int | None = None
    """Which of several stacked projections to take; None where the leaf is one."""

    def __call__(self, leaf: Array, shape: tuple[int, ...]) -> Array:
        """See `Transform`."""
        heads = leaf if self.part is None else leaf[self.part]
        return flatten_kv(heads.transpose(1, 0, 2), shape)

    def __str__(self) -> str:
        """Describe it in a plan."""
        return "inputs first" if self.part is None else f"inputs first, part {self.part}"
