"""A conversation as people read it, in ``samples.jsonl`` and in the samples of evaluations.

sampled     [1 1 1 0 0 1 1]     as runs: [[3 2] [2 0]], so many tokens that the policy sampled, so many that it did not
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import numpy as np

from tpu_grpo.records.episode import Ending
from tpu_grpo.records.stages import Completion


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy, and what the environment answered."""

    text: str
    calls: tuple[str, ...]
    """The names of the tools that were called; "" for a call that could not be read."""
    answer: str
    reward: float | None
    """What the environment gave for the turn; None if it gives nothing for single turns."""
    tokens: int
    observed_tokens: int
    """The tokens of the answer, with what the chat template writes around it."""
    errors: int
    """How many of the calls could not be read, or raised."""

    @property
    def caller(self) -> str:
        """Say which tools were called; nothing if none was."""
        return ", ".join(name or "a call that cannot be read" for name in self.calls)


@dataclass(frozen=True)
class SampledConversation:
    """A row's conversation."""

    environment: str
    ending: Ending
    turns: tuple[SampledTurn, ...]
    mask: tuple[tuple[int, int], ...]
    """The tokens after the first prompt as runs: so many sampled, then so many observed, and so on."""
    failure: str | None = None
    """How the environment failed; None if it did not."""

    def fields(self) -> dict[str, object]:
        """Return it as a line of a file has it."""
        failed = {} if self.failure is None else {"failure": self.failure}
        named = {"environment": self.environment, "ending": self.ending, **failed}
        return {**named, "turns": [asdict(turn) for turn in self.turns], "mask": [list(run) for run in self.mask]}


def sampled_conversation(completion: Completion) -> SampledConversation | None:
    """Return the conversation that a completion is of; None if it is of none."""
    episode = completion.episode
    if episode is None:
        return None
    turns = [
        SampledTurn(
            text=turn.text,
            calls=turn.calls,
            answer=turn.answer,
            reward=turn.reward,
            tokens=turn.end - turn.start,
            observed_tokens=turn.observed,
            errors=turn.errors,
        )
        for turn in episode.turns
    ]
    failure = None if episode.failure is None else f"{episode.failure.kind}: {episode.failure.text}"
    return SampledConversation(episode.environment, episode.ending, tuple(turns), _runs(completion), failure)


def _runs(completion: Completion) -> tuple[tuple[int, int], ...]:
    """Return the mask as runs."""
    count = len(completion.token_ids)
    mask: Sequence[bool] = [True] * count if completion.sampled is None else np.asarray(completion.sampled).tolist()
    lengths = [(sampled, len(list(run))) for sampled, run in groupby(mask)]
    if lengths and not lengths[0][0]:
        lengths.insert(0, (True, 0))
    counts = [length for _, length in lengths]
    counts += [0] * (len(counts) % 2)
    return tuple(zip(counts[::2], counts[1::2], strict=True))
