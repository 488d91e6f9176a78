"""Tests make rollouts from texts, and reward files of their own, with these."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, Scores
from tpu_grpo.rewards import open_rewards
from tpu_grpo.rewards.reward_call import Answer, Caller
from tpu_grpo.rewards.reward_functions import target_of
from tpu_grpo.rewards.reward_table import build_table

MakeFile = Callable[..., str]
"""(source, name="my_rewards.py") -> path."""


def make_rollout(
    prompts: Sequence[str], texts: Sequence[str], columns: Sequence[Mapping[str, Any]] | None = None, step: int = 0
) -> Rollout:
    """P prompts with their columns and P*G completion texts; only the texts matter to rewards."""
    records = columns if columns is not None else [{}] * len(prompts)
    batch = PromptBatch(
        step=step,
        prompts=tuple(Prompt(text=t, token_ids=(1,), columns=c) for t, c in zip(prompts, records, strict=True)),
    )
    one = Completion(np.array([1], np.int32), np.array([0.0], np.float32), finish_reason="stop", cached_tokens=0)
    return Rollout(batch, len(texts) // len(prompts), (one,) * len(texts), tuple(texts), seconds=0.0)


def scored(rollout: Rollout, *specs: RewardSpec, max_steps: int = 0) -> Scores:
    """Open rewards for the columns of a rollout, and score it."""
    with open_rewards(specs, list(rollout.batch.prompts[0].columns), max_steps) as rewards:
        return rewards.score(rollout)


def answered(rollout: Rollout, spec: RewardSpec) -> Answer:
    """Call one reward for a rollout as its worker would, but in this process."""
    with open_rewards([spec], list(rollout.batch.prompts[0].columns)) as rewards:
        call, table = rewards.rewards[0].call, build_table(rollout, rewards.calls)
    return Caller(call, target_of(spec)).answer(table.batch(call, range(table.size)), 3600.0)


@pytest.fixture
def reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFile:
    """Write a reward file into the working directory, which is the test's own; returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "my_rewards.py") -> str:
        (tmp_path / name).write_text(source)
        return name

    return write
