"""From a scored rollout to the packed rows that a train step takes, on the host.

Arrays: R training rows of S tokens each, B completions of at most T tokens. Several sequences, each a prompt and its
completion, share a row; see packing.py.

    token_ids       [p0 p1 c0 c1 c2 | p0 c0 c1 | 0  0 ]
    segments        [ 1  1  1  1  1 |  2  2  2 | 0  0 ]     0 is padding; no token sees another segment
    positions       [ 0  1  2  3  4 |  0  1  2 | 0  0 ]
    mask            [ 0  0  1  1  1 |  0  1  1 | 0  0 ]     the tokens that were sampled
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
from tpu_grpo.errors import DataError, NonFiniteError, RewardError
from tpu_grpo.learner.packing import Packing, pack
from tpu_grpo.learner.routing import ReplayShape
from tpu_grpo.learner.token_weights import token_weights
from tpu_grpo.types import Completion


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

    Raises:
        DataError: for a prompt or completion that does not fit, or log-probabilities or experts that are missing or too
            few; names the row.
        NonFiniteError: for a log-probability that is not finite; names the row.
    """
    check_sequences(prompts, completions, shape.max_prompt_tokens, shape.max_new_tokens)
    counts = np.array([len(completion.token_ids) for completion in completions])
    lengths = [len(prompt) + int(count) for prompt, count in zip(prompts, counts, strict=True)]
    packing = pack(lengths, row_tokens=shape.tokens, multiple=shape.micro_batch)
    counting = counts if counted is None else counts * counted
    weights = token_weights(counting, aggregation, shape.max_new_tokens, shape.group_size)
    packed = shape.empty(packing.count)
    for index, (row, start) in enumerate(zip(packing.rows, packing.starts, strict=True)):
        completion, end = completions[index], start + lengths[index]
        sampled = end - counts[index]
        packed.token_ids[row, start:sampled] = prompts[index]
        packed.token_ids[row, sampled:end] = completion.token_ids
        packed.segments[row, start:end] = packing.segments[index]
        packed.positions[row, start:end] = np.arange(lengths[index])
        packed.mask[row, sampled:end] = True
        packed.rollout_logps[row, sampled:end] = completion.logprobs
        packed.advantages[row, sampled:end] = advantages[index]
        packed.weights[row, sampled:end] = weights[index]
        if packed.kept is not None:
            packed.kept[row, sampled:end] = kept_tokens(index, completion)
    if shape.replay is not None and packed.experts is not None:
        shape.replay.fill(packed.experts, prompts, completions, packing)
    return packed, packing


def unpacked(
    values_RS: Float[np.ndarray, "R S"],
    packing: Packing,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    max_new_tokens: int,
) -> Float[np.ndarray, "B T"]:
    """Take the values of B completions' tokens out of packed rows, T = ``max_new_tokens``; 0 past an end."""
    found = np.zeros((len(completions), max_new_tokens), values_RS.dtype)
    for index, (row, first, count) in enumerate(_places(packing, prompts, completions)):
        found[index, :count] = values_RS[row, first : first + count]
    return found


def repacked(
    values_BT: Float[np.ndarray, "B T"],
    packing: Packing,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    row_tokens: int,
) -> Float[np.ndarray, "R S"]:
    """Put the values of B completions' tokens into packed rows of S = ``row_tokens``; 0 elsewhere."""
    packed = np.zeros((packing.count, row_tokens), values_BT.dtype)
    for index, (row, first, count) in enumerate(_places(packing, prompts, completions)):
        packed[row, first : first + count] = values_BT[index, :count]
    return packed


def _places(
    packing: Packing, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> Iterator[tuple[int, int, int]]:
    """Give the training row of every completion, where it starts there, and its number of tokens."""
    for row, start, prompt, completion in zip(packing.rows, packing.starts, prompts, completions, strict=True):
        yield int(row), int(start) + len(prompt), len(completion.token_ids)


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


def check_sequences(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], max_prompt_tokens: int, max_new_tokens: int
) -> None:
    """Refuse prompts and completions that do not fit, and log-probabilities that are missing, too few or not finite.

    Raises:
        DataError, NonFiniteError: for such a row; names it.
    """
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        _check_length("prompts", "data.max_prompt_tokens", max_prompt_tokens, row, len(prompt))
        _check_length("completions", "rollout.max_new_tokens", max_new_tokens, row, len(completion.token_ids))
        _check_logprobs(row, completion)


def kept_tokens(row: int, completion: Completion) -> Integer[np.ndarray, " T"]:
    """Return how many tokens the filters kept of each of a completion's.

    Raises:
        DataError: for a completion that does not say so.
    """
    if completion.kept is None or len(completion.kept) != len(completion.token_ids):
        raise DataError(
            f"algorithm.filtered_ratio=true needs the number of tokens that the filters kept: row {row} has "
            f"{len(completion.token_ids)} tokens and {'none' if completion.kept is None else len(completion.kept)}; "
            "let the engine return them"
        )
    return completion.kept


def _check_length(what: str, setting: str, most: int, row: int, count: int) -> None:
    if not 0 < count <= most:
        raise DataError(
            f"{what} must have 1 to {setting}={most} tokens, got {count} in row {row}; raise the setting, or drop the "
            "row"
        )


def _check_logprobs(row: int, completion: Completion) -> None:
    logprobs, count = completion.logprobs, len(completion.token_ids)
    if logprobs is None or len(logprobs) != count:
        found = "none" if logprobs is None else len(logprobs)
        raise DataError(
            f"every sampled token needs its log-probability: row {row} has {count} tokens and {found}; let the engine "
            "return them"
        )
    if (bad := np.flatnonzero(~np.isfinite(logprobs))).size:
        raise NonFiniteError(
            f"the engine's log-probability of token {bad[0]} in row {row} must be finite, got {logprobs[bad[0]]}; "
            "check the model's weights, or use model.dtype=float32"
        )
