"""The learner as the pipeline uses it, on a tiny model over two virtual devices."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.models.qwen3.model import Qwen3

from tests.learner.toy import (
    counted_compilations,
    flat_params,
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
from tpu_grpo.learner import Learner, batches
from tpu_grpo.learner.loss import agreement_metrics
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.teachers import TeacherReadings
from tpu_grpo.learner.update import update_metrics as update_metrics_of
from tpu_grpo.observe.step_metrics import update_metrics
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RewardError
from tpu_grpo.records.stages import ScoredRollout

MICRO = {"micro_batch_prompts": 2}
PENALTY = {"beta": 0.1, "iterations": 2, "micro_batch_prompts": 2}
MINI = {"old_policy": "trainer", "iterations": 2, "mini_batch_prompts": 2, "micro_batch_prompts": 1}
SCHEDULE = {"schedule": "cosine", "warmup_steps": 2}


def scored_steps(config: RunConfig, count: int) -> list[ScoredRollout]:
    model = make_model(make_mesh())
    return [make_scored(model, config, step) for step in range(1, count + 1)]


def policy(learner: Learner) -> Qwen3:
    return learner._updater.model  # pyrefly: ignore[bad-return]


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


@pytest.mark.full
def test_histograms_are_of_the_first_gradient_and_the_parameters_before_it(tmp_path: Path) -> None:
    logging = {"histograms_every": 2, "tensorboard": True}
    config = make_config(tmp_path, {"logging": logging, "algorithm": {"iterations": 2}})
    learner = make_learner(config)
    first, second = scored_steps(config, 2)
    assert learner.update(first).histograms == {}
    before = {name: np.array(value) for name, value in learner._updater.trained.items()}
    result = learner.update(second)
    kinds = {kind: {n: h for n, h in result.histograms.items() if n.startswith(kind)} for kind in ("g", "p")}
    assert kinds["p"].keys() == {f"parameters/{name}" for name in before}
    assert kinds["g"].keys() == {f"gradients/{name}" for name in before}
    for name, value in before.items():
        found = result.histograms[f"parameters/{name}"]
        np.testing.assert_array_equal(found.counts, np.histogram(value, found.edges)[0])
        np.testing.assert_allclose(found.total, value.sum(dtype=np.float64), atol=1e-4)
    assert all(h.counts.sum() == before[n.partition("/")[2]].size for n, h in kinds["g"].items())


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


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, ScoredRollout, Mapping[str, float]]:
    """A learner on 2 x 1 devices after an update in one batch, with the rollout and the metrics."""
    config = make_config(tmp_path_factory.mktemp("whole"), {"optimizer": GENTLE})
    learner, noisy = make_learner(config), with_noise(scored_steps(config, 1)[0], 0.3)
    return learner, noisy, learner.update(noisy).metrics


@pytest.mark.full
@pytest.mark.parametrize(("algorithm", "tp"), [(MICRO, 1), ({}, 2)], ids=["micro-batches", "mesh"])
def test_neither_micro_batches_nor_the_mesh_change_the_step(
    updated: Any, tmp_path: Path, algorithm: dict[str, Any], tp: int
) -> None:
    whole, noisy, expected = updated
    other = make_learner(make_config(tmp_path, {"optimizer": GENTLE, "algorithm": algorithm}), make_mesh(2, tp))
    found = other.update(noisy).metrics
    assert_same_step(whole, other)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"micro_batch_prompts": 1}, 0),
        ({"correction": "sequence", "importance_cap": 1.2, "veto_high": 1.9, "opsm": 0.05}, 0),
        pytest.param({"beta": 0.1, "kl_unbiased": True, "top_entropy_quantile": 0.5}, 1, marks=pytest.mark.slow),
    ],
    ids=["micro-batches", "correction", "penalty"],
)
def test_an_only_update_computes_the_old_policy_in_its_own_pass(
    tmp_path: Path, algorithm: dict[str, Any], passes: int
) -> None:
    """Step and metrics are those with a forward pass before the update, whose ratios are 1 but for rounding."""
    tree = {"algorithm": {"old_policy": "trainer", **algorithm}, "optimizer": GENTLE}
    config, mesh = make_config(tmp_path, tree), make_mesh()
    reference = make_model(mesh, 100) if config.algorithm.beta else None
    own, apart = (make_learner(config, mesh, reference=reference) for _ in range(2))
    apart._parts.batches.recomputes = True
    scored = with_noise(scored_steps(config, 1)[0], 0.3)
    found, expected, micro = [], [], len(micro_batches(own, scored))
    for learner, metrics in ((own, found), (apart, expected)):
        with mock.patch.object(batches, "logprobs", wraps=batches.logprobs) as computed:
            metrics.append(learner.update(scored).metrics)
        assert computed.call_count == micro * (passes + (learner is apart))
        assert learner._parts.forward_passes == passes + (learner is apart) + (reference is not None)
    assert_same_step(apart, own)
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found[0]["update/ratio_mean"] == 1.0
    assert found[0]["agreement/effective_sample_size"] < 0.99
    if "correction" in algorithm:
        shares = [found[0][f"correction/{name}_fraction"] for name in ("bounded", "vetoed", "opsm")]
        assert all(0.0 < share < 1.0 for share in shares)


@pytest.mark.full
def test_the_second_of_two_mini_batches_compares_with_the_policy_before_the_first(tmp_path: Path) -> None:
    section = {"old_policy": "trainer", "mini_batch_prompts": 2}
    config = make_config(tmp_path, {"algorithm": section})
    learner, scored = make_learner(config), with_noise(scored_steps(config, 1)[0], 0.3)
    initial, seen, ratios = old_logps(learner, scored), [], []
    with mock.patch.object(batches, "logprobs", wraps=batches.logprobs) as computed:
        for update in learner._updates(signal_of(learner, scored), TeacherReadings()):
            (batch,) = update
            seen += np.asarray(batch.old_logps)[np.asarray(batch.rows.mask)].tolist()
            ratios.append(update_metrics_of([learner._update(update)])["update/ratio_mean"])
    np.testing.assert_allclose(np.sort(seen), np.sort(initial), atol=2e-5)
    assert [abs(ratio - 1.0) > 1e-4 for ratio in ratios] == [False, True]
    assert computed.call_count == 2 * learner._parts.forward_passes == 2  # one pass over both micro-batches


@pytest.mark.full
def test_the_second_iteration_still_compares_with_the_engine(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"iterations": 2, "clip_low": 0.01, "clip_high": 0.01}})
    learner = make_learner(config)
    (scored,) = scored_steps(config, 1)
    engine = np.concatenate([c.logprobs for c in scored.rollout.completions])
    lengths = [len(c.token_ids) for c in scored.rollout.completions]
    examples = micro_batches(learner, scored)
    advantages = np.repeat(signal_of(learner, scored).advantages_B, lengths)
    updates, ratios = [], []
    for _ in range(2):
        ratio = np.exp(old_logps(learner, scored) - engine)  # of the weights this pass starts from
        updates.append(learner._update(examples))
        ratios.append(ratio)
        (micro,) = updates[-1].sums
        clipped = (advantages > 0) & (ratio > 1.01) | (advantages < 0) & (ratio < 0.99)
        assert float(micro.clipped) == clipped.sum()
        measured = agreement_metrics([micro.agreement])["agreement/ratio_mean"]
        assert measured == pytest.approx(ratio.mean(), rel=1e-5)
    assert clipped.any()
    assert update_metrics_of(updates)["update/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert int(learner._updater.state.count) == 2

    again = make_learner(make_config(tmp_path / "again", {"algorithm": {"iterations": 2}}))
    metrics = again.update(scored).metrics
    assert metrics["agreement/logprob_abs_diff_max"] < 1e-5  # of the first pass only


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize(
    "algorithm",
    [MINI, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, MICRO, PENALTY, {"old_policy": "trainer"}))],
    ids=str,
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit_and_compiles_nothing_after_an_update(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    configs = [make_config(tmp_path / name, {"algorithm": algorithm, "optimizer": SCHEDULE}) for name in ("one", "two")]
    steps = scored_steps(configs[0], 4)
    straight = make_learner(configs[0])
    expected = [straight.update(scored).metrics for scored in steps][-1]
    straight.close()

    first = make_learner(configs[1])
    first.update(steps[0])
    with counted_compilations() as compiled:
        first.params_digest()
        first.update(steps[1])
        first.save(2)
        saved = first.params_digest()
        first.update(steps[3])  # while the save runs: it must not see this
    assert compiled == []
    first.close()

    second = make_learner(configs[1])  # what a process started after a kill does
    assert second.restored_step == 2
    assert second.params_digest() == saved
    second.update(steps[2])
    with counted_compilations() as compiled:
        found = second.update(steps[3]).metrics
        assert second.params_digest() == straight.params_digest()
        second.save(4)
        second.update(steps[3])
    assert compiled == []
    assert found == expected
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
        (replace(good, scores=replace(good.scores, total=nan[:2])), RewardError, "got 2 for 8"),
    ]
    for scored, error, message in bad:
        with pytest.raises(error, match=message):
            learner.update(scored)
    assert learner.params_digest() == digest


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    learner = make_learner(config)
    (scored,) = scored_steps(config, 1)
    embedding = policy(learner).embedder.input_embedding
    embedding[...] = embedding[...] * jnp.nan
    with pytest.raises(NonFiniteError) as caught:
        learner.update(scored)
    gradients = len(by_name(learner.params()))
    reward = f"{scored.scores.total[0]:g}"
    assert str(caught.value).startswith(
        f"the loss of step 1 must be finite, got nan; {gradients} gradients are not finite, the first that of "
    )
    assert f"; the policy's log-probability of token 0 is nan in row 0, whose reward is {reward} (" in str(caught.value)
    assert "; nothing of it reached the policy. Continue from the last checkpoint" in str(caught.value)


def test_a_penalty_needs_a_reference(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"algorithm": {"beta": 0.5}})
    with pytest.raises(ConfigError, match=r"algorithm.beta=0.5 needs a reference model, got none"):
        make_learner(config, model=object(), reference=None)
