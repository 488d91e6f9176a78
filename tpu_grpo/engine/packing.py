"""Packs completions into one array of fixed shape, which hosts exchange over their interconnect.

A row of int32 is ``[tokens, cached tokens, finish reason, ids..., log-probabilities...]``; ids and log-probabilities
take ``T = new_tokens`` places each, filled with 0. Log-probabilities keep their float32 bits. Where completions say how
many tokens the filters kept, these numbers take T places more.

The experts of a row's tokens are packed apart, because they are many: ``S * layers * k`` numbers of 8 or 16 bits, as
the bits of int32, which every device stores without padding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from tpu_grpo.engine.routed_experts import ExpertLayout
from tpu_grpo.records.stages import Completion, FinishReason

REASONS: tuple[FinishReason, ...] = ("stop", "length")
HEAD = 3


def pack(
    completions: Sequence[Completion], rows: int, new_tokens: int, *, kept: bool = False
) -> Int[np.ndarray, "{rows} columns"]:
    """Pack completions of at most ``new_tokens`` tokens each, and append empty rows up to ``rows``."""
    table = np.zeros((rows, HEAD + (3 if kept else 2) * new_tokens), np.int32)
    for row, completion in zip(table, completions, strict=False):
        count = len(completion.token_ids)
        row[:HEAD] = count, completion.cached_tokens, REASONS.index(completion.finish_reason)
        row[HEAD : HEAD + count] = completion.token_ids
        row[HEAD + new_tokens : HEAD + new_tokens + count] = completion.logprobs.view(np.int32)
        if kept:
            assert completion.kept is not None, "all engines of a run count what filters keep, or none does"
            row[HEAD + 2 * new_tokens : HEAD + 2 * new_tokens + count] = completion.kept
    return table


def unpack(table: Int[np.ndarray, "R columns"], *, kept: bool = False) -> list[Completion]:
    """Unpack what ``pack`` packed; every row is a completion."""
    new_tokens = (table.shape[1] - HEAD) // (3 if kept else 2)
    found = []
    for row in table:
        count, cached, reason = (int(value) for value in row[:HEAD])
        logprobs = row[HEAD + new_tokens : HEAD + new_tokens + count].copy().view(np.float32)
        counts = row[HEAD + 2 * new_tokens : HEAD + 2 * new_tokens + count].copy() if kept else None
        found.append(Completion(row[HEAD : HEAD + count].copy(), logprobs, REASONS[reason], cached, kept=counts))
    return found


def pack_experts(
    completions: Sequence[Completion], rows: int, tokens: int, layout: ExpertLayout
) -> Int[np.ndarray, "{rows} columns"]:
    """Pack the experts of at most ``tokens`` tokens of each completion, and append empty rows up to ``rows``."""
    table = np.zeros((rows, -(-tokens * layout.token_bytes // 4)), np.int32)
    for row, completion in zip(table.view(np.uint8), completions, strict=False):
        assert completion.experts is not None, "every request of a batch asks for experts, or none does"
        packed = np.ascontiguousarray(completion.experts).reshape(-1).view(np.uint8)
        row[: packed.size] = packed
    return table


def unpack_experts(
    row: Int[np.ndarray, " columns"], completion: Completion, tokens: int, layout: ExpertLayout
) -> Completion:
    """Give a completion the experts of its first ``tokens`` tokens, prompt included, from a row of ``pack_experts``."""
    flat = np.ascontiguousarray(row).view(np.uint8)[: tokens * layout.token_bytes].copy().view(layout.dtype)
    return replace(completion, experts=flat.reshape(tokens, layout.layers, layout.per_token))
