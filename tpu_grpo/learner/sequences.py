"""From completions to the sequences that are trained on: one for each branch of a conversation, else one.

A conversation of two turns, with what the environment answered (o) after each. Before the second turn the chat template
dropped the thinking (t) of the first, so that another branch begins there, whose prompt q is the past without it:

    token_ids   [t0 t1 a0 o0 b0 b1 o1]          branch 1   p | t0 t1 a0        mask [1 1 1]
    sampled     [ 1  1  1  0  1  1  0]          branch 2   q | b0 b1           mask [1 1]
    branches    Branch(p, 0, 4), Branch(q, 4, 7)

Tokens after the last one that was sampled are context of nothing, and are left out; so is a branch in which none was.

Suffixes: B completions, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

from tpu_grpo.records.episode import Branch
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import Completion


@dataclass(frozen=True)
class TrainSequence:
    """A prompt, and T tokens of a completion that follow it."""

    row: int
    """The completion that they are of."""
    prompt: Sequence[int]
    places: slice
    """Where they are among the tokens of the completion."""
    token_ids: Integer[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]
    """Which of them were sampled; the last one was."""
    logprobs: Float[np.ndarray, " T"]
    """The engine's, 0 for tokens that were not sampled."""
    experts: Integer[np.ndarray, "S layers k"] | None
    """What the engine used, for the S tokens that it computed."""
    experts_beyond: int
    """How many tokens after the last one may have experts, too."""

    def __len__(self) -> int:
        """Return the number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.token_ids)


def train_sequences(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[TrainSequence]:
    """Return the sequences of B completions that `check_sequences` has passed, in the order of rows and branches."""
    return [
        sequence
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for sequence in _sequences_of(row, prompt, completion)
    ]


def check_sequences(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], max_prompt_tokens: int, max_new_tokens: int
) -> None:
    """Refuse prompts and completions that do not fit, and log-probabilities that are missing, too few or not finite.

    The prompt of a conversation is that of its first branch. One that never began is passed over.

    Raises:
        DataError, NonFiniteError: for such a row; names it.
    """
    if all(map(never_began, completions)):
        raise DataError(
            f"some conversation must have had a turn, got {len(completions)} whose environments all failed before "
            "their first; repair the environment: environment.on_error=stop shows how it fails"
        )
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if never_began(completion):
            continue
        _check_mask(row, completion)
        first = prompt if completion.episode is None else _checked_branches(row, completion)[0].prompt
        _check_length("prompts", "data.max_prompt_tokens", max_prompt_tokens, row, len(first))
        _check_length("completions", "rollout.max_new_tokens", max_new_tokens, row, len(completion.token_ids))
        _check_branch_lengths(row, completion, max_prompt_tokens + max_new_tokens)
        _check_logprobs(row, completion)


def never_began(completion: Completion) -> bool:
    """Say whether a conversation has no turn, because its environment failed before the first."""
    return completion.episode is not None and completion.episode.failure is not None and not completion.episode.turns


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


def sampled_mask(completion: Completion) -> Bool[np.ndarray, " T"]:
    """Say which of a completion's tokens the policy sampled."""
    if completion.sampled is None:
        return np.ones(len(completion.token_ids), np.bool_)
    return completion.sampled


def _sequences_of(row: int, prompt: Sequence[int], completion: Completion) -> Iterator[TrainSequence]:
    """Yield the sequences of a completion."""
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
    """Return the branches of a conversation, in which every token that was sampled is once."""
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


def _check_length(what: str, setting: str, most: int, row: int, count: int) -> None:
    if not 0 < count <= most:
        raise DataError(
            f"{what} must have 1 to {setting}={most} tokens, got {count} in row {row}; raise the setting, or drop the "
            "row"
        )


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
