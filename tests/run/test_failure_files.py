"""What is kept of conversations whose update, or whose rollout, was not finite."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.learner.test_loss import batch_of
from tests.learner.toy import make_config, make_mesh
from tests.run.test_meshes import devices
from tests.talks import talk
from tpu_grpo.engine.sampler import BrokenRollout
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.batches import pass_arrays, placed_pass
from tpu_grpo.learner.learner import FailedUpdate
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.planning.slice_plan import PUBLISHED
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Prompt, PromptBatch, Rollout, ScoredRollout, Scores
from tpu_grpo.run import non_finite
from tpu_grpo.run.non_finite import FailureFiles, KeptUpdate, read_update

TALK = talk(
    [1, 2],
    ([11, 12], [21]),
    ([13], []),
    prompts={1: [1, 12, 21]},
    turns={0: {"calls": ("add",), "answer": "5"}},
    prompt="first",
    environment="calculator",
)


def files(directory: Path) -> FailureFiles:
    return FailureFiles(make_config(directory), Hosts(), lambda *_: None)


def test_an_update_on_conversations_is_kept_with_their_turns_and_masks(tmp_path: Path) -> None:
    rows, _ = train_rows([[9], [9]], [TALK, TALK], np.array([np.inf, 0.5]), RowShape(3, 4, 7, 2))
    scores = Scores(np.zeros(2), {}, 0.0)
    rollout = Rollout(PromptBatch(7, (Prompt("asked", (9,)),)), 2, (TALK, TALK), ("", ""), 0.0)
    batch = batch_of(rows)
    failed = FailedUpdate(7, 1, 1, np.nan, np.nan, (batch,), ScoredRollout(rollout, scores), np.array([np.inf, 0.5]))
    kept = read_update(files(tmp_path)(failed))
    assert kept.passes[0]["rows.mask"].sum() == 6  # two conversations of two branches, which sampled 2 and 1 tokens
    again = placed_pass(kept.passes[0], make_mesh(1))
    for name, value in pass_arrays(batch).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(pass_arrays(again)[name]), err_msg=name)
    assert jax.tree.structure(again) == jax.tree.structure(batch)
    first, _ = [json.loads(line) for line in (tmp_path / "non_finite" / "7.jsonl").read_text().splitlines()]
    assert (first["prompt"], first["environment"], first["mask"]) == ("first", "calculator", [[2, 1], [1, 0]])
    assert [(turn["calls"], turn["answer"]) for turn in first["turns"]] == [(["add"], "5"), ([], "")]


def test_an_update_with_experts_is_not_repeated_on_too_many_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run is not started there: libtpu refuses the update's program in words that name no remedy."""
    trainer = np.array(devices(8, 4, device_kind="TPU v5 lite"))
    meshes = SimpleNamespace(trainer=SimpleNamespace(devices=trainer))
    experts: Any = abstract_checkpoint(PUBLISHED / "Qwen3-30B-A3B")
    monkeypatch.setattr(non_finite, "open_model", lambda *_: (experts, None))
    monkeypatch.setattr(non_finite, "build_meshes", lambda *_: meshes)
    kept = KeptUpdate(tmp_path / "7.npz", 7, 1, 1, np.nan, np.nan, {}, ())
    with pytest.raises(ConfigError, match="at most 16 chips, .* got qwen3_moe on 32; use a slice of v5p or v6e"):
        next(non_finite.replay(kept, make_config(tmp_path), Hosts()))


def test_a_rollout_of_conversations_is_kept_with_the_prompts_of_its_branches(tmp_path: Path) -> None:
    broken = BrokenRollout(3, (Prompt("asked", (9,)),), (TALK,), ("text",))
    [row] = [json.loads(line) for line in files(tmp_path).of_rollout(broken).read_text().splitlines()]
    assert row["prompt"] == "first"
    assert row["prompt_token_ids"] == [1, 2]
    assert row["token_ids"] == [11, 12, 21, 13]
    assert row["mask"] == [[2, 1], [1, 0]]
    assert row["branches"] == [
        {"prompt_token_ids": [1, 2], "start": 0, "end": 3},
        {"prompt_token_ids": [1, 12, 21], "start": 3, "end": 4},
    ]
    assert len(row["turns"]) == 2
