"""Records the requests and rewards of agents, so that a repeated step can replay episodes without running the agents.

    record = EpisodeRecord(run_dir / "episodes", host=0)
    record.write(key, task, replies)    # when an episode is over
    record.replies(key, task)           # in a continued run: the replies of the same episode, or None
    record.forget(step)                 # once no continued run can begin before this step

An agent that reads a clock or the network may act differently when it plays again. So a run that continues from a
checkpoint takes the episodes of later steps from this record. Each reply has a digest of the tokens before it. If a
digest differs, the record is refused, because the tokens then come from other weights.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.environments.actions import Answered, Ended, LoadedEnvironment, Reply
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import SampleKey
from tpu_grpo.workers.channel import decode, encode

Replies = list[tuple[str, Reply]]
"""An episode's replies in order, as pairs (digest of the tokens before the reply, reply)."""


class EpisodeRecord:
    """The record of a run: a file per step and host, with a line per episode."""

    def __init__(self, directory: Path, host: int):
        self._directory, self._host = directory, host
        self._step, self._before = 0, dict[tuple[int, int, int], tuple[str, list[list[str]]]]()

    def write(self, key: SampleKey, task: str, replies: Sequence[tuple[str, Reply]]) -> None:
        """Add an episode that is over; ``task`` is what `task_of` returns."""
        found = [[digest, encode(0, reply).decode()] for digest, reply in replies]
        line = json.dumps({"key": [key.seed, key.step, key.prompt, key.sample], "task": task, "replies": found})
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._path(key.step).open("a") as file:
            file.write(f"{line}\n")

    def replies(self, key: SampleKey, task: str) -> Replies | None:
        """Return the replies of an episode that was recorded before this process began the episode's step; None if
        the episode was not recorded, or had another task."""
        if key.step != self._step:
            self._step, self._before = key.step, self._read(key.step)
        written_for, line = self._before.get((key.seed, key.prompt, key.sample), ("", []))
        if written_for != task:
            return None
        return [(digest, decode(text.encode(), (Answered, Ended, Failure))[1]) for digest, text in line]

    def forget(self, step: int) -> None:
        """Delete this host's records of ``step`` and of earlier steps."""
        for path in self._directory.glob(f"*.host_{self._host}.jsonl"):
            if int(path.name.partition(".")[0]) <= step:
                path.unlink()

    def _read(self, step: int) -> dict[tuple[int, int, int], tuple[str, list[list[str]]]]:
        """Read all hosts' records of a step. A last line that a kill left incomplete is ignored, and removed from this
        host's file."""
        found: dict[tuple[int, int, int], tuple[str, list[list[str]]]] = {}
        for path in sorted(self._directory.glob(f"{step}.host_*.jsonl")):
            *lines, torn = path.read_text().split("\n")
            if torn and path == self._path(step):
                path.write_text("".join(f"{line}\n" for line in lines))
            for text in lines:
                try:
                    line = json.loads(text)
                    seed, _, prompt, sample = line["key"]
                    found[seed, prompt, sample] = line["task"], line["replies"]
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
            f"{key.prompt}; the weights are not those of the run that wrote {self._directory}, or other devices round "
            "their sums. Move that directory away, and agents play again"
        )


def task_of(environment: LoadedEnvironment, columns: Mapping[str, Any]) -> str:
    """Return a digest of everything that an agent is given: its class and options, the files that its command names,
    and the columns of its row."""
    command = environment.options.get("command", ())
    words = shlex.split(command) if isinstance(command, str) else map(str, command)
    found = hashlib.sha256()
    for each in (environment.source, dict(environment.options), dict(columns)):
        found.update(json.dumps(each, sort_keys=True, default=str).encode())
    for path in map(Path, words):
        if path.suffix and path.is_file():  # a script, and not the program that runs it
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
