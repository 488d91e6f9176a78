"""Runs several decode steps in one launch: a loop on the devices samples tokens and appends them to their rows.

This file has the code that jax traces; launches.py has the host's side.

The cache slots of all steps are reserved before the launch, so that the loop needs nothing from the host. A row ends
inside the launch at a stop token, or when its slots are used up; from then on it counts as padding and writes
nothing. The loop ends when its steps are done or few rows are left, as ``LaunchInputs.control`` says. A launch can
continue the rows of the previous launch from that launch's outputs on the devices, before the host has read them.
Below, x is a sampled token and . is padding:

    step         0   1   2   3          (row b samples a stop token at step 1; row c has only 2 slots)
    row a        x   x   x   x
    row b        x   x   .   .
    row c        x   x   .   .

Suffixes: B rows (padded), T tokens of the step (padded), S cache slots of all rows, k the most steps of a launch, L
layers, K experts per token.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from tpu_grpo.engine.attention import AttentionMode
from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.engine.sampling import MOST_LIKELIEST, AnyArray, SamplingColumns


class StepInputs(NamedTuple):
    """The arrays that one step needs on the devices; all of them are replicated."""

    input_ids: Int[AnyArray, " T"]
    positions: Int[AnyArray, " T"]
    out_cache_loc: Int[AnyArray, " T"]
    """The cache slot of each new token, or -1 for padding."""
    seq_lens: Int[AnyArray, " B"]
    """Tokens that each row has after this step, or 0 for padding."""
    prefix_lens: Int[AnyArray, " B"]
    extend_lens: Int[AnyArray, " B"]
    attention: Any
    """The attention backend's metadata."""
    sampling: SamplingColumns


class StepOutput(NamedTuple):
    """The outputs of a step on the devices, without the cache."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    experts: Integer[Array, "T L K"] | None
    """The experts of every token that the step computed; None if the engine does not return experts."""
    kept: Int[Array, " B"] | None = None
    """How many tokens the sampling filters kept; None if log-probabilities are taken over the whole vocabulary."""
    likeliest: tuple[Int[Array, "B K"], Float[Array, "B K"]] | None = None
    """Like ``Drawn.likeliest``."""


Cache = list[Array]
Step = Callable[[Cache, StepInputs], tuple[StepOutput, Cache]]
"""One traced decode step of the model: (cache, inputs) -> (output, cache)."""


class LaunchRows(NamedTuple):
    """The per-row inputs of a launch."""

    token: Int[AnyArray, " B"]
    """The input token of the first step."""
    length: Int[AnyArray, " B"]
    """Tokens that the row has after the first step, or 0 for padding."""
    stops: Bool[AnyArray, " B"]
    """Whether a stop token ends the row."""
    sampling: SamplingColumns
    slots: Int[AnyArray, "B k"]
    """The cache slot of each step's input token; -1 for steps after the row's last one."""


class LaunchInputs(NamedTuple):
    """The inputs of a launch, replicated on all devices. They are packed into few arrays: each array costs time."""

    rows: Int[AnyArray, "B columns"]
    """All columns of LaunchRows side by side in one int32 array, from ``pack_rows``."""
    control: Int[AnyArray, " 3"]
    """[the most steps, the number of running rows at or below which the launch ends, 1 to use ``before`` or else 0]."""
    attention: Any
    """The attention mode's metadata, constant during a launch."""
    before: Int[AnyArray, "2 B"]
    """``LaunchOutput.after`` of the previous launch; ignored if the last number of ``control`` is 0."""
    likeliest: tuple[()] | None = None
    """Like ``SamplingColumns.likeliest``."""


class LaunchOutput(NamedTuple):
    """The outputs of a launch on the devices, without the cache."""

    results: Int[Array, "results B"]
    """An array of 2 k + 1 lines: one line with the number of tokens that each row sampled, k lines with each step's
    tokens, and k lines with the bits of these tokens' float32 log-probabilities."""
    experts: Integer[Array, "k B L K"] | None
    """The experts of every step's input tokens; None if the engine does not return experts."""
    after: Int[Array, "2 B"] | None
    """Each row's last token, and 1 if it is a stop token. The next launch reads this; the host does not."""
    kept: Int[Array, "k B"] | None = None
    """Like ``StepOutput.kept``, for every step."""
    likeliest: tuple[Int[Array, "k B K"], Float[Array, "k B K"]] | None = None


def for_host(output: StepOutput | LaunchOutput) -> StepOutput | LaunchOutput:
    """Drop the outputs that the host does not read."""
    return output._replace(after=None) if isinstance(output, LaunchOutput) else output


class Sampled(NamedTuple):
    """The tokens that b rows sampled in a launch or a prefill step, on the host. Of each row, the first ``count``
    tokens are valid."""

    count: Int[np.ndarray, " b"]
    tokens: Int[np.ndarray, "k b"]
    logprobs: Float[np.ndarray, "k b"]
    kept: Int[np.ndarray, "k b"] | None = None
    """Like ``StepOutput.kept``, for every sampled token."""
    likeliest: tuple[Int[np.ndarray, "k b K"], Float[np.ndarray, "k b K"]] | None = None

    @classmethod
    def of_prefill(cls, output: StepOutput, rows: int) -> "Sampled":
        """Read the first ``rows`` rows of a prefill step's output on the host; each has one token."""
        tokens, logprobs = np.asarray(output.tokens), np.asarray(output.logprobs)
        kept = None if output.kept is None else np.asarray(output.kept)[None, :rows]
        likeliest = jax.tree.map(lambda x: np.asarray(x)[None, :rows], output.likeliest)
        return cls(np.ones(rows, np.int32), tokens[None, :rows], logprobs[None, :rows], kept, likeliest)

    @classmethod
    def of_launch(cls, output: LaunchOutput, columns: Int[np.ndarray, " b"]) -> "Sampled":
        """Read the rows at the indices ``columns`` from a launch's output on the host."""
        chosen = np.ascontiguousarray(np.asarray(output.results)[:, columns])
        tokens, bits = np.split(chosen[1:], 2)
        more = jax.tree.map(lambda x: np.asarray(x)[:, columns], (output.kept, output.likeliest))
        return cls(chosen[0], tokens, bits.view(np.float32), *more)


def pack_rows(rows: LaunchRows) -> Int[np.ndarray, "B columns"]:
    """Pack the rows into one array of int32, in which floats and unsigned integers keep their bits."""
    sampling = rows.sampling
    columns = (
        *(rows.token, rows.length, rows.stops.astype(np.int32), rows.sampling.top_k),
        *(column.view(np.int32) for column in (sampling.temperature, sampling.top_p, sampling.min_p)),
        sampling.key.view(np.int32),
        rows.slots,
    )
    return np.column_stack(columns)


def unpack_rows(packed: Int[Array, "B columns"], likeliest: tuple[()] | None = None) -> LaunchRows:
    """Undo ``pack_rows`` in a trace."""
    token, length, stops, top_k = (packed[:, column] for column in range(4))
    temperature, top_p, min_p = jnp.unstack(jax.lax.bitcast_convert_type(packed[:, 4:7], jnp.float32), axis=1)
    key = jax.lax.bitcast_convert_type(packed[:, 7:11], jnp.uint32)
    sampling = SamplingColumns(temperature, top_k, top_p, min_p, key, length, likeliest)
    return LaunchRows(token, length, stops > 0, sampling, packed[:, 11:])


class _Carry(NamedTuple):
    """The state of the loop, which each step passes to the next."""

    step: Int[Array, ""]
    token: Int[Array, " B"]
    running: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    count: Int[Array, " B"]
    tokens: Int[Array, "k B"]
    logprobs: Float[Array, "k B"]
    experts: Integer[Array, "k B L K"] | None
    kept: Int[Array, "k B"] | None
    likeliest: tuple[Int[Array, "k B K"], Float[Array, "k B K"]] | None
    cache: Cache


def decode_loop(
    step: Step,
    cache: Cache,
    inputs: LaunchInputs,
    *,
    attention: AttentionMode,
    stop_token_ids: Iterable[int],
    experts: ExpertLayout | None,
    filtered: bool = False,
) -> tuple[LaunchOutput, Cache]:
    """Trace the loop over the steps of a launch. With too few rows (see ``LaunchInputs.control``) it makes no step.

    Returns the sampled tokens, and the cache, which is updated in place.
    """
    rows = unpack_rows(inputs.rows, inputs.likeliest)
    batch, most_steps = rows.slots.shape
    stop_ids = jnp.asarray(sorted(stop_token_ids), jnp.int32)

    def more(carry: _Carry) -> Bool[Array, ""]:
        return (carry.step < inputs.control[0]) & (jnp.sum(carry.running) > inputs.control[1])

    def advance(carry: _Carry) -> _Carry:
        running = carry.running
        output, cache = step(carry.cache, _step_inputs(carry, rows, inputs.attention, attention))
        token = jnp.where(running, output.tokens, 0)
        stopped = carry.stopped | (running & rows.stops & jnp.any(token[:, None] == stop_ids, axis=1))
        return _Carry(
            step=carry.step + 1,
            token=token,
            running=running & ~stopped & (_slots_at(rows, carry.step + 1) >= 0),
            stopped=stopped,
            count=carry.count + running,
            tokens=carry.tokens.at[carry.step].set(token),
            logprobs=carry.logprobs.at[carry.step].set(jnp.where(running, output.logprobs, 0.0)),
            experts=None if carry.experts is None else carry.experts.at[carry.step].set(output.experts),
            kept=None if carry.kept is None else carry.kept.at[carry.step].set(output.kept),
            likeliest=jax.tree.map(lambda x, new: x.at[carry.step].set(new), carry.likeliest, output.likeliest),
            cache=cache,
        )

    wide = most_steps, batch, MOST_LIKELIEST
    follows, (token, stopped) = inputs.control[2] > 0, inputs.before
    stopped = follows & (stopped > 0)
    start = _Carry(
        step=jnp.int32(0),
        token=jnp.where(follows, token, rows.token),
        running=(rows.slots[:, 0] >= 0) & ~stopped,
        stopped=stopped,
        count=jnp.zeros(batch, jnp.int32),
        tokens=jnp.zeros((most_steps, batch), jnp.int32),
        logprobs=jnp.zeros((most_steps, batch), jnp.float32),
        experts=None if experts is None else experts.zeros(most_steps, batch),
        kept=jnp.zeros((most_steps, batch), jnp.int32) if filtered else None,
        likeliest=None if inputs.likeliest is None else (jnp.zeros(wide, jnp.int32), jnp.zeros(wide)),
        cache=cache,
    )
    last = jax.lax.while_loop(more, advance, start)
    bits = jax.lax.bitcast_convert_type(last.logprobs, jnp.int32)
    results = jnp.concatenate([last.count[None], last.tokens, bits])
    after = jnp.stack([last.token, last.stopped.astype(jnp.int32)])
    return LaunchOutput(results, last.experts, after, last.kept, last.likeliest), last.cache


def _step_inputs(carry: _Carry, rows: LaunchRows, metadata: Any, attention: AttentionMode) -> StepInputs:
    """Build the inputs of one step, in which rows that have ended are padding."""
    running = carry.running
    length = jnp.where(running, rows.length + carry.step, 0)
    before = jnp.maximum(length - 1, 0)
    return StepInputs(
        input_ids=jnp.where(running, carry.token, 0),
        positions=before,
        out_cache_loc=jnp.where(running, _slots_at(rows, carry.step), -1),
        seq_lens=length,
        prefix_lens=before,
        extend_lens=running.astype(jnp.int32),
        attention=attention.at_step(metadata, length),
        sampling=rows.sampling._replace(position=length),
    )


def _slots_at(rows: LaunchRows, step: Int[Array, ""]) -> Int[Array, " B"]:
    """Return each row's slot at a step; -1 after the last step."""
    slots = jnp.pad(rows.slots, ((0, 0), (0, 1)), constant_values=-1)
    return jax.lax.dynamic_index_in_dim(slots, step, axis=1, keepdims=False)
