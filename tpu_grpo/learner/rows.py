"""Packs completions, on the host, into the rows that a train step takes.

Arrays: R training rows of S tokens each, B completions of at most T tokens, N sequences. Several sequences, each a
prompt and the tokens after it, share a row:

    token_ids       [p0 p1 c0 c1 c2 | p0 c0 c1 | 0  0 ]
    segments        [ 1  1  1  1  1 |  2  2  2 | 0  0 ]     0 marks padding; no token attends to another segment
    positions       [ 0  1  2  3  4 |  0  1  2 | 0  0 ]
    mask            [ 0  0  1  1  1 |  0  1  1 | 0  0 ]     1 for sampled tokens, 0 for an environment's tokens
    rollout_logps   [ 0  0 l0 l1 l2 |  0 l0 l1 | 0  0 ]

A completion is one sequence; a conversation is one sequence per branch (see tpu_grpo/records/episode.py). Here the
policy's first turn is thinking t and an answer a, its second turn is b, and the environment replies o after each turn.
Before the second turn the chat template drops t, so that a new branch begins. Its prompt q is the conversation so far
without t:

    token_ids   [t0 t1 a0 o0 b0 b1 o1]          branch 1   p | t0 t1 a0        mask [1 1 1]
    sampled     [ 1  1  1  0  1  1  0]          branch 2   q | b0 b1           mask [1 1]
    branches    Branch(p, 0, 4), Branch(q, 4, 7)

Tokens after a branch's last sampled token are left out, and so are branches without a sampled token.

**Prompts stored once.** Sequences with the same prompt can share a row behind one copy of it (`RowShape.shares`). The
first of them is stored as above. Each other one begins with the prompt's last token, whose hidden state predicts its
first token, and attends to the copy of the other prompt tokens. With a prompt p0 p1 p2 and completions c and d:

    token_ids       [p0 p1 p2 c0 c1 | p2 d0 d1 d2 ]
    segments        [ 1  1  1  1  1 |  2  2  2  2 ]
    positions       [ 0  1  2  3  4 |  2  3  4  5 ]
    mask            [ 0  0  0  1  1 |  0  1  1  1 ]
    shared          [ 1  1  0  0  0 | -1 -1 -1 -1 ]     n > 0: other segments attend to it, those with -n
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Integer, Shaped

from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.forward import ModelRows
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.records.episode import Branch
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import Completion, routing_dtype

# --- sequences --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainSequence:
    """A prompt, and T tokens of a completion after it."""

    row: int
    """The index of the completion that the tokens belong to."""
    prompt: Sequence[int]
    places: slice
    """Where the tokens are in the completion."""
    token_ids: Integer[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]
    """Which tokens were sampled; the last token always was."""
    logprobs: Float[np.ndarray, " T"]
    """The engine's log-probabilities; 0 for tokens that were not sampled."""
    experts: Integer[np.ndarray, "S layers k"] | None
    """The experts that the engine used for the S tokens that it computed; None if they were not recorded."""
    experts_beyond: int
    """The number of tokens left out at the end of the branch; ``experts`` may include these tokens' experts."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.token_ids)


def check_sequences(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], max_prompt_tokens: int, max_new_tokens: int
) -> None:
    """Raise DataError or NonFiniteError for the first row whose prompt or completion is too long, or whose
    log-probabilities are missing, too few or not finite.

    The prompt of a conversation is that of its first branch. A conversation that never began is not checked.
    """
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if never_began(completion):
            continue
        _check_mask(row, completion)
        first = prompt if completion.episode is None else _checked_branches(row, completion)[0].prompt
        for what, setting, most, count in (
            ("prompts", "data.max_prompt_tokens", max_prompt_tokens, len(first)),
            ("completions", "rollout.max_new_tokens", max_new_tokens, len(completion.token_ids)),
        ):
            if not 0 < count <= most:
                raise DataError(
                    f"{what} must have 1 to {setting}={most} tokens, got {count} in row {row}; raise the setting, or "
                    "drop the row"
                )
        _check_branch_lengths(row, completion, max_prompt_tokens + max_new_tokens)
        _check_logprobs(row, completion)


def never_began(completion: Completion) -> bool:
    """Whether a conversation has no turn, because its environment failed before the first turn."""
    return completion.episode is not None and completion.episode.failure is not None and not completion.episode.turns


def sampled_mask(completion: Completion) -> Bool[np.ndarray, " T"]:
    """Return a mask of a completion's tokens: True for those that the policy sampled."""
    return np.ones(len(completion.token_ids), np.bool_) if completion.sampled is None else completion.sampled


def _sequences_of(row: int, prompt: Sequence[int], completion: Completion) -> Iterator[TrainSequence]:
    """Yield the sequences of a completion: one, or one for each branch of a conversation in which the policy sampled.
    What the environment wrote after the last sampled token is left out."""
    whole = Branch((), 0, len(completion.token_ids), completion.experts)
    sampled_T = sampled_mask(completion)
    for branch in [whole] if completion.episode is None else completion.episode.branches:
        sampled = np.flatnonzero(sampled_T[branch.start : branch.end])
        if not len(sampled):
            continue
        places = slice(branch.start, branch.start + int(sampled[-1]) + 1)
        mask = sampled_T[places]
        yield TrainSequence(
            row=row,
            prompt=prompt if completion.episode is None else branch.prompt,
            places=places,
            token_ids=completion.token_ids[places],
            mask=mask,
            logprobs=np.where(mask, completion.logprobs[places], 0.0),
            experts=branch.experts,
            experts_beyond=branch.end - places.stop,
        )


def _check_mask(row: int, completion: Completion) -> None:
    if completion.sampled is None:
        return
    if len(completion.sampled) != len(completion.token_ids):
        raise DataError(
            f"every token must be sampled or not: row {row} has {len(completion.token_ids)} tokens, and a mask of "
            f"{len(completion.sampled)}; give one value for each"
        )
    if not completion.sampled.any():
        raise DataError(
            f"a conversation must have a token that the policy sampled, got none among the "
            f"{len(completion.token_ids)} of row {row}; drop the row"
        )


def _checked_branches(row: int, completion: Completion) -> Sequence[Branch]:
    """Return a conversation's branches, after a check that they follow each other and hold all sampled tokens."""
    branches = () if completion.episode is None else completion.episode.branches
    covered_T, place = np.zeros(len(completion.token_ids), np.bool_), 0
    for branch in branches:
        if not place <= branch.start <= branch.end <= len(covered_T):
            raise DataError(
                f"branches must follow each other within the {len(covered_T)} tokens of their conversation, got "
                f"{[(one.start, one.end) for one in branches]} in row {row}; correct their places"
            )
        place = branch.end
        covered_T[branch.start : branch.end] = True
    if not branches or (sampled_mask(completion) & ~covered_T).any():
        raise DataError(
            f"every token that was sampled must be in a branch of its conversation, got "
            f"{[(one.start, one.end) for one in branches]} for the {completion.sampled_tokens} sampled ones of row "
            f"{row}; add a branch"
        )
    return branches


def _check_branch_lengths(row: int, completion: Completion, most: int) -> None:
    for number, branch in enumerate(completion.episode.branches if completion.episode else (), start=1):
        count = len(branch.prompt) + branch.end - branch.start
        if not branch.prompt or count > most:
            raise DataError(
                "a branch must have a prompt, and with it at most data.max_prompt_tokens + rollout.max_new_tokens = "
                f"{most} tokens, got {len(branch.prompt)} + {branch.end - branch.start} in branch {number} of row "
                f"{row}; raise a setting, or drop the row"
            )


def _check_logprobs(row: int, completion: Completion) -> None:
    logprobs, count = completion.logprobs, len(completion.token_ids)
    if logprobs is None or len(logprobs) != count:
        found = "none" if logprobs is None else len(logprobs)
        raise DataError(
            f"every sampled token needs its log-probability: row {row} has {count} tokens and {found}; let the engine "
            "return them"
        )
    if (bad := np.flatnonzero(~np.isfinite(logprobs) & sampled_mask(completion))).size:
        raise NonFiniteError(
            f"the engine's log-probability of token {bad[0]} in row {row} must be finite, got {logprobs[bad[0]]}; "
            "check the model's weights, or use model.dtype=float32"
        )


# --- packing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Says where N sequences lie in the training rows."""

    sequences: Sequence[Any]
    rows: Int[np.ndarray, " N"]
    """The training row of each sequence."""
    starts: Int[np.ndarray, " N"]
    """The place of each sequence's first token in its row. For a sequence whose prompt is stored with another one, it
    is where that token would be: its tokens after the prompt are at ``start + len(prompt)``, too."""
    lenders: Int[np.ndarray, " N"]
    """The index of the sequence that each sequence's prompt is stored with; its own for most."""
    segments: Int[np.ndarray, " N"]
    """The number of each sequence within its row, from 1."""
    count: int
    """The number of training rows, empty ones included."""


def pack(sequences: Sequence[TrainSequence], *, row_tokens: int, multiple: int, shares: bool = False) -> Packing:
    """Pack sequences, each of at most ``row_tokens`` tokens, into a multiple of ``multiple`` rows with little
    padding.

        packing = pack(sequences, row_tokens=8, multiple=2)

        lengths 5 3 4 2 2           row 0    a a a a a b b b
                                    row 1    c c c c d d e e

    Every host computes the same packing from the same lengths. Best-fit decreasing (Johnson 1973, "Near-optimal bin
    packing algorithms") gives the number of rows, which is rounded up to whole micro-batches. `_balanced` then divides
    the work more evenly over these rows. If `_balanced` finds no room for a sequence, as in this example, the rows of
    best-fit decreasing are used.

    With ``shares``, at most 1, 2, 4, ... sequences share a prompt: whatever leads to the fewest micro-batches, which
    all take the same time, and then to the fewest rows.
    """
    assert max(map(len, sequences)) <= row_tokens, "train_rows refuses longer sequences"
    choices = [[[index] for index in range(len(sequences))]]
    if shares:
        alike = _same_prompts(sequences)
        largest = max(map(len, alike))
        choices += [_bundles(sequences, alike, row_tokens, 2**n) for n in range(1, (largest - 1).bit_length() + 1)]
    tight = [_best_fit([_bundle_tokens(sequences, each) for each in bundles], row_tokens) for bundles in choices]
    counts = [-(-(int(rows.max()) + 1) // multiple) * multiple for rows in tight]
    best = min(range(len(choices)), key=lambda choice: (counts[choice], int(tight[choice].max()), choice))
    bundles, count = choices[best], counts[best]
    bundle_rows = _balanced([_bundle_tokens(sequences, each) for each in bundles], row_tokens, count)
    bundle_rows = tight[best] if bundle_rows is None else bundle_rows
    rows, starts, segments, lenders = (np.zeros(len(sequences), np.int64) for _ in range(4))
    ends, numbers = [0] * count, [0] * count
    for row, bundle in zip(bundle_rows.tolist(), bundles, strict=True):
        for place, index in enumerate(bundle):
            one = sequences[index]
            stored = len(one.prompt) - 1 if place else 0
            numbers[row] += 1
            rows[index], segments[index], lenders[index] = row, numbers[row], bundle[0]
            starts[index] = ends[row] - stored
            ends[row] += len(one) - stored
    return Packing(sequences, rows, starts, lenders, segments, count)


def _same_prompts(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Collect the indices of sequences that can share a prompt: it has several tokens, and its experts are the same."""
    found: dict[Any, list[int]] = {}
    for index, one in enumerate(sequences):
        count = len(one.prompt)
        experts = None if one.experts is None else one.experts[:count].tobytes()
        found.setdefault((tuple(one.prompt), experts) if count > 1 else index, []).append(index)
    return list(found.values())


def _bundles(
    sequences: Sequence[TrainSequence], alike: Sequence[Sequence[int]], row_tokens: int, most: int
) -> list[list[int]]:
    """Divide sequences with the same prompt into bundles that fit a row, each of at most ``most``, by best fit."""
    found = list[list[int]]()
    for indices in alike:
        own, rooms = list[list[int]](), list[int]()
        for index in sorted(indices, key=lambda index: (-len(sequences[index]), index)):
            one = sequences[index]
            added = len(one) - len(one.prompt) + 1
            fits = [n for n, room in enumerate(rooms) if room >= added and len(own[n]) < most]
            if fits:
                fullest = min(fits, key=lambda n: rooms[n])
                own[fullest].append(index)
                rooms[fullest] -= added
            else:
                own.append([index])
                rooms.append(row_tokens - len(one))
        found += own
    return found


def _bundle_tokens(sequences: Sequence[TrainSequence], bundle: Sequence[int]) -> int:
    first = sequences[bundle[0]]
    return len(first) + sum(len(sequences[index]) - len(first.prompt) + 1 for index in bundle[1:])


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _best_fit(lengths: Sequence[int], row_tokens: int) -> Int[np.ndarray, " N"]:
    """Put each sequence, the longest first, into the fullest row that has room for it, or into a new row."""
    rows, count = np.zeros(len(lengths), np.int64), 0
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in _longest_first(lengths):
        place = bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            room, row = row_tokens, count
            count += 1
        else:
            room, row = rooms.pop(place)
        rows[index] = row
        insort(rooms, (room - lengths[index], row))
    return rows


def _balanced(lengths: Sequence[int], row_tokens: int, count: int) -> Int[np.ndarray, " N"] | None:
    """Put each sequence, the longest first, into the row with the least work among those with room. Returns None if no
    row has room. The work of n tokens is n + n^2 / ``row_tokens``, where the second term stands for attention."""
    rows, work, room = np.zeros(len(lengths), np.int64), np.zeros(count), np.full(count, row_tokens)
    for index in _longest_first(lengths):
        length = lengths[index]
        row = int(np.where(room >= length, work, np.inf).argmin())
        if room[row] < length:
            return None
        rows[index] = row
        room[row] -= length
        work[row] += length * (1 + length / row_tokens)
    return rows


# --- rows -------------------------------------------------------------------------------------------------------------


class ReplayShape:
    """Sizes of the arrays of experts that the engine chose and the trainer replays: L layers, k experts, LK = L*k."""

    def __init__(self, model: Any):
        settings = model.config
        self.layers, self.per_token = settings.num_layers, settings.num_experts_per_tok
        self.dtype = routing_dtype(settings.num_experts)

    def empty(self, rows: int, tokens: int) -> Integer[np.ndarray, "{rows} LK {tokens}"]:
        """Make an empty table for `fill`. TPUs pad the last two axes to tiles, so the long token axis is last."""
        return np.full((rows, self.layers * self.per_token, tokens), np.iinfo(self.dtype).max, self.dtype)

    def fill(self, table_RLKS: Integer[np.ndarray, "R LK S"], packing: Packing) -> None:
        """Write the experts of sequences into a table from `empty`, at the places where the sequences are packed.

        The last token of a sequence has no experts: the engine sampled it, but did not run the model on it, because no
        token follows. Raises DataError, with the row, for a sequence without experts, or with experts of another shape.
        """
        for index, (one, row, start) in enumerate(zip(packing.sequences, packing.rows, packing.starts, strict=True)):
            expected = (len(one) - 1, self.layers, self.per_token)
            found = None if one.experts is None else one.experts.shape
            beyond = found[0] - expected[0] if found is not None and found[1:] == expected[1:] else -1
            if one.experts is None or not 0 <= beyond <= one.experts_beyond:
                raise DataError(
                    f"with algorithm.routing_replay every computed token needs its experts: row {one.row} must have "
                    f"{list(expected)} (tokens, layers, experts per token), got {found and list(found)}; let the "
                    "engine return them"
                )
            own = 0 if packing.lenders[index] == index else len(one.prompt) - 1
            experts = one.experts[own : expected[0]]
            table_RLKS[row, :, start + own : start + expected[0]] = experts.reshape(len(experts), -1).T


@dataclass(frozen=True)
class RowShape:
    """The limits of sequences, and the shape of the rows that they are packed into."""

    max_prompt_tokens: int
    max_new_tokens: int
    tokens: int
    """S, the number of tokens in a row."""
    micro_batch: int
    replay: ReplayShape | None = None
    """None unless the trainer replays the engine's choices of experts (algorithm.routing_replay)."""
    group_size: int = 1
    """The number of completions of each prompt; they are consecutive."""
    filtered: bool = False
    """Whether a token's probability is normalized over the tokens that it was drawn from, not over the vocabulary."""
    carries: bool = False
    """Whether some tokens may have been sampled by older weights."""
    chosen: bool = False
    """Whether only some tokens are learnt from, which ``importance`` marks (algorithm.top_entropy_quantile)."""
    teachers: int = 0
    """The number of teachers."""
    top_k: int = 0
    """How many of a teacher's likeliest tokens are compared; 0 if only the sampled token is."""
    shares: bool = False
    """Whether sequences with the same prompt may share one copy of it."""

    def empty(self, rows: int) -> TrainBatch:
        """Make rows without sequences, in host memory."""
        shape = (rows, self.tokens)
        model_rows = ModelRows(
            token_ids=np.zeros(shape, np.int32),
            segments=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
            mask=np.zeros(shape, np.bool_),
            experts=self.replay and self.replay.empty(*shape),
            kept=np.zeros(shape, np.int32) if self.filtered else None,
            shared=np.zeros(shape, np.int32) if self.shares else None,
        )
        return TrainBatch(
            model_rows,
            weights=np.zeros(shape, np.float32),
            advantages=np.zeros(shape, np.float32),
            rollout_logps=np.zeros(shape, np.float32),
            importance=np.zeros(shape, np.float32) if self.chosen else None,
            older=np.zeros(shape, np.bool_) if self.carries else None,
            **self.of_teachers(shape),
        )

    def of_teachers(self, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Make the arrays for what teachers say about the tokens of ``shape``, by field name in `TrainBatch`."""
        if not self.teachers:
            return {}
        if not self.top_k:
            return {name: np.zeros(shape, np.float32) for name in ("teacher_logps", "teacher_weights")}
        of_each = (*shape, self.teachers)
        return {
            "teacher_ids": np.zeros((*of_each, self.top_k), np.int32),
            "teacher_top": np.zeros((*of_each, self.top_k + 1), np.float32),
            "teacher_weights": np.zeros(of_each, np.float32),
        }


def train_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: Float[np.ndarray, " B"] | Sequence[Float[np.ndarray, "_"]],
    shape: RowShape,
    aggregation: LossAggregation = "token-mean",
    counted: Bool[np.ndarray, " B"] | None = None,
    known: Mapping[str, Shaped[np.ndarray, "B T ..."]] | None = None,
) -> tuple[TrainBatch, Packing]:
    """Check and pack all B prompts (token ids) and completions of an update into rows in host memory.

    ``advantages`` are given per completion, or per token. Completions that are not ``counted`` have weight 0, and no
    mean counts them. ``known`` holds arrays that are already computed, by their field names in `TrainBatch`.
    Tokens that the policy did not sample are context only.

    Raises:
        DataError: for a prompt or completion that does not fit, a completion without a sampled token, or
            log-probabilities, experts or numbers of kept tokens that are missing or too few; names the row.
        NonFiniteError: for a log-probability that is not finite; names the row.
    """
    check_sequences(prompts, completions, shape.max_prompt_tokens, shape.max_new_tokens)
    rows = enumerate(zip(prompts, completions, strict=True))
    sequences = [one for row, (prompt, completion) in rows for one in _sequences_of(row, prompt, completion)]
    packing = pack(sequences, row_tokens=shape.tokens, multiple=shape.micro_batch, shares=shape.shares)
    counts = np.array([completion.sampled_tokens for completion in completions])
    counting = counts if counted is None else counts * counted
    weights = token_weights(counting, aggregation, shape.max_new_tokens, shape.group_size)
    logps: dict[str, Any] = {
        name: np.zeros((packing.count, shape.tokens, *values_BT.shape[2:]), values_BT.dtype)
        for name, values_BT in (known or {}).items()
    }
    packed = replace(shape.empty(packing.count), **logps)
    model_rows = packed.rows
    places = (packing.rows, packing.starts, packing.segments, packing.lenders)
    for index, (one, row, start, segment, lender) in enumerate(zip(sequences, *places, strict=True)):
        first, end, of_row = start + len(one.prompt), start + len(one), advantages[one.row]
        own = start if lender == index else first - 1
        model_rows.token_ids[row, own:first] = one.prompt[own - start :]
        model_rows.token_ids[row, first:end] = one.token_ids
        model_rows.segments[row, own:end] = segment
        model_rows.positions[row, own:end] = np.arange(own - start, len(one))
        if lender != index:
            copied = packing.starts[lender]
            model_rows.shared[row, copied : copied + len(one.prompt) - 1] = copied + 1
            model_rows.shared[row, own:end] = -(copied + 1)
        model_rows.mask[row, first:end] = one.mask
        packed.rollout_logps[row, first:end] = one.logprobs
        own = of_row[one.places] if isinstance(of_row, np.ndarray) else of_row
        packed.advantages[row, first:end] = np.where(one.mask, own, 0.0)
        packed.weights[row, first:end] = np.where(one.mask, weights[one.row], 0.0)
        if model_rows.kept is not None:
            model_rows.kept[row, first:end] = np.where(one.mask, _kept_tokens(one, completions[one.row]), 0)
        if packed.older is not None and (ages := completions[one.row].ages) is not None:
            packed.older[row, first:end] = one.mask & (ages[one.places] > 0)
        for name, values_BT in (known or {}).items():
            logps[name][row, first:end] = _masked(one.mask, values_BT[one.row, one.places])
    if shape.replay is not None:
        shape.replay.fill(model_rows.experts, packing)
    return packed, packing


def unpacked(
    values_RS: Shaped[np.ndarray, "R S ..."], packing: Packing, completions: int, max_new_tokens: int
) -> Shaped[np.ndarray, "B T ..."]:
    """Unpack the values of sampled tokens from packed rows, T = ``max_new_tokens``; 0 elsewhere."""
    found = np.zeros((completions, max_new_tokens, *values_RS.shape[2:]), values_RS.dtype)
    for one, row, start in zip(packing.sequences, packing.rows, packing.starts, strict=True):
        first = start + len(one.prompt)
        found[one.row, one.places] = _masked(one.mask, values_RS[row, first : first + len(one.mask)])
    return found


def _masked(mask_T: Bool[np.ndarray, " T"], values: Shaped[np.ndarray, "T ..."]) -> Shaped[np.ndarray, "T ..."]:
    return np.where(mask_T.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _kept_tokens(one: TrainSequence, completion: Completion) -> Integer[np.ndarray, " T"]:
    """Return, for each token of a sequence, how many tokens top-k, top-p and min-p had kept when it was drawn."""
    if completion.kept is None or len(completion.kept) != len(completion.token_ids):
        raise DataError(
            f"algorithm.filtered_ratio=true needs the number of tokens that the filters kept: row {one.row} has "
            f"{len(completion.token_ids)} tokens and {'none' if completion.kept is None else len(completion.kept)}; "
            "let the engine return them"
        )
    return completion.kept[one.places]


def token_weights(
    counts_B: Int[np.ndarray, " B"],
    aggregation: LossAggregation,
    max_new_tokens: int,
    group_size: int = 1,
) -> Float[np.ndarray, " B"]:
    """Compute the weight of each token in the loss, float64, for completions of ``counts_B`` tokens.

        loss = sum over all tokens of the update of weight * token loss

    An update covers a step or a mini-batch of it. The denominators below count over the whole update, so that the
    gradient does not depend on micro-batches, packing or mesh. Weights are computed on the host and are inputs of the
    train step, so that one program serves every aggregation. All tokens of a completion have the same weight:

        sequence-mean-token-mean     1 / (B n_i)      B completions with tokens, n_i tokens in completion i
        token-mean                   1 / sum n_i
        sequence-mean-token-sum      1 / B
        sequence-mean-token-scale    1 / (B T)        T = rollout.max_new_tokens
        prompt-mean-token-mean       1 / (P n_p)      P prompts with tokens, n_p tokens in all completions of prompt p

    Only sampled tokens count; in a conversation these are the sampled tokens of all turns and branches. Each
    ``group_size`` consecutive completions belong to one prompt.
    """
    counts_B = counts_B.astype(np.float64)
    rows = max((counts_B > 0).sum(), 1)
    match aggregation:
        case "sequence-mean-token-mean":
            denominators_B = rows * counts_B
        case "token-mean":
            denominators_B = np.full_like(counts_B, counts_B.sum())
        case "sequence-mean-token-sum":
            denominators_B = np.full_like(counts_B, float(rows))
        case "sequence-mean-token-scale":
            denominators_B = np.full_like(counts_B, float(rows * max_new_tokens))
        case "prompt-mean-token-mean":
            counts_P = counts_B.reshape(-1, group_size).sum(axis=1)
            prompts = max((counts_P > 0).sum(), 1)
            denominators_B = np.repeat(prompts * counts_P, group_size)
    return (counts_B > 0) / np.maximum(denominators_B, 1.0)
