"""Several updates on a rollout: which prompts each learns from, and that each is an update like any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.toy import (
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    model_logps,
    signal_of,
    with_completion,
    with_noise,
)
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.teachers import TeacherReadings
from tpu_grpo.learner.update import update_metrics
from tpu_grpo.records.errors import DataError

SEED = 7
MINI: dict[str, Any] = {"mini_batch_prompts": 2, "iterations": 2}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.slow), "dapo"])
def test_updates_are_those_of_the_mini_batches_one_after_the_other(tmp_path: Path, name: str) -> None:
    """GRPO's advantages are of a group, so that two prompts alone are a step of their own, with its denominators."""
    run, algorithm = {"seed": SEED}, {"name": name, "clip_high": 0.01, "clip_low": 0.01}
    config = make_config(tmp_path / "mini", {"run": run, "algorithm": {**algorithm, **MINI}})
    scored = with_noise(make_scored(make_model(make_mesh()), config, step=3), 0.1)
    learner = make_learner(config)
    metrics = dict(learner.update(scored).metrics)

    alone = make_learner(make_config(tmp_path / "one", {"data": {"prompts_per_step": 2}, "algorithm": algorithm}))
    signal = signal_of(learner, scored)
    rows = [rows for iteration in (1, 2) for _, rows in signal.mini_batches(2, SEED, iteration)]
    assert rows[:2] != rows[2:]
    parts = [scored.select([row // 2 for row in part[::2]]) for part in rows]
    single = [alone.update(part).metrics for part in parts]

    assert learner.params_digest() == alone.params_digest()
    assert int(learner._updater.state.count) == 4
    tokens = np.array([part.rollout.total_tokens for part in parts])
    for one in ("update/entropy", "update/clip_fraction", "update/ratio_mean"):  # means over tokens
        assert metrics[one] == pytest.approx(np.average([found[one] for found in single], weights=tokens), rel=1e-6)
    for one in ("update/loss", "update/grad_norm"):  # means over updates
        assert metrics[one] == pytest.approx(np.mean([found[one] for found in single]), rel=1e-6, abs=1e-9)
    assert metrics["update/clip_fraction"] > 0.0
    for one in single[0]:
        if one.startswith("agreement/"):  # of the tokens that the first update saw
            assert metrics[one] == single[0][one]


def completions_of(batches: list[TrainBatch], name: str) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The sampled tokens of every sequence, with a field's values there."""
    for batch in batches:
        ids, segments, mask = (np.asarray(getattr(batch.rows, part)) for part in ("token_ids", "segments", "mask"))
        values = np.asarray(getattr(batch, name))
        for row, segment in {(row, int(segments[row, at])) for row, at in np.argwhere(mask)}:
            chosen = mask[row] & (segments[row] == segment)
            yield tuple(ids[row][chosen].tolist()), values[row][chosen]


@pytest.mark.full
def test_all_updates_compare_with_the_policy_before_the_first(tmp_path: Path) -> None:
    """The old policy and the reference stay what they were; advantages, the KL in them too, are of the whole step."""
    compared = {"old_policy": "trainer", "beta": 0.1, "kl_in": "reward", "advantage": "scale_rl"}
    config = make_config(tmp_path, {"run": {"seed": SEED}, "algorithm": {**MINI, **compared}})
    mesh = make_mesh()
    initial, reference = make_model(mesh), make_model(mesh, 100)
    scored = with_noise(make_scored(initial, config), 0.3)
    learner = make_learner(config, mesh, reference=reference)
    prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
    completions = [completion.token_ids.tolist() for completion in scored.rollout.completions]
    rows = {tuple(ids): row for row, ids in enumerate(completions)}
    assert len(rows) == 8
    for row in range(8):  # of any mini-batch: the policy must still be the initial one afterwards
        with pytest.raises(DataError, match=f"row {row} has"):
            learner.update(with_completion(scored, row, logprobs=None))
    centred = scored.scores.total.reshape(4, 2) - scored.scores.total.reshape(4, 2).mean(1, keepdims=True)
    wanted = {
        "old_logps": model_logps(initial, prompts, completions),
        "reference_logps": model_logps(reference, prompts, completions),
        "rollout_logps": [completion.logprobs for completion in scored.rollout.completions],
    }
    gaps = [old - reference for old, reference in zip(wanted["old_logps"], wanted["reference_logps"], strict=True)]
    mean = np.concatenate(gaps).mean()
    advantages = (centred / centred.std(ddof=1)).ravel()
    wanted["advantages"] = [advantage + 0.1 * (mean - gap) for advantage, gap in zip(advantages, gaps, strict=True)]
    seen = []
    for batches in learner._updates(signal_of(learner, scored), TeacherReadings()):
        for name, expected in wanted.items():
            for ids, values in completions_of(batches, name):
                np.testing.assert_allclose(values, expected[rows[ids]], atol=2e-5, err_msg=name)
        seen.append([rows[ids] for ids, _ in completions_of(batches, "advantages")])
        mine = [rows[ids] for ids, _ in completions_of(batches, "advantages")]
        now = model_logps(learner._updater.model, prompts, completions)  # pyrefly: ignore[bad-argument-type]
        ratios = np.exp(np.concatenate([now[row] - wanted["old_logps"][row] for row in mine]))
        measured = learner._update(batches)  # the policy moves on
        assert update_metrics([measured])["update/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
        assert (abs(ratios.mean() - 1) > 1e-4) == (len(seen) > 1)
    assert [len(part) for part in seen] == [4, 4, 4, 4]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(8))
