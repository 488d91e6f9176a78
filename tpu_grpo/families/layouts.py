"""How a leaf of the trainer's model becomes a leaf of the sampler's.

Shapes are Tunix's on the left and sglang-jax's on the right: D width, N query heads, K key-value heads, H head width,
V vocabulary. Key-value heads are repeated where the sampler has more of them than the model (more devices than heads):
K' is the sampler's number, and the copies of a head stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array

Transform = Callable[["Array", tuple[int, ...]], "Array"]
"""(trainer leaf, shape wanted by the sampler) -> array of that shape."""


@dataclass(frozen=True)
class WeightRule:
    """``*`` in both names stands for the layer's number."""

    source: str
    target: str
    transform: Transform


def same(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Unchanged."""
    del shape
    return leaf


def transpose(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, V] -> [V, D]."""
    del shape
    return leaf.T


def flatten(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, N, H] -> [D, N*H], or [N, H, D] -> [N*H, D]."""
    return leaf.reshape(shape)


def flatten_kv(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, K, H] -> [D, K'*H]."""
    heads, width = leaf.shape[1:]
    return leaf.repeat(shape[1] // (heads * width), axis=1).reshape(shape)


def repeat_kv(head_dim: int) -> Transform:
    """[K*H] -> [K'*H] for heads of width H = ``head_dim``."""

    def transform(leaf: Array, shape: tuple[int, ...]) -> Array:
        return leaf.reshape(-1, head_dim).repeat(shape[0] // leaf.shape[0], axis=0).reshape(shape)

    return transform
