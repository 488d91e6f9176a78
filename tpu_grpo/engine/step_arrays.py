"""The arrays that go into one step of the model, and those that come out.

Suffixes: B rows (padded), T tokens of the step (padded), S cache slots of all rows, L layers, K experts per token.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Integer

from tpu_grpo.engine.arrays import AnyArray
from tpu_grpo.engine.sampling import SamplingColumns


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
    cache_loc: Int[AnyArray, " S"]
    """The concatenated cache slots of all rows; empty for attention that does not read it."""
    attention: Any
    """The attention backend's metadata."""
    sampling: SamplingColumns


class StepOutput(NamedTuple):
    """What a step leaves on the devices, beside the cache."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    experts: Integer[Array, "T L K"] | None
    """The experts of every token that the step computed, if the runner returns them."""
    kept: Int[Array, " B"] | None = None
    """How many tokens the filters kept, if the runner's log-probabilities are those among them."""
