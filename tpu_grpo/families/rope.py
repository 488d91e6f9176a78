"""Frequencies of rotary positions, for both sides: the trainer's and the sampler's repairs take them from here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1 and 3.2: slow rotations are slowed down further, fast ones stay as they are."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def from_setting(cls, rope_scaling: Mapping[str, Any]) -> Llama3Scaling:
        """Of a config.json's ``rope_scaling``."""
        return cls(
            factor=rope_scaling["factor"],
            low_freq_factor=rope_scaling["low_freq_factor"],
            high_freq_factor=rope_scaling["high_freq_factor"],
            original_max_position_embeddings=rope_scaling["original_max_position_embeddings"],
        )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Frequencies in radians per position -> scaled ones.

        With T turns of a frequency in the original context: divided by ``factor`` where T < ``low_freq_factor``, kept
        where T > ``high_freq_factor``, and in between a mean of both, weighted linearly in T.
        """
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


def inverse_timescales(head_dim: int, theta: float, scaling: Llama3Scaling | None = None) -> np.ndarray:
    """Radians per position [head_dim / 2] by which dimension i and i + head_dim / 2 turn: theta^(-2i / head_dim)."""
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies if scaling is None else scaling(frequencies)
