"""The files of numbers that are not finite, written by the run. An update whose loss or gradient is not finite leaves

    <run.dir>/non_finite/7.npz            the passes of the update, as arrays, with the config and what it came to
    <run.dir>/non_finite/7.jsonl          the samples of step 7, as samples.jsonl has them
    <run.dir>/non_finite/checkpoints/7/   policy and optimizer as they were before the update

and is read from them to be done again. A rollout in which a log-probability of the engine is not finite leaves

    <run.dir>/non_finite/7.jsonl          what was sampled for step 7, with its tokens and log-probabilities
    <run.dir>/non_finite/checkpoints/7/   policy and optimizer as they were in the rollout

One of them is there at a time, the newest: a checkpoint is large.
"""

import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.sampler import BrokenRollout
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.failed import FailedUpdate, PassArrays
from tpu_grpo.observe.json_lines import encode_line, replace_bytes
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, NON_FINITE_DIR
from tpu_grpo.observe.sample_rows import conversation_fields, sample_fields, sample_rows
from tpu_grpo.observe.summary import versions
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Completion

FORMAT = 1
_ABOUT = "about"


@dataclass(frozen=True)
class FailureFiles:
    """Writes the files; every host calls it, and host 0 writes all but the checkpoint."""

    config: RunConfig
    hosts: Hosts
    save: Callable[[Path, int], None]
    """Saves policy and optimizer in a directory as a step."""

    def __call__(self, failed: FailedUpdate) -> Path:
        """Keep an update in place of the one before, and return its file once it is complete on every host."""
        directory = self._with_checkpoint(failed.step)
        path, passes = directory / f"{failed.step}.npz", failed.arrays()
        if self.hosts.is_first:
            rows = sample_rows(failed.scored, failed.advantages)
            lines = [encode_line({"step": failed.step, **sample_fields(row)}) for row in rows]
            replace_bytes(path.with_suffix(".jsonl"), lines)
            replace_bytes(path, [_packed(_about(failed, self.config), passes)])
        self.hosts.barrier("the files of an update that is not finite")
        return path

    def of_rollout(self, broken: BrokenRollout) -> Path:
        """Keep what was sampled, and return its file once it is complete on every host."""
        path = self._with_checkpoint(broken.step) / f"{broken.step or 'evaluation'}.jsonl"
        if self.hosts.is_first:
            replace_bytes(path, (encode_line(record) for record in _rows(broken)))
        self.hosts.barrier("the file of a rollout that is not finite")
        return path

    def _with_checkpoint(self, step: int) -> Path:
        """Empty the directory, and save policy and optimizer there."""
        directory = self.config.run_dir / NON_FINITE_DIR
        if self.hosts.is_first:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self.hosts.barrier("the directory of what is not finite")
        self.save(directory / CHECKPOINTS_DIR, step)
        return directory


@dataclass(frozen=True)
class KeptUpdate:
    """What the file of an update holds."""

    path: Path
    step: int
    update: int
    updates: int
    loss: float
    grad_norm: float
    settings: dict[str, Any]
    """The resolved config of the run, as nested sections."""
    versions: Mapping[str, str]
    passes: tuple[PassArrays, ...]

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoint of its parameters lies."""
        return self.path.parent / CHECKPOINTS_DIR


def read_update(path: Path) -> KeptUpdate:
    """Read the file of an update.

    Raises:
        DataError: for one that is not there, or is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file[_ABOUT]))
            if about["format"] != FORMAT:
                raise DataError(
                    f"{path} must have format {FORMAT}, got {about['format']}; use the version that wrote it"
                )
            passes: list[PassArrays] = [{} for _ in range(about["passes"])]
            for name in file.files:
                number, _, array = name.partition("/")
                if array:
                    passes[int(number)][array] = file[name]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"--replay needs a file that a run has written, <run.dir>/{NON_FINITE_DIR}/<step>.npz, got {path} "
            f"({type(error).__name__}: {error}); correct the path"
        ) from error
    numbers = {name: float(about[name]) for name in ("loss", "grad_norm")}
    place = (about["step"], about["update"], about["updates"])
    return KeptUpdate(
        path, *place, **numbers, settings=about["config"], versions=about["versions"], passes=tuple(passes)
    )


def _rows(broken: BrokenRollout) -> Iterator[dict[str, Any]]:
    """Yield the rows as people read them, with null for a log-probability that is not finite."""
    for prompt, completion, text in zip(broken.prompts, broken.completions, broken.texts, strict=True):
        yield {
            "step": broken.step,
            "prompt": prompt.text,
            "completion": text,
            "finish_reason": completion.finish_reason,
            "prompt_token_ids": list(prompt.token_ids),
            "token_ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            **_conversation(completion),
        }


def _conversation(completion: Completion) -> dict[str, Any]:
    """Return what a row of a conversation has beside, or in place of others: its first prompt is that of a branch."""
    if (episode := completion.episode) is None:
        return {}
    branches = [
        {"prompt_token_ids": list(branch.prompt), "start": branch.start, "end": branch.end}
        for branch in episode.branches
    ]
    first = branches[0]["prompt_token_ids"] if branches else []
    return {
        "prompt": episode.prompt,
        "prompt_token_ids": first,
        **conversation_fields(completion),
        "branches": branches,
    }


def _about(failed: FailedUpdate, config: RunConfig) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": failed.step,
        "update": failed.update,
        "updates": failed.updates,
        "passes": len(failed.passes),
        **{name: _text(getattr(failed, name)) for name in ("loss", "grad_norm")},
        "config": config.model_dump(mode="json"),
        "versions": versions(),
    }


def _text(value: float) -> float | str:
    """Return a number as JSON has it, which has no infinities."""
    return value if math.isfinite(value) else str(value)


def _packed(about: Mapping[str, Any], passes: Sequence[PassArrays]) -> bytes:
    arrays: dict[str, Any] = {f"{n}/{name}": array for n, each in enumerate(passes) for name, array in each.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **{_ABOUT: np.array(json.dumps(about)), **arrays})
    return file.getvalue()
