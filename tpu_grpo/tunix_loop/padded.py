"""Rows as Tunix's own loop has them: one prompt and completion each, padded to fixed lengths.

Arrays: B rows, T_prompt prompt tokens, T completion tokens, S = T_prompt + T.

    prompt_ids       [pad pad  p0  p1]    left-padded, so that a completion starts at the same place in every row
    completion_ids   [ c0  c1 eos pad]    right-padded
    completion_mask  [  1   1   1   0]    from the length, not from the pad id
    rollout_logps    [ l0  l1  l2   0]

In prompts the pad token alone says what is padding, so that none may hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.forward import ModelRows
from tpu_grpo.learner.rows import check_sequences, token_weights
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion


@dataclass(frozen=True)
class PaddedShape:
    """Says what every row is padded to, and with what."""

    prompt_tokens: int
    completion_tokens: int
    pad_id: int


@dataclass(frozen=True)
class PaddedRows:
    """Holds B rows in host memory."""

    prompt_ids: Int[np.ndarray, "B T_prompt"]
    prompt_mask: Bool[np.ndarray, "B T_prompt"]
    completion_ids: Int[np.ndarray, "B T"]
    completion_mask: Bool[np.ndarray, "B T"]
    rollout_logps: Float[np.ndarray, "B T"]
    advantages: Float[np.ndarray, " B"]
    weights: Float[np.ndarray, "B T"]
    """How much each token counts in the loss; see learner/rows.py."""


def padded_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: Float[np.ndarray, " B"],
    shape: PaddedShape,
    aggregation: LossAggregation,
) -> PaddedRows:
    """Pad B prompts (token ids) and the completions that the engine sampled after them.

    Raises:
        DataError: for what does not fit, a pad token where Tunix would not see it, or log-probabilities that are
            missing or too few; names the row.
        NonFiniteError: for a log-probability that is not finite; names the row.
    """
    check_sequences(prompts, completions, shape.prompt_tokens, shape.completion_tokens)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if shape.pad_id in completion.token_ids[:-1]:
            raise DataError(
                f"the pad token {shape.pad_id} must end a completion, found before the end of row {row}; make it a "
                "stop token of the engine"
            )
        if shape.pad_id in prompt:
            raise DataError(
                f"prompts must not contain the pad token {shape.pad_id}, found in row {row}; the trainer would not "
                "attend to it: give the tokenizer another pad token"
            )
    counts = np.array([len(completion.token_ids) for completion in completions])
    mask = np.arange(shape.completion_tokens) < counts[:, None]
    weights = token_weights(counts, aggregation, shape.completion_tokens)
    lengths = np.array([len(prompt) for prompt in prompts])
    width = shape.completion_tokens
    return PaddedRows(
        prompt_ids=left_padded(prompts, shape.prompt_tokens, shape.pad_id),
        prompt_mask=np.arange(shape.prompt_tokens) >= shape.prompt_tokens - lengths[:, None],
        completion_ids=_right_padded([c.token_ids for c in completions], width, shape.pad_id, np.int32),
        completion_mask=mask,
        rollout_logps=_right_padded([c.logprobs for c in completions], width, 0.0, np.float32),
        advantages=advantages.astype(np.float32),
        weights=(mask * weights[:, None]).astype(np.float32),
    )


def model_rows(
    prompt_ids: Int[Array, "B T_prompt"],
    completion_ids: Int[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    pad_id: int,
) -> ModelRows:
    """Describe padded rows to the forward pass, which then looks at the tokens of ``completion_mask``."""
    prompt_mask = prompt_ids != pad_id
    seen_BS = jnp.concatenate([prompt_mask, completion_mask], axis=1).astype(jnp.int32)
    return ModelRows(
        token_ids=jnp.concatenate([prompt_ids, completion_ids], axis=1),
        segments=seen_BS,
        positions=jnp.maximum(seen_BS.cumsum(axis=1) - 1, 0),
        mask=after_prompts(completion_mask, prompt_ids.shape[1]),
    )


def after_prompts(values_BT: jax.Array, prompt_tokens: int) -> jax.Array:
    """Put zeros for the prompts before the values of completions: [B, T] becomes [B, S]."""
    return jnp.pad(values_BT, ((0, 0), (prompt_tokens, 0)))


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
