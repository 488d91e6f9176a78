"""Computes the frequencies of rotary positions; the repairs of the trainer and of the sampler take them from here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1 and 3.2 slows slow rotations down further and leaves fast ones as they are."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def from_setting(cls, rope_scaling: Mapping[str, Any]) -> Llama3Scaling:
        """Make the scaling from the ``rope_scaling`` of a config.json."""
        return cls(**{field.name: rope_scaling[field.name] for field in fields(cls)})

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale frequencies, which are in radians per position.

        A frequency makes T turns in the original context. It is divided by ``factor`` where T < ``low_freq_factor``,
        kept where T > ``high_freq_factor``, and in between the mean of both, weighted linearly in T.
        """
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


def inverse_timescales(head_dim: int, theta: float, scaling: Llama3Scaling | None = None) -> np.ndarray:
    """Return the radians per position, [head_dim / 2], by which dimensions i and i + head_dim / 2 turn.

    They are theta^(-2i / head_dim), scaled if there is a scaling.
    """
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies if scaling is None else scaling(frequencies)


def older_rope(rope_parameters: Any) -> dict[str, Any] | None:
    """Return the ``rope_parameters`` of transformers 5 under the names that they had before, which the libraries know.

        {"rope_type": "default", "rope_theta": 1e6}    becomes    {"rope_theta": 1e6, "rope_scaling": None}

    None for another form, such as parameters for each kind of layer.
    """
    if not isinstance(rope_parameters, Mapping) or not isinstance(rope_parameters.get("rope_theta"), int | float):
        return None
    rest = dict(rope_parameters)
    older: dict[str, Any] = {"rope_theta": rest.pop("rope_theta")}
    if "partial_rotary_factor" in rest:
        older["partial_rotary_factor"] = rest.pop("partial_rotary_factor")
    return older | {"rope_scaling": None if rest.get("rope_type", "default") == "default" else rest}


def with_older_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the ``rope_parameters`` of a config.json by `older_rope`.

    Those of another form stay, and so do those that differ from settings beside them; families refuse them.
    """
    older = older_rope(settings.get("rope_parameters"))
    if older is None or any(settings.get(name, value) not in (value, None) for name, value in older.items()):
        return dict(settings)
    return {name: value for name, value in settings.items() if name != "rope_parameters"} | older
