"""From a scored rollout to the packed rows that a train step takes, on the host.

Arrays: R training rows of S tokens each, B completions of at most T tokens. Several sequences, each a prompt and its
completion, share a row; see packing.py. A conversation is one sequence or several, see sequences.py.

    token_ids       [p0 p1 c0 c1 c2 | p0 c0 c1 | 0  0 ]
    segments        [ 1  1  1  1  1 |  2  2  2 | 0  0 ]     0 is padding; no token sees another segment
    positions       [ 0  1  2  3  4 |  0  1  2 | 0  0 ]
    mask            [ 0  0  1  1  1 |  0  1  1 | 0  0 ]     the tokens that were sampled; 0 for an environment's
    rollout_logps   [ 0  0 l0 l1 l2 |  0 l0 l1 | 0  0 ]

Whatever a token's id is, only the segments say what is padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from tpu_grpo.algorithms import RunAlgorithm
from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.packing import Packing, pack
from tpu_grpo.learner.routing import ReplayShape
from tpu_grpo.learner.sequences import TrainSequence, check_sequences, kept_tokens, train_sequences
from tpu_grpo.learner.token_weights import token_weights
from tpu_grpo.records.errors import NonFiniteError, RewardError
from tpu_grpo.records.stages import Completion

_Advantages = float | np.floating[Any] | Float[np.ndarray, "_"]
"""One for all tokens of a completion, or each token's own."""


@dataclass(frozen=True)
class RowShape:
    """Says what sequences may be, and what rows they are packed into."""

    max_prompt_tokens: int
    max_new_tokens: int
    tokens: int
    """S, the tokens of a row."""
    micro_batch: int
    """The rows of a micro-batch."""
    replay: ReplayShape | None = None
    """The sizes of what is replayed of the engine's routing, if anything is."""
    group_size: int = 1
    """The completions of each prompt, which follow each other."""
    filtered: bool = False
    """Whether tokens were drawn among some of the likeliest, and are scored among them."""

    def empty(self, rows: int) -> "TrainRows":
        """Make rows without sequences."""
        shape = (rows, self.tokens)
        return TrainRows(
            token_ids=np.zeros(shape, np.int32),
            segments=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
            mask=np.zeros(shape, np.bool_),
            rollout_logps=np.zeros(shape, np.float32),
            advantages=np.zeros(shape, np.float32),
            weights=np.zeros(shape, np.float32),
            experts=self.replay and self.replay.empty(*shape),
            kept=np.zeros(shape, np.int32) if self.filtered else None,
        )


@dataclass(frozen=True)
class TrainRows:
    """Holds R rows for the trainer, in host memory."""

    token_ids: Int[np.ndarray, "R S"]
    segments: Int[np.ndarray, "R S"]
    positions: Int[np.ndarray, "R S"]
    mask: Bool[np.ndarray, "R S"]
    rollout_logps: Float[np.ndarray, "R S"]
    advantages: Float[np.ndarray, "R S"]
    weights: Float[np.ndarray, "R S"]
    """How much each token counts in the loss; see token_weights.py."""
    experts: Integer[np.ndarray, "R LK S"] | None = None
    """What is replayed of the engine's routing, if anything; see routing.py."""
    old_logps: Float[np.ndarray, "R S"] | None = None
    """The policy's log-probabilities before the first update on the rollout, where they are known already."""
    reference_logps: Float[np.ndarray, "R S"] | None = None
    """The initial policy's, where they are known already."""
    kept: Int[np.ndarray, "R S"] | None = None
    """How many of the likeliest tokens each sampled one was drawn among, if not all."""

    def chunks(self, size: int) -> Iterator["TrainRows"]:
        """Cut the rows into consecutive pieces of ``size``."""
        columns: dict[str, Any] = {name: v for f in fields(self) if (v := getattr(self, name := f.name)) is not None}
        for start in range(0, len(self.mask), size):
            yield replace(self, **{name: column[start : start + size] for name, column in columns.items()})


def train_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: Float[np.ndarray, " B"] | Sequence[Float[np.ndarray, "_"]],
    shape: RowShape,
    aggregation: LossAggregation = "token-mean",
    counted: Bool[np.ndarray, " B"] | None = None,
) -> tuple[TrainRows, Packing]:
    """Check and pack B prompts (token ids) and their completions, which are all those of an update.

    ``advantages`` are of completions, or of all tokens. What is not ``counted`` has weight 0; no mean divides by it.
    The same holds for tokens that the policy did not sample, where what else is known of tokens counts for nothing.
    The Packing is that of the sequences from `train_sequences`.

    Raises:
        DataError: for a prompt or completion that does not fit, in which no token was sampled, or log-probabilities or
            experts that are missing or too few; names the row.
        NonFiniteError: for a log-probability that is not finite; names the row.
    """
    check_sequences(prompts, completions, shape.max_prompt_tokens, shape.max_new_tokens)
    sequences = train_sequences(prompts, completions)
    packing = pack([len(one) for one in sequences], row_tokens=shape.tokens, multiple=shape.micro_batch)
    counts = np.array([completion.sampled_tokens for completion in completions])
    counting = counts if counted is None else counts * counted
    weights = token_weights(counting, aggregation, shape.max_new_tokens, shape.group_size)
    packed = shape.empty(packing.count)
    for index, one in enumerate(sequences):
        row, start = packing.rows[index], packing.starts[index]
        first, end = start + len(one.prompt), start + len(one)
        packed.token_ids[row, start:first] = one.prompt
        packed.segments[row, start:end] = packing.segments[index]
        packed.positions[row, start:end] = np.arange(len(one))
        _fill(packed, (row, slice(first, end)), one, _of_sequence(advantages[one.row], one), weights[one.row])
        if packed.kept is not None:
            kept = kept_tokens(one.row, completions[one.row])[one.places]
            packed.kept[row, first:end] = np.where(one.mask, kept, 0)
    if shape.replay is not None and packed.experts is not None:
        shape.replay.fill(packed.experts, sequences, packing)
    return packed, packing


def _fill(
    packed: TrainRows,
    places: tuple[int, slice],
    one: TrainSequence,
    advantages: _Advantages,
    weight: float,
) -> None:
    """Write the tokens of a sequence after its prompt; where none was sampled, all but the token is 0."""
    packed.token_ids[places] = one.token_ids
    packed.mask[places] = one.mask
    packed.rollout_logps[places] = one.logprobs
    packed.advantages[places] = np.where(one.mask, advantages, 0.0)
    packed.weights[places] = np.where(one.mask, weight, 0.0)


def _of_sequence(advantage: _Advantages, one: TrainSequence) -> _Advantages:
    """Return the advantages of a sequence's tokens, from that of its completion or those of all of its tokens."""
    return advantage[one.places] if isinstance(advantage, np.ndarray) else advantage


def unpacked(
    values_RS: Float[np.ndarray, "R S"],
    packing: Packing,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    max_new_tokens: int,
) -> Float[np.ndarray, "B T"]:
    """Take the values of B completions' sampled tokens out of packed rows, T = ``max_new_tokens``; 0 elsewhere."""
    found = np.zeros((len(completions), max_new_tokens), values_RS.dtype)
    for one, row, first in _places(packing, prompts, completions):
        found[one.row, one.places] = np.where(one.mask, values_RS[row, first : first + len(one.mask)], 0)
    return found


def repacked(
    values_BT: Float[np.ndarray, "B T"],
    packing: Packing,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    row_tokens: int,
) -> Float[np.ndarray, "R S"]:
    """Put the values of B completions' sampled tokens into packed rows of S = ``row_tokens``; 0 elsewhere."""
    packed = np.zeros((packing.count, row_tokens), values_BT.dtype)
    for one, row, first in _places(packing, prompts, completions):
        packed[row, first : first + len(one.mask)] = np.where(one.mask, values_BT[one.row, one.places], 0)
    return packed


def _places(
    packing: Packing, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> Iterator[tuple[TrainSequence, int, int]]:
    """Give every sequence, its training row, and where its tokens after the prompt start there."""
    sequences = train_sequences(prompts, completions)
    for one, row, start in zip(sequences, packing.rows, packing.starts, strict=True):
        yield one, int(row), int(start) + len(one.prompt)


def group_advantages(
    rewards_B: Float[np.ndarray, " B"],
    *,
    group_size: int,
    algorithm: RunAlgorithm,
    known: Mapping[str, np.ndarray] | None = None,
    taken_P: Bool[np.ndarray, " P"] | None = None,
) -> Float[np.ndarray, " B"]:
    """Compute the algorithm's advantages of B rows, of which ``group_size`` in a row are of one prompt, in float64.

    Args:
        rewards_B: the total rewards.
        group_size: G.
        algorithm: what the advantages are taken from.
        known: what else advantages may ask for, by the names in `ON_REQUEST` of algorithms/algorithm.py.
        taken_P: the groups that there are to the algorithm, if not all; completions of the others get 0.

    Raises:
        RewardError: for a count that is no multiple of the group size, a reward that is not finite, or one that the
            advantages are not made for.
        NonFiniteError: for an advantage that is not finite.
    """
    _check_rewards(rewards_B, group_size)
    rewards_PG = rewards_B.astype(np.float64).reshape(-1, group_size)
    taken_P = np.ones(len(rewards_PG), np.bool_) if taken_P is None else taken_P
    advantages_PG = np.zeros_like(rewards_PG)
    if taken_P.any():
        advantages_PG[taken_P] = algorithm.advantages(rewards_PG[taken_P], _of_groups(known or {}, taken_P))
    advantages_B = advantages_PG.reshape(-1)
    if (bad := np.flatnonzero(~np.isfinite(advantages_B))).size:
        group = rewards_PG[bad[0] // group_size].tolist()
        raise NonFiniteError(
            f"advantages must be finite, got {advantages_B[bad[0]]} in row {bad[0]}, for a group with the rewards "
            f"{group}; repair the algorithm's method advantages"
        )
    return advantages_B


def _check_rewards(rewards_B: Float[np.ndarray, " B"], group_size: int) -> None:
    if len(rewards_B) % group_size:
        raise RewardError(
            f"rewards must come in groups of algorithm.group_size={group_size}, got {len(rewards_B)}; score every row"
        )
    if (bad := np.flatnonzero(~np.isfinite(rewards_B))).size:
        raise RewardError(
            f"rewards must be finite, got {rewards_B[bad[0]]} in row {bad[0]}; return a number for every completion"
        )


def _of_groups(known: Mapping[str, np.ndarray], taken_P: Bool[np.ndarray, " P"]) -> dict[str, np.ndarray]:
    """Take what is known of some groups; their axis is the last but one of what has one."""
    return {name: values[..., taken_P, :] if values.ndim > 1 else values for name, values in known.items()}
