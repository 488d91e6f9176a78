"""Turns leaves of the trainer's model into the tensors of a Hugging Face checkpoint; layouts.py is about the sampler's.

A published matrix is [outputs, inputs]. Shapes of Tunix's leaves are given with D width, N query heads, K key-value
heads, H head width, F width of an MLP, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Layout = Callable[["np.ndarray"], "np.ndarray"]
"""Takes one projection, norm or embedding as the trainer has it, and returns it as it is published."""


@dataclass(frozen=True)
class TensorRule:
    """Names a leaf of the trainer and the tensors that it is published as; ``*`` stands for the layer's number.

    A leaf with several tensors has them one after the other along its first axis.
    """

    source: str
    tensors: tuple[str, ...]
    layout: Layout

    def of_layer(self, layer: int) -> TensorRule:
        """Return the rule for the leaf of one layer."""
        number = str(layer)
        names = tuple(name.replace("*", number, 1) for name in self.tensors)
        return replace(self, source=self.source.replace("*", number, 1), tensors=names)

    def publish(self, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaf's tensors by name."""
        parts = (leaf,) if len(self.tensors) == 1 else leaf
        for name, part in zip(self.tensors, parts, strict=True):
            yield name, self.layout(part)


def published_leaves(rules: Sequence[TensorRule], layers: int) -> Iterator[TensorRule]:
    """Yield a rule for every leaf of a model, layer by layer."""
    for in_layers, group in itertools.groupby(rules, lambda rule: "*" in rule.source):
        together = list(group)
        for layer in range(layers if in_layers else 1):
            for rule in together:
                yield rule.of_layer(layer)


def unchanged(leaf: np.ndarray) -> np.ndarray:
    """Return the leaf as it is."""
    return leaf


def inputs_first(leaf: np.ndarray) -> np.ndarray:
    """Publish [D, N, H] as [N*H, D], and [D, F] as [F, D]."""
    return leaf.reshape(leaf.shape[0], -1).T


def outputs_last(leaf: np.ndarray) -> np.ndarray:
    """Publish [N, H, D] as [D, N*H]."""
    return leaf.reshape(-1, leaf.shape[-1]).T


def heads_first(leaf: np.ndarray) -> np.ndarray:
    """Publish [N, D, H] as [N*H, D]."""
    return leaf.transpose(0, 2, 1).reshape(-1, leaf.shape[1])
