"""From a scored rollout to the rectangular rows a train step takes, on the host.

Arrays: B rows, T completion tokens (always ``rollout.max_new_tokens``), T_prompt prompt tokens (always
``data.max_prompt_tokens``, more where flash attention wants whole blocks): fixed shapes, one compiled program.

    prompt_ids       [pad pad  p0  p1]    left-padded, so that a completion starts at the same place in every row
    completion_ids   [ c0  c1 eos pad]    right-padded
    completion_mask  [  1   1   1   0]    from the length, not from the pad id
    rollout_logps    [ l0  l1  l2   0]

Tunix masks attention with ``ids != pad``. Where the pad id is also a stop token, a sampled pad is the last token of its
row: nothing attends to it, and its own log-probability comes from the position before it, so the mask is right. A pad
anywhere else would be invisible to the trainer but not to the engine, and is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from tpu_grpo.algorithms import Algorithm
from tpu_grpo.config import LossAggregation
from tpu_grpo.errors import DataError, NonFiniteError, RewardError
from tpu_grpo.learner.routing import ReplayShape
from tpu_grpo.learner.token_weights import token_weights
from tpu_grpo.types import Completion


@dataclass(frozen=True)
class TrainRows:
    """Holds B rows for the trainer, in host memory."""

    prompt_ids: Int[np.ndarray, "B T_prompt"]
    prompt_mask: Bool[np.ndarray, "B T_prompt"]
    completion_ids: Int[np.ndarray, "B T"]
    completion_mask: Bool[np.ndarray, "B T"]
    rollout_logps: Float[np.ndarray, "B T"]
    advantages: Float[np.ndarray, " B"]
    weights: Float[np.ndarray, "B T"]
    """How much each token counts in the loss; see token_weights.py."""
    experts: Integer[np.ndarray, "B LK S"] | None = None
    """What is replayed of the engine's routing, if anything; see routing.py. S = T_prompt + T."""

    def chunks(self, size: int) -> Iterator["TrainRows"]:
        """Cut the rows into consecutive pieces of ``size``."""
        columns: dict[str, Any] = {name: v for f in fields(self) if (v := getattr(self, name := f.name)) is not None}
        for start in range(0, len(self.advantages), size):
            yield replace(self, **{name: column[start : start + size] for name, column in columns.items()})


@dataclass(frozen=True)
class RowShape:
    """Says what every row is padded to, and with what."""

    prompt_tokens: int
    completion_tokens: int
    pad_id: int
    replay: ReplayShape | None = None
    """The sizes of what is replayed of the engine's routing, if anything is."""

    @property
    def tokens(self) -> int:
        """The tokens of a row, prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


def train_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: Float[np.ndarray, " B"],
    shape: RowShape,
    aggregation: LossAggregation = "token-mean",
) -> TrainRows:
    """Check and pad B prompts (token ids) and their completions, which are all rows of a step.

    Raises:
        DataError: for a prompt or completion that does not fit, a pad where the trainer would not see it, or
            log-probabilities or experts that are missing or too few; names the row.
        NonFiniteError: for a log-probability that is not finite; names the row.
    """
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        _check_prompt(row, prompt, shape)
        _check_tokens(row, completion, shape)
        _check_logprobs(row, completion)
    prompt_lengths = np.array([len(p) for p in prompts])
    lengths = np.array([len(c.token_ids) for c in completions])
    completion_mask = np.arange(shape.completion_tokens) < lengths[:, None]
    return TrainRows(
        prompt_ids=left_padded(prompts, shape.prompt_tokens, shape.pad_id),
        prompt_mask=np.arange(shape.prompt_tokens) >= shape.prompt_tokens - prompt_lengths[:, None],
        completion_ids=_right_padded(
            [c.token_ids for c in completions], shape.completion_tokens, shape.pad_id, np.int32
        ),
        completion_mask=completion_mask,
        rollout_logps=_right_padded([c.logprobs for c in completions], shape.completion_tokens, 0.0, np.float32),
        advantages=advantages.astype(np.float32),
        weights=token_weights(completion_mask, aggregation),
        experts=shape.replay and shape.replay.rows(prompts, completions, shape.prompt_tokens, shape.tokens),
    )


def group_advantages(
    rewards_B: Float[np.ndarray, " B"], *, group_size: int, algorithm: Algorithm
) -> Float[np.ndarray, " B"]:
    """Compute the algorithm's advantages of B rows, of which ``group_size`` in a row are of one prompt, in float64.

    Raises:
        RewardError: for a count that is no multiple of the group size, or a reward that is not finite.
        NonFiniteError: for an advantage that is not finite.
    """
    if len(rewards_B) % group_size:
        raise RewardError(
            f"rewards must come in groups of algorithm.group_size={group_size}, got {len(rewards_B)}; score every row"
        )
    if (bad := np.flatnonzero(~np.isfinite(rewards_B))).size:
        raise RewardError(
            f"rewards must be finite, got {rewards_B[bad[0]]} in row {bad[0]}; return a number for every completion"
        )
    rewards_PG = rewards_B.astype(np.float64).reshape(-1, group_size)
    advantages_B = np.asarray(algorithm.advantages(rewards_PG=rewards_PG), np.float64).reshape(-1)
    if (bad := np.flatnonzero(~np.isfinite(advantages_B))).size:
        group = rewards_PG[bad[0] // group_size].tolist()
        raise NonFiniteError(
            f"advantages must be finite, got {advantages_B[bad[0]]} in row {bad[0]}, for a group with the rewards "
            f"{group}; repair the algorithm's method advantages"
        )
    return advantages_B


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> Int[np.ndarray, "B T_prompt"]:
    """Pad token ids on the left, as int32.

    Raises:
        DataError: for a row longer than ``width``.
    """
    padded = np.full((len(rows), width), pad_id, np.int32)
    for row, (line, ids) in enumerate(zip(padded, rows, strict=True)):
        if not 0 < len(ids) <= width:
            raise DataError(
                f"prompts must have 1 to data.max_prompt_tokens={width} tokens, got {len(ids)} in row {row}; raise the "
                "setting or drop the prompt"
            )
        line[width - len(ids) :] = ids
    return padded


def _right_padded(rows: Sequence[np.ndarray], width: int, fill: float, dtype: type) -> np.ndarray:
    padded = np.full((len(rows), width), fill, dtype)
    for line, values in zip(padded, rows, strict=True):
        line[: len(values)] = values
    return padded


def _check_prompt(row: int, prompt: Sequence[int], shape: RowShape) -> None:
    if shape.pad_id in prompt:
        raise DataError(
            f"prompts must not contain the pad token {shape.pad_id}, found in row {row}; the trainer would not attend "
            "to it: give the tokenizer another pad token"
        )


def _check_tokens(row: int, completion: Completion, shape: RowShape) -> None:
    count = len(completion.token_ids)
    if not 0 < count <= shape.completion_tokens:
        raise DataError(
            f"completions must have 1 to rollout.max_new_tokens={shape.completion_tokens} tokens, got {count} in row "
            f"{row}; let the engine stop there"
        )
    if shape.pad_id in completion.token_ids[:-1]:
        raise DataError(
            f"the pad token {shape.pad_id} must end a completion, found before the end of row {row}; make it a stop "
            "token of the engine"
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
