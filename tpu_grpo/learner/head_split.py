"""How the work of the output head is divided: over devices, and in chunks of the wanted tokens.

Rows are split over fsdp: those of a shard are a group. Of each group the wanted tokens are moved to the front, and all
groups go through their tokens in chunks, until the longest is through:

    wanted  [1 0 1 0 1]   two groups of a row, chunks of 2 tokens   [0 2][4 1][3  ]   two chunks are needed,
            [0 0 0 1 0]                                             [3 0][1 2][4  ]   for the three of the first

The vocabulary is split over as many devices as divide it, see `vocab_axes`. What passes between devices are then the
hidden states of a chunk, a few numbers per token, and the sums of what each made of its part of the vocabulary.

Suffixes: B rows, T tokens of a row, D width. On one device: b its rows, S the tokens of its group in whole chunks,
R groups whose tokens it sees, C tokens of a group in a chunk, N = R*C.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

_TILE = 16
"""Rows of a tile of a TPU's bfloat16 matrices: chunks are a multiple of it where they are larger."""


def vocab_axes(vocabulary: int, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh over which the vocabulary is split: the fewest with the most devices that divide it.

    tp comes first: Tunix splits the vocabulary over tp and the width over fsdp, so that the head is laid out anew by an
    all-to-all within fsdp. Where fsdp x tp does not divide the vocabulary, an axis is left out: along fsdp, devices
    then compute their own rows with the same part of the head; along tp, they compute the same. Where neither divides
    it, every device gathers the whole head.
    """
    choices = [axes for axes in ((), ("tp",), ("fsdp",), ("tp", "fsdp")) if vocabulary % _size(mesh, axes) == 0]
    return max(choices, key=lambda axes: _size(mesh, axes))


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def chunk_tokens(tokens: int, logits_per_token: int, chunk_bytes: int) -> int:
    """Return C for groups of ``tokens``, each of which adds ``logits_per_token`` to the float32 logits of a device.

    Chunks are as equal as the tokens of a group allow: of 1000 tokens two times 512 where 900 would fit.
    """
    most = max(1, chunk_bytes // (4 * logits_per_token))
    if tokens <= most:
        return tokens
    tile = _TILE if most >= _TILE else 1
    most -= most % tile
    even = -(-tokens // -(-tokens // most))
    return -(-even // tile) * tile


def chunks_needed(wanted_BT: Bool[Array, "B T"], groups: int, chunk: int) -> Int[Array, ""]:
    """Return the number of chunks until the group with the most wanted tokens is through."""
    return -(-wanted_BT.reshape(groups, -1).sum(axis=1, dtype=jnp.int32).max() // chunk)


@dataclass(frozen=True)
class HeadSplit:
    """The division over devices. Only one of a mesh of several devices has axes and moves anything.

    The methods after `over_devices` are for the functions that it runs.
    """

    mesh: Mesh | None
    axes: tuple[str, ...]
    """See `vocab_axes`."""
    vocab_dim: int
    """The dimension of the head's weight that is the vocabulary."""

    @classmethod
    def of(cls, weight: Any, vocab_dim: int, mesh: Mesh | None) -> "HeadSplit":
        """Divide the work of a head whose weight has this shape."""
        if mesh is None or mesh.size == 1:
            return cls(None, (), vocab_dim)
        return cls(mesh, vocab_axes(weight.shape[vocab_dim], mesh), vocab_dim)

    @property
    def groups(self) -> int:
        """The number of groups of rows."""
        return 1 if self.mesh is None else self.mesh.shape["fsdp"]

    @property
    def parts(self) -> int:
        """The number of parts of the vocabulary."""
        return 1 if self.mesh is None else _size(self.mesh, self.axes)

    @property
    def seen_groups(self) -> int:
        """R: all groups where the vocabulary is split over fsdp, and else the device's own."""
        return self.groups if "fsdp" in self.axes else 1

    def over_devices(self, function: Callable[..., Any], arguments: str, results: str) -> Callable[..., Any]:
        """Run a function on each device's parts: r stands for rows [B, ...], w for the weight, s for a scalar."""
        if self.mesh is None:
            return function
        specs = {"r": P("fsdp"), "w": P(*[None] * self.vocab_dim, self.axes or None), "s": P()}
        in_specs, out_specs = (tuple(specs[kind] for kind in kinds) for kinds in (arguments, results))
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def gather(self, values: Array) -> Array:
        """Return the values of all groups that the device sees, [R, ...], given those of its own, [...]."""
        return lax.all_gather(values, "fsdp") if "fsdp" in self.axes else values[None]

    def own(self, values_R: Array) -> Array:
        """Return the values of the device's own group, [...]."""
        return values_R[lax.axis_index("fsdp") if "fsdp" in self.axes else 0]

    def max(self, values: Array) -> Array:
        """Return the maximum over the parts of the vocabulary."""
        return lax.pmax(values, self.axes) if self.axes else values

    def sum(self, values: Any) -> Any:
        """Sum over the parts of the vocabulary."""
        return lax.psum(values, self.axes) if self.axes else values

    def sum_own(self, values_N: Array) -> Array:
        """Sum over the parts of the vocabulary: of [N, ...], return what belongs to the own group, [C, ...]."""
        values = lax.psum_scatter(values_N, "fsdp", tiled=True) if "fsdp" in self.axes else values_N
        return lax.psum(values, "tp") if "tp" in self.axes else values

    def sum_groups(self, values: Array) -> Array:
        """Sum over all groups what the device has summed over those that it sees."""
        return values if self.seen_groups == self.groups else lax.psum(values, "fsdp")

    def first_column(self, columns: int) -> Any:
        """Return the id of the first token of the device's part of the vocabulary."""
        return lax.axis_index(self.axes) * columns if self.axes else 0


class TokenQueue:
    """The tokens of a device's group, the wanted ones first, in whole chunks."""

    def __init__(self, split: HeadSplit, chunk: int, wanted_bT: Bool[Array, "b T"]):
        self._gather, self._chunk, self._wanted_bT = split.gather, chunk, wanted_bT
        wanted = wanted_bT.reshape(-1)
        self.length = -(-wanted.size // chunk) * chunk
        """S."""
        self._order_S = jnp.pad(jnp.argsort(~wanted, stable=True), (0, self.length - wanted.size))
        self._valid_S = jnp.arange(self.length) < wanted.sum()
        self._place_bT = (jnp.cumsum(wanted) - 1).reshape(wanted_bT.shape)

    def ordered(self, values_bT: Array) -> Array:
        """Return the values of the groups that the device sees in their queues' order [R, S]; 0 behind the wanted."""
        return self._gather(jnp.where(self._valid_S, _taken(values_bT.reshape(-1), self._order_S), 0))

    def chunk(self, values_RS: Array, index: Any) -> Array:
        """Return the values of a chunk, [N]."""
        return self._cut(values_RS, index).reshape(-1)

    def hidden(self, hidden_bTD: Float[Array, "b T D"], index: Any) -> Float[Array, "N D"]:
        """Return the hidden states of a chunk, 0 behind the wanted."""
        width = hidden_bTD.shape[-1]
        hidden_CD = _taken(hidden_bTD.reshape(-1, width), self._cut(self._order_S, index))
        hidden_CD = jnp.where(self._cut(self._valid_S, index)[:, None], hidden_CD, 0)
        return self._gather(hidden_CD).reshape(-1, width)

    def back(self, values_S: Array) -> Array:
        """Return values [S, ...] at the positions that they belong to [b, T, ...]; 0 where none is wanted."""
        wanted = self._wanted_bT.reshape(self._wanted_bT.shape + (1,) * (values_S.ndim - 1))
        return jnp.where(wanted, _taken(values_S, self._place_bT), 0)

    def _cut(self, values: Array, index: Any) -> Array:
        return lax.dynamic_slice_in_dim(values, index * self._chunk, self._chunk, axis=values.ndim - 1)


def _taken(values: Array, at: Int[Array, "..."]) -> Array:
    return values.at[at].get(mode="clip")  # the place of what is not wanted may be -1
