"""The learner as the pipeline uses it, on a tiny model over two virtual devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from tests.learner.toy import (
    counted_compilations,
    flat_params,
    interpreted_flash,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    micro_batches,
    model_logps,
    signal_of,
    with_completion,
    with_noise,
)
from tpu_grpo.config import RunConfig
from tpu_grpo.learner import Learner
from tpu_grpo.learner.loss import agreement_metrics
from tpu_grpo.observe.step_metrics import update_metrics
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RewardError
from tpu_grpo.records.stages import ScoredRollout

MICRO = {"micro_batch_prompts": 2}
PENALTY = {"beta": 0.1, "iterations": 2, "micro_batch_prompts": 2}
MINI = {"old_policy": "trainer", "iterations": 2, "mini_batch_prompts": 2, "micro_batch_prompts": 1}


def scored_steps(config: RunConfig, count: int) -> list[ScoredRollout]:
    model = make_model(make_mesh())
    return [make_scored(model, config, step) for step in range(1, count + 1)]


def policy(learner: Learner) -> Qwen3:
    return learner._updater.model  # type: ignore[return-value]


def old_logps(learner: Learner, scored: ScoredRollout) -> np.ndarray:
    completions = [c.token_ids.tolist() for c in scored.rollout.completions]
    return np.concatenate(model_logps(policy(learner), [p.token_ids for p in scored.rollout.row_prompts], completions))


def test_one_update(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    learner = make_learner(config)
    (scored,) = scored_steps(config, 1)
    before, digest = old_logps(learner, scored), learner.params_digest()
    result = learner.update(scored)
    after = old_logps(learner, scored)

    lengths = [len(c.token_ids) for c in scored.rollout.completions]
    groups = scored.scores.total.reshape(4, 2)
    by_hand = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(result.advantages, by_hand.ravel(), atol=1e-12)
    weights = np.repeat(result.advantages / lengths, lengths)
    assert (weights * (after - before)).sum() > 0.1  # what was better than its group became likelier
    assert learner.params_digest() != digest

    metrics = result.metrics
    # At ratio 1 the loss of a row is minus its advantage, and advantages of a group cancel.
    assert metrics["update/loss"] == pytest.approx(-by_hand.mean(), abs=1e-6)
    assert metrics["update/kl"] == metrics["update/clip_fraction"] == 0.0
    assert metrics["update/learning_rate"] == pytest.approx(1e-3)
    assert 0 < metrics["update/entropy"] < np.log(64)
    assert metrics["agreement/logprob_abs_diff_max"] < 1e-5
    assert metrics["agreement/effective_sample_size"] == pytest.approx(1.0)
    assert update_metrics(result)["update/seconds"] == result.seconds > 0
    learner.close()


@pytest.mark.slow  # test_agreement.py, and the trainer as old policy below
def test_agreement_is_measured_against_the_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": MICRO})
    mesh = make_mesh()
    model = make_model(mesh, scale=0.1)  # two programs round its small logits alike to less than 1e-6
    honest = make_scored(model, config)
    learner = make_learner(config, mesh, model=model)
    logprobs = honest.rollout.completions[3].logprobs.copy()
    logprobs[0] += 0.1
    metrics = learner.update(with_completion(honest, 3, logprobs=logprobs)).metrics
    n, weight = honest.rollout.total_tokens, np.exp(-0.1)
    assert metrics["agreement/logprob_abs_diff_max"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["agreement/logprob_abs_diff_mean"] == pytest.approx(0.1 / n, abs=1e-6)
    assert metrics["agreement/ratio_mean"] == pytest.approx((n - 1 + weight) / n, abs=1e-6)
    assert metrics["agreement/kl"] == pytest.approx((weight - 1 + 0.1) / n, abs=1e-7)
    ess = (n - 1 + weight) ** 2 / (n * (n - 1 + weight**2))
    assert metrics["agreement/effective_sample_size"] == pytest.approx(ess, abs=1e-6)
    learner.close()


GENTLE = {"learning_rate": 1e-4}
SMALLEST_MOMENT = 1e-7
"""Adam's first step is the sign of a gradient, also of one that is nothing but rounding. Such a gradient is smaller."""


def first_moments(learner: Learner) -> dict[str, np.ndarray]:
    """(1 - b1) times the clipped gradient of the first update, by the parameter's name."""
    (adam,) = (part for part in learner._updater.state.optimizer if isinstance(part, optax.ScaleByAdamState))
    moments: Any = adam.mu
    return {name: np.asarray(leaf) for name, leaf in moments.items()}


def assert_same_step(left: Learner, right: Learner) -> None:
    moments, params, others = first_moments(left), flat_params(left), flat_params(right)
    assert moments.keys() == params.keys()
    for name, moment in first_moments(right).items():
        np.testing.assert_allclose(moment, moments[name], atol=1e-6, err_msg=name)
        certain = np.abs(moments[name]) > SMALLEST_MOMENT
        assert certain.mean() > 0.95, name
        np.testing.assert_allclose(others[name][certain], params[name][certain], atol=1e-6, err_msg=name)


def test_micro_batches_take_the_same_step_as_one_batch(tmp_path: Path) -> None:
    whole = make_learner(make_config(tmp_path / "whole", {"optimizer": GENTLE}))
    micro = make_learner(make_config(tmp_path / "micro", {"optimizer": GENTLE, "algorithm": MICRO}))
    (scored,) = scored_steps(make_config(tmp_path), 1)
    noisy = with_noise(scored, 0.3)
    expected, found = whole.update(noisy).metrics, micro.update(noisy).metrics
    assert_same_step(whole, micro)
    for name in set(expected) - {"update/seconds"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    whole.close()
    micro.close()


def test_mesh_does_not_change_the_step(tmp_path: Path) -> None:
    one = make_learner(make_config(tmp_path / "2x1", {"optimizer": GENTLE}), make_mesh(2, 1))
    other = make_learner(make_config(tmp_path / "2x2", {"optimizer": GENTLE}), make_mesh(2, 2))
    (scored,) = scored_steps(make_config(tmp_path), 1)
    assert one.update(scored).metrics["update/grad_norm"] == pytest.approx(
        other.update(scored).metrics["update/grad_norm"], rel=1e-5
    )
    assert_same_step(one, other)
    one.close()
    other.close()


@pytest.mark.slow  # families/test_flash_attention.py compares the attention itself
def test_flash_attention_takes_the_same_step(tmp_path: Path) -> None:
    """Rows of 11 tokens, padded to a block of 128, on a mesh that splits rows and heads."""
    (scored,) = scored_steps(make_config(tmp_path), 1)
    noisy, mesh = with_noise(scored, 0.3), make_mesh(2, 2)
    dot, flash = (
        make_learner(
            make_config(tmp_path / name, {"optimizer": GENTLE}), mesh, model=make_model(mesh, flash_block=block)
        )
        for name, block in (("dot", None), ("flash", 128))
    )
    expected = dot.update(noisy).metrics
    with interpreted_flash():
        found = flash.update(noisy).metrics
        assert micro_batches(flash, scored)[0].rows.token_ids.shape == (2, 128)
        logprobs = flash.logprobs(
            [prompt.token_ids for prompt in scored.rollout.row_prompts], scored.rollout.completions
        )
    assert_same_step(dot, flash)
    for name in set(expected) - {"update/seconds"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    taken = [row[: len(c.token_ids)] for row, c in zip(logprobs, scored.rollout.completions, strict=True)]
    np.testing.assert_allclose(np.concatenate(taken), old_logps(dot, scored), atol=1e-4)
    dot.close()
    flash.close()


def test_the_second_iteration_still_compares_with_the_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"iterations": 2, "clip_low": 0.01, "clip_high": 0.01}})
    learner = make_learner(config)
    (scored,) = scored_steps(config, 1)
    engine = np.concatenate([c.logprobs for c in scored.rollout.completions])
    lengths = [len(c.token_ids) for c in scored.rollout.completions]
    examples = micro_batches(learner, scored)
    advantages = np.repeat(signal_of(learner, scored).advantages_B, lengths)
    for _ in range(2):
        ratio = np.exp(old_logps(learner, scored) - engine)  # of the weights this pass starts from
        (micro,) = learner._update(examples).sums
        clipped = (advantages > 0) & (ratio > 1.01) | (advantages < 0) & (ratio < 0.99)
        assert float(micro.clipped) == clipped.sum()
        measured = agreement_metrics([micro.agreement])["agreement/ratio_mean"]
        assert measured == pytest.approx(ratio.mean(), rel=1e-5)
    assert clipped.any()
    assert int(learner._updater.state.count) == 2

    again = make_learner(make_config(tmp_path / "again", {"algorithm": {"iterations": 2}}))
    metrics = again.update(scored).metrics
    assert metrics["agreement/logprob_abs_diff_max"] < 1e-5  # of the first pass only
    learner.close()
    again.close()


@pytest.mark.slow  # test_mini_batches.py checks the same weights by hand
def test_trainer_as_old_policy_is_corrected_towards_the_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"old_policy": "trainer", "importance_cap": 1.2}})
    learner = make_learner(config)
    (honest,) = scored_steps(config, 1)
    noisy = with_noise(honest, 0.5)
    trainer = old_logps(learner, noisy)
    engine = np.concatenate([c.logprobs for c in noisy.rollout.completions])
    weights = np.minimum(np.exp(trainer - engine), 1.2)
    assert 0.1 < (weights == 1.2).mean() < 0.9
    lengths = [len(c.token_ids) for c in noisy.rollout.completions]
    (example,) = micro_batches(learner, noisy)
    mask = np.asarray(example.rows.mask)  # packed, so that the order is another
    np.testing.assert_allclose(np.sort(np.asarray(example.importance)[mask]), np.sort(weights), rtol=1e-5)
    np.testing.assert_allclose(np.sort(np.asarray(example.old_logps)[mask]), np.sort(trainer), atol=1e-5)

    result = learner.update(noisy)
    rows = np.split(weights, np.cumsum(lengths)[:-1])  # the ratio to the trainer itself is 1
    by_hand = -np.mean([advantage * row.mean() for advantage, row in zip(result.advantages, rows, strict=True)])
    assert result.metrics["update/loss"] == pytest.approx(by_hand, abs=1e-5)
    assert result.metrics["agreement/logprob_abs_diff_mean"] == pytest.approx(np.abs(trainer - engine).mean(), abs=1e-5)
    learner.close()


def test_penalty_is_taken_against_the_initial_policy(tmp_path: Path) -> None:
    """The reference may be the model itself: it stays what it was when the model moves on."""
    config = make_config(tmp_path, {"algorithm": PENALTY})
    mesh = make_mesh()
    model = make_model(mesh)
    learner = make_learner(config, mesh, model=model, reference=nnx.merge(*nnx.split(model)))  # an alias
    scored = scored_steps(config, 2)
    initial = old_logps(learner, scored[1])
    learner.update(scored[0])
    after_one = old_logps(learner, scored[1])
    sums = learner._update(micro_batches(learner, scored[1])).sums
    gap = initial - after_one
    found = float(sum(micro.kl for micro in sums)) / scored[1].rollout.total_tokens
    assert found == pytest.approx(np.mean(np.exp(gap) - gap - 1), rel=1e-4)
    assert found > 1e-4
    learner.close()


@pytest.mark.parametrize(
    "algorithm",
    [MINI, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, MICRO, PENALTY, {"old_policy": "trainer"}))],
    ids=str,
)
def test_nothing_is_compiled_after_the_first_update(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    config = make_config(tmp_path, {"algorithm": algorithm})
    steps = scored_steps(config, 4)
    for start in (0, 2):  # fresh, then restored
        learner = make_learner(config)
        assert learner.restored_step == start
        learner.update(steps[start])
        with counted_compilations() as compiled:
            learner.params_digest()
            learner.update(steps[start + 1])
            learner.save(start + 2)
            learner.update(steps[start + 1])
        assert compiled == []
        learner.close()


@pytest.mark.parametrize(
    "algorithm", [*(pytest.param(other, marks=pytest.mark.slow) for other in (MICRO, PENALTY)), MINI], ids=str
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    schedule = {"schedule": "cosine", "warmup_steps": 2}
    configs = [make_config(tmp_path / name, {"algorithm": algorithm, "optimizer": schedule}) for name in ("one", "two")]
    steps = scored_steps(configs[0], 4)
    straight = make_learner(configs[0])
    for scored in steps:
        expected = straight.update(scored).metrics
    straight.close()

    first = make_learner(configs[1])
    for scored in steps[:2]:
        first.update(scored)
    first.save(2)
    saved = first.params_digest()
    first.update(steps[3])  # while the save runs: it must not see this
    first.close()

    second = make_learner(configs[1])  # what a process started after a kill does
    assert second.restored_step == 2
    assert second.params_digest() == saved
    for scored in steps[2:]:
        found = second.update(scored).metrics
    assert second.params_digest() == straight.params_digest()
    assert {**found, "update/seconds": 0} == {**expected, "update/seconds": 0}
    second.close()


def test_resume_settings_reach_the_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume=require needs a checkpoint in .*/checkpoints, found none"):
        make_learner(make_config(tmp_path, {"checkpoint": {"resume": "require"}}))


def test_a_bad_rollout_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    learner = make_learner(config)
    (good,) = scored_steps(config, 1)
    digest = learner.params_digest()
    nan = np.full(8, np.nan)
    bad: list[tuple[ScoredRollout, type[Exception], str]] = [
        (with_completion(good, 2, logprobs=None), DataError, "row 2 has"),
        (with_completion(good, 2, logprobs=np.zeros(9, np.float32)), DataError, "row 2 has"),
        (
            with_completion(good, 5, logprobs=good.rollout.completions[5].logprobs * np.float32(np.nan)),
            NonFiniteError,
            "token 0 in row 5",
        ),
        (
            replace(good, rollout=replace(good.rollout, completions=good.rollout.completions[:6])),
            DataError,
            "= 8 rows, got 6",
        ),
        (replace(good, scores=replace(good.scores, total=nan)), RewardError, "got nan in row 0"),
        (replace(good, scores=replace(good.scores, total=nan[:2])), RewardError, "got 2 for 8"),
    ]
    for scored, error, message in bad:
        with pytest.raises(error, match=message):
            learner.update(scored)
    assert learner.params_digest() == digest
    learner.close()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    learner = make_learner(config)
    (scored,) = scored_steps(config, 1)
    embedding = policy(learner).embedder.input_embedding
    embedding[...] = embedding[...] * jnp.nan
    with pytest.raises(NonFiniteError, match="the loss of step 1 must be finite, got nan; nothing of it reached the"):
        learner.update(scored)
    learner.close()


def test_a_penalty_needs_a_reference(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"beta": 0.5}})
    with pytest.raises(ConfigError, match=r"algorithm.beta=0.5 needs a reference model, got none"):
        make_learner(config, model=object(), reference=None)
