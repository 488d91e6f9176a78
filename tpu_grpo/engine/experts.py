"""Mixture of experts in the sampler's model: the layer, and a record of the experts that served each token.

The layer replaces sglang-jax's ``EPMoE``, and has the same constructor and weight names. Experts are sharded over the
mesh, and no token is ever dropped: every device has all tokens, computes what its own experts contribute, and an
all-reduce adds up the contributions.

The trainer may replay the experts that the engine's routers chose (``algorithm.routing_replay``). A step computes only
tokens that are not in the cache yet, so the chosen experts are stored by cache slot until the request ends. For a
cached prefix, a request gets the experts that were chosen when the prefix was computed:

    table = ExpertTable(layout, slots=4096)
    table.store(slots, experts)     # after every step, for its new tokens
    table.read(slots)               # when a request ends, before its slots are freed
    table.forget()                  # whenever the cache is emptied

Suffixes: T tokens, D width, E experts (e on this device), K experts per token, F hidden width of an expert, L layers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, Integer

from tpu_grpo.records.stages import routing_dtype

AXIS = "tensor"
"""The axis of the sampler's mesh over which experts are sharded."""


class Experts(nnx.Module):
    """The gated MLPs (experts) of one layer; each token is computed by the experts that its router chose."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        intermediate_dim: int,
        mesh: Mesh,
        weight_dtype: jnp.dtype,
        activation: str = "silu",
        **_: Any,
    ):
        def param(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, weight_dtype, out_sharding=NamedSharding(mesh, P(AXIS, None, None))))

        self.mesh = mesh
        self.activation = getattr(jax.nn, activation)  # of gelu, the tanh approximation
        self.wi_0 = param(num_experts, hidden_size, intermediate_dim)  # gate
        self.wi_1 = param(num_experts, hidden_size, intermediate_dim)  # up
        self.wo = param(num_experts, intermediate_dim, hidden_size)  # down

    def __call__(
        self,
        inputs: Float[Array, "T D"],
        weights_TK: Float[Array, "T K"],
        experts_TK: Int[Array, "T K"],
        *,
        out_sharding: NamedSharding | None = None,
    ) -> Float[Array, "T D"]:
        """Add up the outputs of each token's experts, weighted by ``weights_TK``."""
        by_token, by_expert = P("data", None), P(AXIS, None, None)
        mixed: Any = jax.shard_map(
            functools.partial(_mix_own_experts, self.activation),
            mesh=self.mesh,
            in_specs=(by_token, by_token, by_token, by_expert, by_expert, by_expert),
            out_specs=by_token,
        )
        weights = (param.get_value() for param in (self.wi_0, self.wi_1, self.wo))
        output = mixed(inputs, weights_TK.astype(inputs.dtype), experts_TK, *weights)
        return output if out_sharding is None else jax.sharding.reshard(output, out_sharding)


def _mix_own_experts(
    activation: Callable[[Array], Array],
    x_TD: Float[Array, "T D"],
    weights_TK: Float[Array, "T K"],
    experts_TK: Int[Array, "T K"],
    gate_eDF: Float[Array, "e D F"],
    up_eDF: Float[Array, "e D F"],
    down_eFD: Float[Array, "e F D"],
) -> Float[Array, "T D"]:
    """Compute the contribution of this device's experts, and add it up over the devices.

    Each (token, expert) pair is a row. Rows are sorted by expert; rows for experts of other devices come last.
    """
    own, per_token = gate_eDF.shape[0], experts_TK.shape[1]
    local = experts_TK.reshape(-1) - jax.lax.axis_index(AXIS) * own
    local = jnp.where((local >= 0) & (local < own), local, own)
    order = jnp.argsort(local)
    tokens, sizes = order // per_token, jnp.bincount(local, length=own)
    x = x_TD[tokens]
    hidden = activation(jax.lax.ragged_dot(x, gate_eDF, sizes)) * jax.lax.ragged_dot(x, up_eDF, sizes)
    out = jax.lax.ragged_dot(hidden, down_eFD, sizes)
    is_own = (local[order] < own)[:, None]  # ragged_dot leaves the other rows undefined
    weighted = jnp.where(is_own, out.astype(jnp.float32) * weights_TK.reshape(-1)[order][:, None], 0.0)
    sum_TD = jnp.zeros(x_TD.shape, jnp.float32).at[tokens].add(weighted)
    return jax.lax.psum(sum_TD.astype(x_TD.dtype), AXIS)


@dataclass(frozen=True)
class ExpertLayout:
    """The shape (layers, experts per layer) and the integer type of the expert indices of one token."""

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
        """The bytes of one token's expert indices."""
        return self.layers * self.per_token * self.dtype.itemsize

    def stack(self, layers: list[Integer[Array, "T K"]]) -> Integer[Array, "T L K"]:
        """Stack the expert indices of the model's layers into one replicated array of type ``dtype``."""
        assert len(layers) == self.layers, f"{len(layers)} layers chose experts, expected {self.layers}"
        experts_TLK = jnp.stack(layers, axis=1).astype(self.dtype)
        return jax.sharding.reshard(experts_TLK, P())

    def zeros(self, steps: int, rows: int) -> Integer[Array, "{steps} {rows} L K"]:
        """Allocate expert indices for one token of each row in every step of a launch."""
        return jnp.zeros((steps, rows, self.layers, self.per_token), self.dtype)


class ExpertTable:
    """An array in host memory with the experts of every cache slot. Only pages that are written take memory."""

    def __init__(self, layout: ExpertLayout, slots: int):
        self._layout = layout
        self._slots = slots
        self.forget()

    def forget(self) -> None:
        """Discard the experts of all tokens."""
        shape = self._slots, self._layout.layers, self._layout.per_token
        self._experts = np.zeros(shape, self._layout.dtype)
        self._known = np.zeros(self._slots, np.bool_)

    def store(self, slots_T: Integer[np.ndarray, " T"], experts_TLK: Integer[np.ndarray, "T L K"]) -> None:
        """Store the experts of the tokens in these cache slots."""
        self._experts[slots_T] = experts_TLK
        self._known[slots_T] = True

    def read(self, slots_T: Integer[np.ndarray, " T"]) -> Integer[np.ndarray, "T L K"]:
        """Return a copy of what was stored for these slots."""
        assert self._known[slots_T].all(), "a token of this request was never computed since the cache was emptied"
        return self._experts[slots_T]
