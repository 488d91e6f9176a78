"""The coefficient of an entropy bonus that is adapted to a target, by hand and through updates."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.learner.linear import Run, linear_config, linear_run
from tests.learner.toy import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    _logits,
    counted_compilations,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    signal_of,
    with_noise,
)
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.checkpoints import REFERENCE, Checkpoints
from tpu_grpo.learner.loss import EntropyState, EntropySums
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.learner.teachers import TeacherReadings
from tpu_grpo.records.errors import CheckpointError

ADAPTED = {"entropy_bonus": 0.25, "entropy_target": 2.0, "entropy_step": 0.5}


def test_by_hand() -> None:
    """Mean entropies of 1, 2, 3, 1, 1 nats for a target of 2: the coefficient waits at 0 and never falls below."""
    section, found = AlgorithmSection.model_validate(ADAPTED), []
    state, following = EntropyState.first(section), jax.jit(lambda state, measured: state.after(measured, section))
    assert isinstance(state, EntropyState)
    for mean in (1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 1.0):
        found.append((float(state.coefficient), float(state.applied)))
        state = following(state, EntropySums(jnp.float32(8 * mean), jnp.float32(8)))
    assert found == [(0.25, 0.25), (0.75, 0.75), (1.25, 1.25), (0.75, 0.0), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert (float(state.coefficient), float(state.applied)) == (0.5, 0.5)


@pytest.mark.full
def test_a_checkpoint_holds_the_coefficient_and_the_reference(tmp_path: Path) -> None:
    def opened(seed: int) -> tuple[Run, Run, Checkpoints]:
        run = linear_run(linear_config(tmp_path, algorithm=ADAPTED), seed=seed)
        reference = linear_run(linear_config(tmp_path), seed=seed + 1)
        return run, reference, Checkpoints(tmp_path, keep=2, frozen={REFERENCE: reference.updater.model})

    def step(run: Run, mean: float) -> float:
        measured = EntropySums(jnp.float32(8 * mean), jnp.float32(8))
        return float(run.step(entropy=measured).entropy_coefficient)  # pyrefly: ignore[bad-argument-type]

    run, reference, checkpoints = opened(0)
    assert checkpoints.restore(run.updater, resume="auto") == 0
    assert [step(run, mean) for mean in (1.0, 3.0)] == [0.25, 0.75]
    checkpoints.save(2, run.updater)
    checkpoints.close()
    after, other, checkpoints = opened(7)
    assert checkpoints.restore(after.updater, resume="auto") == 2
    assert tuple(map(float, after.updater.state.entropy)) == (0.25, 0.0)
    held, found = (by_name(nnx.state(each.updater.model)) for each in (reference, other))
    for name, value in held.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(found[name]))
    assert [step(after, mean) for mean in (1.0, 1.0)] == [0.0, 0.75]
    checkpoints.close()

    plain = linear_run(linear_config(tmp_path))  # what the others are not asked for stays where it is
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(plain.updater, resume="auto") == 2
    checkpoints.save(3, plain.updater)
    checkpoints.close()
    after, _, checkpoints = opened(7)
    with pytest.raises(
        CheckpointError,
        match=r"must hold the arrays of this run, got 4 others: .*optimizer\.entropy\.coefficient is none",
    ):
        checkpoints.restore(after.updater, resume="auto")
    checkpoints.close()


@pytest.mark.full
@pytest.mark.parametrize(("extra", "old_policy"), [({}, "trainer"), ({"mini_batch_prompts": 2}, "rollout")])
def test_an_update_learns_from_its_tokens_of_highest_entropy(
    tmp_path: Path, extra: dict[str, Any], old_policy: str
) -> None:
    """Which these are is found again from the model's logits, over all tokens of the update, not of a micro-batch."""
    algorithm = {"top_entropy_quantile": 0.4, "micro_batch_prompts": 1, "old_policy": old_policy, **extra}
    config, model = make_config(tmp_path, {"algorithm": algorithm}), make_model(make_mesh())
    learner, scored = make_learner(config), with_noise(make_scored(model, config), 0.1)
    ids = np.zeros((config.batch_rows, PROMPT_TOKENS + NEW_TOKENS), np.int32)
    rows = [(p.token_ids, c) for p, c in zip(scored.rollout.row_prompts, scored.rollout.completions, strict=True)]
    for line, (prompt, completion) in zip(ids, rows, strict=True):
        line[: len(prompt) + len(completion.token_ids)] = [*prompt, *completion.token_ids]
    shares = jax.nn.softmax(_logits(model, jnp.asarray(ids)).astype(jnp.float32) / config.rollout.temperature)
    entropies = -np.asarray((shares * jnp.log(shares)).sum(axis=-1), float)
    of_row = [line[len(p) - 1 :][: len(c.token_ids)] for line, (p, c) in zip(entropies, rows, strict=True)]
    updates = learner._updates(signal_of(learner, scored), TeacherReadings())
    groups = np.arange(len(rows)).reshape(-1, config.mini_batch_prompts * config.algorithm.group_size)
    if "mini_batch_prompts" in extra:
        order = np.random.default_rng([config.run.seed, 1, 1]).permutation(config.data.prompts_per_step)
        groups = np.arange(len(rows)).reshape(-1, config.algorithm.group_size)[order].reshape(groups.shape)
    for update, its in zip(updates, groups, strict=True):
        assert len(update) > 1 or "mini_batch_prompts" in extra
        threshold = np.quantile(np.concatenate([of_row[row] for row in its]), 0.6)
        expected = {tuple(rows[row][1].logprobs.tolist()): of_row[row] >= threshold for row in its}
        seen = 0
        for batch in update:
            mask, segments = np.asarray(batch.rows.mask), np.asarray(batch.rows.segments)
            for row, number in {(row, segments[row, place]) for row, place in zip(*np.nonzero(segments), strict=True)}:
                places = mask[row] & (segments[row] == number)
                chosen = expected[tuple(np.asarray(batch.rollout_logps)[row, places].tolist())]
                assert np.asarray(batch.importance)[row, places].tolist() == chosen.tolist()
                seen += 1
        assert seen == len(its)
    assert learner._parts.forward_passes == 1


@pytest.mark.slow  # two learners are compiled
def test_a_run_adapts_its_bonus_and_its_reference_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Everything that a step leaves for later ones: the coefficient, and a reference that is made anew."""
    algorithm = {
        "beta": 0.1,
        "kl_in": "reward",
        "reference_reset_every": 2,
        "entropy_bonus": 0.01,
        "entropy_target": 2.0,
        "entropy_step": 0.02,
        "micro_batch_prompts": 2,
    }
    config, mesh = make_config(tmp_path, {"algorithm": algorithm}), make_mesh()
    scored = [make_scored(make_model(mesh), config, step) for step in range(1, 6)]
    learner, found = make_learner(config, mesh, reference=make_model(mesh)), []
    for step, each in enumerate(scored, 1):
        with counted_compilations() as compiled:
            found.append(learner.update(each).metrics)
        assert step < 3 or not compiled
        if step == 3:
            learner.save(step)
    learner.close()

    coefficient, applied = 0.01, 0.01
    for metrics in found:
        assert metrics["update/entropy_coefficient"] == pytest.approx(applied, abs=1e-7)
        low = metrics["update/entropy"] <= 2.0
        coefficient = max(0.0, coefficient + (0.02 if low else -0.02))
        applied = coefficient if low else 0.0
    # The reference starts as the policy, and after steps 2 and 4 it is the policy again.
    assert np.abs([found[step]["update/kl"] for step in (0, 2, 4)]) == pytest.approx(0.0, abs=1e-5)
    assert min(abs(found[step]["update/kl"]) for step in (1, 3)) > 1e-4

    other = make_learner(config, mesh, seed=7, reference=make_model(mesh))
    assert other.restored_step == 3
    for each, metrics in zip(scored[3:], found[3:], strict=True):
        assert other.update(each).metrics == metrics
    assert other.params_digest() == learner.params_digest()
    other.close()
