"""Expert parallelism in training, which replaces Tunix's: the experts of a layer are spread over a mesh axis.

Every device holds some of the experts and some of the tokens. Each token is copied for each of its k experts. Copies
are sent to their experts' devices (a ragged all-to-all), go through the experts, and are sent back. Tunix (0.1.7) has a
buffer for the worst case, all tokens on the experts of one device, and computes on all of it: with 16 devices, 16 times
the average number of rows. Here the buffer has twice the average. Copies that do not fit wait for another round:

    buffer of 4 rows, a device receives from device 0: a a a b, from device 1: c d
    round 0    a a a b        round 1    c d - -

All devices do as many rounds as the device with most copies needs, usually one. No token is dropped, whatever the
router does. A round's rows are sorted by expert for jax's grouped matrix products (megablox); `tiles_of` chooses their
tiles by shape. The backward pass sends the inputs again with the gradients, and computes the experts again, so that
nothing of the size of the buffer is kept between the passes.

Suffixes: T tokens of a device, k experts per token, A = T*k copies, C rows of the buffer, N devices, E experts, e
experts of a device, D width, F hidden width of an expert, S parts of a row with L numbers each (D = S*L).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

LANES = 128
"""The lanes of a TPU's vector register."""
BUFFER_MEANS = 2
"""The rows of the buffer, as a multiple of the copies that a device receives on average."""
TILE_ROWS = 512
TILE_BYTES = 2048
"""The longest side of a tile of weights: 1,024 numbers in bfloat16. Three tiles, double-buffered, fit default VMEM."""


Activation = Callable[[Array], Array]


class Weights(NamedTuple):
    """The experts of a device."""

    gate: Float[Array, "e D F"]
    up: Float[Array, "e D F"]
    down: Float[Array, "e F D"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mixture(
    x_TD: Float[Array, "T D"],
    shares_Tk: Float[Array, "T k"],
    chosen_Tk: Int[Array, "T k"],
    weights: Weights,
    axis: str | None,
    activation: Activation = jax.nn.silu,
) -> Float[Array, "T D"]:
    """Return the sum of the outputs of each token's experts, weighted by the router's shares; call in a shard_map.

    The experts are spread over the devices of ``axis`` in order. If ``axis`` is None, the device has all experts.
    """
    copies = Copies.of(chosen_Tk, len(weights.gate), axis)
    sorted_ASL = copies.sort(x_TD)

    def one_round(number: Array, outputs_ASL: Array) -> Array:
        plan = copies.round(number)
        inputs_CD = copies.send(sorted_ASL, plan)
        gated_CF, upward_CF = (_product(inputs_CD, weight, plan.rows) for weight in weights[:2])
        hidden_CF = activation(gated_CF) * upward_CF
        return copies.return_to(outputs_ASL, _product(hidden_CF, weights.down, plan.rows), plan)

    outputs_ASL = lax.fori_loop(0, copies.rounds, one_round, lax.empty(sorted_ASL.shape, sorted_ASL.dtype))
    return jnp.einsum("tksl,tk->tsl", copies.unsort(outputs_ASL), shares_Tk).reshape(x_TD.shape)


def _backward(
    axis: str | None, activation: Activation, kept: tuple[Array, Array, Array, Weights], gradients_TD: Array
) -> tuple[Array, Array, np.ndarray, Weights]:
    """Return the gradients. A share's gradient is the dot product of g, the sum's gradient, and y, the expert's output.

    Outputs are not kept, and y = down(h) is not computed again, because the dot product of g and down(h) is also that
    of h and its gradient. The expert's device is sent share * g, and sends back the input's gradient and this product,
    which is the share times its gradient. Gradients of weights have the weights' dtype, also while rounds are added.
    """
    x_TD, shares_Tk, chosen_Tk, weights = kept
    copies = Copies.of(chosen_Tk, len(weights.gate), axis)
    sorted_ASL = copies.sort(x_TD)
    gradients_ASL = shares_Tk.reshape(-1)[copies.order_A][:, None, None] * copies.sort(gradients_TD)
    both = jnp.concatenate(weights[:2], axis=2)

    def one_round(number: Array, carried: tuple[Array, Array, Weights]) -> tuple[Array, Array, Weights]:
        returned_ASL, products_ASL, sums = carried
        plan = copies.round(number)
        inputs_CD, gradients_CD = (copies.send(sent, plan) for sent in (sorted_ASL, gradients_ASL))
        halves = (_product(inputs_CD, weight, plan.rows) for weight in weights[:2])
        hidden_CF, to_hidden = jax.vjp(lambda gated, upward: activation(gated) * upward, *halves)
        of_hidden_CF = _product(gradients_CD, weights.down, plan.rows, transposed=True)
        products_C = jnp.einsum("cf,cf->c", hidden_CF, of_hidden_CF, preferred_element_type=jnp.float32)
        of_gate_CF, of_up_CF = to_hidden(of_hidden_CF)
        of_both_CG = jnp.concatenate([of_gate_CF, of_up_CF], axis=1)
        of_inputs_CD = _product(of_both_CG, both, plan.rows, transposed=True)
        products_CL = jnp.broadcast_to(products_C[:, None], (len(products_C), LANES))
        factors = ((inputs_CD, of_gate_CF), (inputs_CD, of_up_CF), (hidden_CF, gradients_CD))
        added = (
            tgmm(a.T, b, plan.rows, total.dtype, tiles_of(a.dtype), existing_out=total)
            for (a, b), total in zip(factors, sums, strict=True)
        )
        returned_ASL = copies.return_to(returned_ASL, of_inputs_CD, plan)
        return returned_ASL, copies.return_to(products_ASL, products_CL, plan), Weights(*added)

    start = lax.empty(sorted_ASL.shape, sorted_ASL.dtype), lax.empty((len(sorted_ASL), 1, LANES), jnp.float32)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    returned_ASL, products_ASL, of_weights = lax.fori_loop(0, copies.rounds, one_round, (*start, nothing))
    products_Tk = copies.unsort(products_ASL)[:, :, 0, 0]
    of_shares_Tk = jnp.where(shares_Tk == 0, 0, products_Tk / jnp.where(shares_Tk == 0, 1, shares_Tk))
    of_x_TD = copies.unsort(returned_ASL).sum(axis=1).reshape(x_TD.shape)
    return of_x_TD, of_shares_Tk.astype(shares_Tk.dtype), np.zeros(chosen_Tk.shape, jax.dtypes.float0), of_weights


mixture.defvjp(lambda *given: (mixture(*given), given[:-2]), _backward)  # keeps all inputs but the axis and activation


# --- rounds ----------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one device sends and receives in one round."""

    sent: tuple[Array, Array, Array, Array]
    """Arguments of the all-to-all to the experts: for each receiver the first row, the number of rows and the first row
    at the receiver; for each sender the number of rows."""
    returned: tuple[Array, Array, Array, Array]
    """Arguments of the all-to-all back to the tokens."""
    by_expert: Int[Array, " C"]
    """For every row in the order of experts, its row in the buffer."""
    by_sender: Int[Array, " C"]
    """The inverse of ``by_expert``."""
    rows: Int[Array, " e"]
    """The number of rows of every expert."""


class Copies(NamedTuple):
    """The order in which a device sends the copies of its tokens, and how many copies each device sends to each expert.

    A token has a copy for each of its experts.
    """

    axis: str | None
    per_token: int
    order_A: Int[Array, " A"]
    """The copies in the order of their experts, which is also the order of the receiving devices."""
    counts_NNe: Int[Array, "N N e"]
    """The number of copies by sender, receiver and the receiver's expert."""

    @classmethod
    def of(cls, chosen_Tk: Int[Array, "T k"], experts: int, axis: str | None) -> "Copies":
        """Count the copies on all devices, which have ``experts`` experts each."""
        devices = 1 if axis is None else lax.axis_size(axis)
        counts_E = jnp.bincount(chosen_Tk.reshape(-1), length=experts * devices)
        counts_NE = counts_E[None] if axis is None else lax.all_gather(counts_E, axis)
        order_A = jnp.argsort(chosen_Tk.reshape(-1))
        return cls(axis, chosen_Tk.shape[1], order_A, counts_NE.reshape(devices, devices, experts))

    @property
    def buffer_rows(self) -> int:
        """The rows of the buffer, in whole tiles. On average, a device receives as many copies as it sends."""
        copies, devices = len(self.order_A), len(self.counts_NNe)
        tile = min(TILE_ROWS, -(-copies // 8) * 8)
        return -(-min(BUFFER_MEANS, devices) * copies // tile) * tile

    @property
    def rounds(self) -> Int[Array, ""]:
        """The number of rounds that the device with the most copies needs."""
        return -(-jnp.max(jnp.sum(self.counts_NNe, axis=(0, 2))) // self.buffer_rows)

    def sort(self, x_TD: Float[Array, "T D"]) -> Float[Array, "A S L"]:
        """Return the copies of the tokens in the order of their experts."""
        return _rows(x_TD)[self.order_A // self.per_token]

    def unsort(self, sorted_ASL: Float[Array, "A S L"]) -> Float[Array, "T k S L"]:
        """Return the rows by token and expert."""
        return sorted_ASL[jnp.argsort(self.order_A)].reshape(-1, self.per_token, *sorted_ASL.shape[1:])

    def round(self, number: Int[Array, ""]) -> Round:
        """Plan a round: each device receives the next ``buffer_rows`` of its rows, ordered by sender, then expert."""
        device = 0 if self.axis is None else lax.axis_index(self.axis)
        rows = self.buffer_rows
        pairs_NN = jnp.sum(self.counts_NNe, axis=2)
        begins_NN, sizes_NN = _windowed(pairs_NN, number * rows, rows)
        earlier_NN = jnp.clip(number * rows - _starts(pairs_NN), 0, pairs_NN)  # sent in earlier rounds
        from_NN = jnp.where(sizes_NN > 0, _starts(pairs_NN.T).T + earlier_NN, 0)
        sent = (from_NN[device], sizes_NN[device], begins_NN[device], sizes_NN[:, device])
        returned = (begins_NN[:, device], sizes_NN[:, device], from_NN[:, device], sizes_NN[device])
        own_Ne = self.counts_NNe[:, device]
        begins, sizes = _windowed(own_Ne.reshape(-1), number * rows, rows)
        begins_Ne, sizes_Ne = begins.reshape(own_Ne.shape), sizes.reshape(own_Ne.shape)
        moved_Ne = _starts(sizes_Ne.T.reshape(-1)).reshape(own_Ne.shape[::-1]).T - begins_Ne
        places_C = jnp.arange(rows)
        by_expert = places_C - _repeated(moved_Ne.T, sizes_Ne.T, rows)
        by_sender = places_C + _repeated(moved_Ne, sizes_Ne, rows)
        return Round(sent, returned, by_expert, by_sender, jnp.sum(sizes_Ne, axis=0))

    def send(self, sorted_ASL: Float[Array, "A S L"], plan: Round) -> Float[Array, "C D"]:
        """Send a round's copies to the devices of their experts, and sort the received copies by expert.

        Rows of the buffer that receive nothing have undefined values, which nothing reads.
        """
        buffer_CSL = lax.empty((self.buffer_rows, *sorted_ASL.shape[1:]), sorted_ASL.dtype)
        if self.axis is None:
            received_CSL = buffer_CSL.at[: len(sorted_ASL)].set(sorted_ASL)
        else:
            exchanged = lax.ragged_all_to_all(sorted_ASL, buffer_CSL, *plan.sent, axis_name=self.axis)
            received_CSL = exchanged[plan.by_expert]
        return received_CSL.reshape(len(received_CSL), -1)

    def return_to(
        self, outputs_ASL: Float[Array, "A S L"], rows_CD: Float[Array, "C D"], plan: Round
    ) -> Float[Array, "A S L"]:
        """Send a round's rows back to the devices of their tokens, and put them into ``outputs_ASL``."""
        if self.axis is None:
            return _rows(rows_CD)[: len(outputs_ASL)]
        return lax.ragged_all_to_all(_rows(rows_CD)[plan.by_sender], outputs_ASL, *plan.returned, axis_name=self.axis)


def _rows(x: Float[Array, "rows D"]) -> Float[Array, "rows S L"]:
    """Split every row into parts of LANES numbers (or of the width's largest divisor of LANES).

    Rows are gathered and sent in this shape, because in memory they follow each other. A matrix is stored in tiles of 8
    rows; a gather of one of its rows would read all 8.
    """
    return x.reshape(len(x), -1, math.gcd(x.shape[1], LANES))


def _starts(sizes: Int[Array, "n ..."]) -> Int[Array, "n ..."]:
    """Return where each part begins if parts of these sizes follow each other along the first axis."""
    return jnp.cumsum(sizes, axis=0) - sizes


def _windowed(
    sizes: Int[Array, "n ..."], first: Int[Array, ""], rows: int
) -> tuple[Int[Array, "n ..."], Int[Array, "n ..."]]:
    """Return start and size of the portion of each part that lies in a window of ``rows`` rows from ``first`` on.

    Starts are counted from the window's first row; a part without rows in the window starts at 0.
    """
    starts = _starts(sizes) - first
    begins = jnp.clip(starts, 0, rows)
    inside = jnp.clip(starts + sizes, 0, rows) - begins
    return jnp.where(inside > 0, begins, 0), inside


def _repeated(values: Int[Array, "a b"], sizes: Int[Array, "a b"], rows: int) -> Int[Array, " C"]:
    """Repeat each value as often as ``sizes`` says, and fill up with zeros to the C ``rows`` of the buffer."""
    part_C = jnp.searchsorted(jnp.cumsum(sizes.reshape(-1)), jnp.arange(rows), side="right", method="compare_all")
    return jnp.append(values.reshape(-1), 0)[part_C]


# --- grouped products ------------------------------------------------------------------------------------------------


def _product(
    x: Float[Array, "C inputs"], weight: Float[Array, "e a b"], rows_e: Int[Array, " e"], *, transposed: bool = False
) -> Float[Array, "C outputs"]:
    """Multiply each row with the matrix of its expert. Rows after the experts' rows have undefined values."""
    return gmm(x, weight, rows_e, x.dtype, tiles_of(x.dtype), transpose_rhs=transposed)


def tiles_of(dtype: Any) -> Callable[[int, int, int], tuple[int, int, int]]:
    """Return the function that chooses tile sizes for a product [m, k] x [k, n].

    Along k or n, a tile is the largest multiple of 128 that divides the axis and takes at most TILE_BYTES. If there is
    none, it is the whole axis, cut at TILE_BYTES.
    """
    most = TILE_BYTES // np.dtype(dtype).itemsize

    def side(size: int) -> int:
        return next((tile for tile in range(most, 0, -128) if size % tile == 0), min(size, most))

    return lambda m, k, n: (min(TILE_ROWS, m), side(k), side(n))
