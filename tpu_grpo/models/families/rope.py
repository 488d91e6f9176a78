"""Computes the frequencies of rotary positions, for tpu_grpo/models/tunix_repairs.py and tpu_grpo/engine/repairs.py."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1 and 3.2, which lowers low frequencies and keeps high ones."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    amplitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale frequencies in radians per position.

        A frequency makes T turns in the original context. It is divided by ``factor`` if T < ``low_freq_factor``, and
        kept if T > ``high_freq_factor``. In between it becomes the mean of both results, weighted linearly in T.
        """
        del theta
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 and equation 22) as transformers computes it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """The factor of sines and cosines; attention scores are therefore multiplied by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._amplitude(self.mscale) / self._amplitude(self.mscale_all_dim)
        return self._amplitude(1.0)

    def _amplitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale frequencies in radians per position, in descending order.

        Frequencies that make over ``beta_fast`` turns in the original context are kept. Frequencies that
        make under ``beta_slow`` turns are divided by ``factor``. All other frequencies become the mean of both results,
        weighted linearly by index.
        """
        count = len(frequencies)

        def index(turns: float) -> float:
            return count * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        kept = 1 - np.clip((np.arange(count) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """The scaling of Gemma 3's global layers, which divides all positions."""

    factor: float
    amplitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scale frequencies in radians per position."""
        del theta
        return frequencies / self.factor


@dataclass(frozen=True)
class PartialRotation:
    """The positions of Gemma 4's global layers, which rotate only the first ``share`` of the pairs of dimensions."""

    share: float
    amplitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Set the lowest frequencies, in radians per position, to 0."""
        del theta
        return np.where(np.arange(len(frequencies)) < int(self.share * len(frequencies)), frequencies, 0.0)


Scaling = Llama3Scaling | YarnScaling | LinearScaling | PartialRotation


def scaling_of(rope_scaling: Mapping[str, Any] | None) -> Llama3Scaling | YarnScaling | None:
    """Return the scaling that the ``rope_scaling`` of a config.json asks for, in families with one kind of attention.

    Raises:
        TypeError: for an unknown type of scaling, or missing or unknown settings.
        ValueError: for settings out of their range.
    """
    if rope_scaling is None:
        return None
    given = {name: value for name, value in rope_scaling.items() if name not in ("rope_type", "type")}
    kind = {"llama3": Llama3Scaling, "yarn": YarnScaling}.get(rope_scaling.get("rope_type", rope_scaling.get("type")))
    if any(isinstance(value, int | float) and not abs(value) < 1e38 for value in given.values()):
        raise ValueError(f"out of range: {rope_scaling}")
    if kind is None or any(isinstance(value, bool) != (name == "truncate") for name, value in given.items()):
        raise TypeError(f"no known scaling: {rope_scaling}")
    scaling = kind(**{name: value for name, value in given.items() if value is not None})
    if isinstance(scaling, YarnScaling):
        low, high = scaling.beta_slow, scaling.beta_fast
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not (scaling.factor >= 1 and 0 < low < high and scaling.original_max_position_embeddings >= 1):
        raise ValueError(f"out of range: {scaling}")
    return scaling


def is_known_scaling(rope_scaling: Any) -> bool:
    """Whether `scaling_of` supports the ``rope_scaling`` of a config.json."""
    try:
        scaling_of(rope_scaling)
    except (ValueError, AttributeError, TypeError):
        return False
    return True


def inverse_timescales(head_dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Return the rotary frequencies [head_dim / 2] in radians per position: theta^(-2i / head_dim), then scaled.

    Frequency i rotates the pair of dimensions i and i + head_dim / 2.
    """
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    return frequencies if scaling is None else scaling(frequencies, float(theta))


def with_older_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the settings that transformers 5 writes in a config.json (left) to the names of transformers 4 (right).

        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}    "rope_theta": 1e6, "rope_scaling": None
        "num_local_experts": 128                                          "num_experts": 128

    If ``rope_parameters`` contradict another setting or have another form, such as parameters for each kind of layer,
    they stay as they are, and the rules of the families (family.py) refuse them.
    """
    rope, older = settings.get("rope_parameters"), {}
    if isinstance(rope, Mapping) and isinstance(rope.get("rope_theta"), int | float):
        rest = dict(rope)
        older = {name: rest.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rest}
        older["rope_scaling"] = None if rest.get("rope_type", "default") == "default" else rest
    if any(settings.get(name) not in (value, None) for name, value in older.items()):  # they contradict each other
        older = {}
    kept = {name: value for name, value in settings.items() if not (older and name == "rope_parameters")}
    if "num_local_experts" in kept and "num_experts" not in kept:
        kept["num_experts"] = kept.pop("num_local_experts")
    return kept | older
