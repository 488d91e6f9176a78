"""The experts that the engine's routers chose for every token, kept by cache slot until a request takes them.

A step computes only tokens that are not in the cache. The experts of the others are found where their keys and values
are: whoever reads a cached prefix reads the experts that were chosen when it was computed.

    table = ExpertTable(layout, slots=4096)
    table.store(slots, experts)     # after every step: its new tokens
    table.read(slots)               # when a request ends: its tokens, before their slots are free again
    table.forget()                  # with the cache

Suffixes: T tokens, L layers, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from tpu_grpo.records.stages import routing_dtype


@dataclass(frozen=True)
class ExpertLayout:
    """The experts of one token: how many, and in which type their numbers are kept."""

    layers: int
    per_token: int
    dtype: np.dtype

    @classmethod
    def of(cls, hf_config: Any) -> "ExpertLayout":
        """Read the layout from a model's config.json; every layer of the model has experts."""
        experts, per_token = hf_config.num_experts, hf_config.num_experts_per_tok
        return cls(hf_config.num_hidden_layers, per_token, routing_dtype(experts))

    @property
    def token_bytes(self) -> int:
        """The bytes that one token's experts take."""
        return self.layers * self.per_token * self.dtype.itemsize

    def stack(self, layers: list[Integer[Array, "T K"]]) -> Integer[Array, "T L K"]:
        """Put what the model's layers return into one array of the small type, on every device."""
        assert len(layers) == self.layers, f"{len(layers)} layers chose experts, expected {self.layers}"
        experts_TLK = jnp.stack(layers, axis=1).astype(self.dtype)
        return jax.sharding.reshard(experts_TLK, jax.sharding.PartitionSpec())

    def zeros(self, steps: int, rows: int) -> Integer[Array, "{steps} {rows} L K"]:
        """Make room for the experts of one token of each row in every step of a launch."""
        return jnp.zeros((steps, rows, self.layers, self.per_token), self.dtype)


class ExpertTable:
    """Host memory for the experts of every cache slot; the system backs only what was written."""

    def __init__(self, layout: ExpertLayout, slots: int):
        self._layout = layout
        self._slots = slots
        self.forget()

    def forget(self) -> None:
        """Know no token's experts."""
        shape = self._slots, self._layout.layers, self._layout.per_token
        self._experts = np.zeros(shape, self._layout.dtype)
        self._known = np.zeros(self._slots, np.bool_)

    def store(self, slots_T: Integer[np.ndarray, " T"], experts_TLK: Integer[np.ndarray, "T L K"]) -> None:
        """Keep the experts of the tokens in these cache slots."""
        self._experts[slots_T] = experts_TLK
        self._known[slots_T] = True

    def read(self, slots_T: Integer[np.ndarray, " T"]) -> Integer[np.ndarray, "T L K"]:
        """Return a copy of what was stored for these slots."""
        assert self._known[slots_T].all(), "a token of this request was never computed since the cache was emptied"
        return self._experts[slots_T]
