"""Records what agents asked and what they said their episodes were worth, so that a step is repeated without them.

    record = EpisodeRecord(run_dir / "episodes", host=0)
    record.write(key, replies)          # when an episode is over
    record.replies(key)                 # in a continued run: what was written for the same episode, or None

An agent that reads a clock or the network may act differently when it plays again. So a run that continues from a
checkpoint takes the episodes of later steps from this record. Each reply has a digest of the tokens before it; the
record is refused where they differ, because the tokens then come from other weights.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.environments.actions import Answered, Ended, Reply
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import SampleKey
from tpu_grpo.workers.messages import decode, encode

Replies = list[tuple[str, Reply]]
"""An episode's replies in order, each after a digest of the tokens before it."""


class EpisodeRecord:
    """The record of a run: a file per step and host, with a line per episode."""

    def __init__(self, directory: Path, host: int):
        self._directory, self._host = directory, host
        self._step, self._before = 0, dict[tuple[int, int, int], list[list[str]]]()

    def write(self, key: SampleKey, replies: Sequence[tuple[str, Reply]]) -> None:
        """Add an episode that is over."""
        found = [[digest, encode(0, reply).decode()] for digest, reply in replies]
        line = json.dumps({"key": [key.seed, key.step, key.prompt, key.sample], "replies": found})
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._path(key.step).open("a") as file:
            file.write(f"{line}\n")

    def replies(self, key: SampleKey) -> Replies | None:
        """Return the replies of an episode that was recorded before this process began its step; None if none was."""
        if key.step != self._step:
            self._step, self._before = key.step, self._read(key.step)
        if (line := self._before.get((key.seed, key.prompt, key.sample))) is None:
            return None
        return [(digest, decode(text.encode(), (Answered, Ended, Failure))[1]) for digest, text in line]

    def _read(self, step: int) -> dict[tuple[int, int, int], list[list[str]]]:
        """Read what all hosts have written of a step; a last line that a kill has torn is removed."""
        found: dict[tuple[int, int, int], list[list[str]]] = {}
        for path in sorted(self._directory.glob(f"{step}.host_*.jsonl")):
            *lines, torn = path.read_text().split("\n")
            if torn and path == self._path(step):
                path.write_text("".join(f"{line}\n" for line in lines))
            for text in lines:
                try:
                    line = json.loads(text)
                    seed, _, prompt, sample = line["key"]
                    found[seed, prompt, sample] = line["replies"]
                except (ValueError, TypeError, KeyError) as error:
                    raise EpisodeError(
                        f"{path} must hold an episode in each line, got {text[:100]!r}; move the file away, and agents "
                        "play its episodes again"
                    ) from error
        return found

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.host_{self._host}.jsonl"

    def refuse(self, key: SampleKey) -> EpisodeError:
        """Return the error for an episode whose tokens differ from the record."""
        return EpisodeError(
            f"the recorded episodes of step {key.step} must fit the tokens of the policy, got others for prompt "
            f"{key.prompt}; the weights are not those of the run that wrote {self._directory}. Move that directory "
            "away, and agents play again"
        )


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest of tokens."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
