"""Tunix's own loop, with this package's engine interface and loss."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl import function_registry

from tests.learner.toy import EOS, PAD, RecordingEngine, make_config, make_mesh, make_model
from tests.tunix_loop.parts import make_cluster
from tpu_grpo.learner.forward import ModelRows
from tpu_grpo.learner.loss import AgreementSums, LossSettings, TrainBatch, policy_loss
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Completion
from tpu_grpo.tunix_loop.cluster import Cluster
from tpu_grpo.tunix_loop.learner import LOSS_NAME, EngineGrpoLearner, GrpoAlgorithmConfig, TrainExample, registered_loss
from tpu_grpo.tunix_loop.padded import PaddedShape, padded_rows


def test_names_are_translated(tmp_path: Path) -> None:
    section = {
        "group_size": 3,
        "beta": 0.5,
        "iterations": 4,
        "old_policy": "trainer",
        "importance_cap": 1.5,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "advantage": "rloo",
        "loss_aggregation": "token-mean",
        "kl_estimator": "mse_kl",
    }
    found = GrpoAlgorithmConfig.from_section(make_config(tmp_path, {"algorithm": section}).algorithm)
    assert (found.num_generations, found.beta, found.num_iterations) == (3, 0.5, 4)
    assert (found.old_policy, found.importance_cap) == ("trainer", 1.5)
    assert (found.epsilon, found.epsilon_high) == (0.1, 0.3)
    assert (found.advantage_estimator, found.loss_agg_mode, found.kl_loss_mode) == ("rloo", "token-mean", "mse_kl")
    one_sided = GrpoAlgorithmConfig.from_section(make_config(tmp_path, {"algorithm": {"clip_low": 0.1}}).algorithm)
    assert one_sided.epsilon_high == 0.1


def test_mini_batches_are_left_to_tunix(tmp_path: Path) -> None:
    section = make_config(tmp_path, {"algorithm": {"mini_batch_prompts": 2}}).algorithm
    with pytest.raises(ConfigError, match=r"mini_batch_prompts=2 is for the pipeline.*mini_batch_size .*leave it out"):
        GrpoAlgorithmConfig.from_section(section)


def test_the_registered_loss_is_the_learners(tmp_path: Path) -> None:
    """Of the same rows, and what is measured as means over tokens."""
    section = make_config(tmp_path, {"algorithm": {"beta": 0.2, "loss_aggregation": "token-mean"}}).algorithm
    config, model = GrpoAlgorithmConfig.from_section(section), make_model(make_mesh(1))
    config.temperature = 0.9  # type: ignore[attr-defined]  # Tunix's learner sets it from the rollout's
    completions = [
        Completion(np.array(ids, np.int32), np.full(len(ids), -3.0, np.float32), "length", 0)
        for ids in ([4, 5, 6], [7], [8, 9], [10, 11, 12, 13])
    ]
    prompts, advantages = [[3], [4, 5], [6], [7]], np.array([1.0, -1.0, 0.5, -0.5])
    rows = padded_rows(prompts, completions, advantages, PaddedShape(6, 5, PAD), "token-mean")
    names = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
    columns: dict[str, Any] = {name: jnp.asarray(getattr(rows, name)) for name in names}
    logps, reference = jnp.asarray(rows.rollout_logps), jnp.asarray(rows.rollout_logps) - 0.5
    importance = jnp.linspace(0.5, 1.5, 20).reshape(4, 5)
    fields: dict[str, Any] = {  # a type checker does not see what Tunix's class inherits
        "prompt_mask": jnp.asarray(rows.prompt_mask),
        "ref_per_token_logps": reference,
        "old_per_token_logps": logps - 0.1,
        "sampler_is_weights": importance,
        "rollout_per_token_logps": logps,
        "token_weights": jnp.asarray(rows.weights),
    }
    example = TrainExample(**columns, **fields)
    assert function_registry.get_policy_loss_fn(LOSS_NAME) is registered_loss
    loss, aux = registered_loss(model, example, config, PAD, EOS)
    token_ids = np.concatenate([rows.prompt_ids, rows.completion_ids], axis=1)
    lengths = np.array([len(prompt) for prompt in prompts])[:, None]
    model_rows = ModelRows(  # prompts end at 6
        token_ids=jnp.asarray(token_ids),
        segments=jnp.asarray(token_ids != PAD, jnp.int32),
        positions=jnp.asarray(np.where(token_ids != PAD, np.arange(11) - 6 + lengths, 0)),
        mask=jnp.asarray((np.arange(11) >= 6) & (token_ids != PAD)),
    )

    def after_prompts(values: Any) -> jax.Array:
        return jnp.concatenate([jnp.zeros((4, 6)), jnp.asarray(values)], axis=1)

    batch = TrainBatch(
        rows=model_rows,
        advantages=jnp.broadcast_to(jnp.asarray(advantages, jnp.float32)[:, None], (4, 11)),
        weights=after_prompts(rows.weights),
        rollout_logps=after_prompts(logps),
        old_logps=after_prompts(logps - 0.1),
        importance=after_prompts(importance),
        reference_logps=after_prompts(reference),
    )
    settings = LossSettings(config.algorithm, 0.2, section.kl_estimate, 0.9, None)
    expected, sums = policy_loss(model, batch, settings)
    assert float(loss) == float(expected) != 0.0
    assert float(aux["kl"]) == pytest.approx(float(sums.kl) / 10)
    assert float(aux["pg_clipfrac"]) == pytest.approx(float(sums.clipped) / 10)
    assert float(aux["entropy"]) == pytest.approx(float(sums.entropy) / 10)
    assert isinstance(aux["agreement"], AgreementSums)
    assert list(map(float, aux["agreement"])) == list(map(float, sums.agreement))


def test_tunix_own_loop_learns_from_what_the_engine_sampled(tmp_path: Path) -> None:
    """Two steps of ``GRPOLearner.train``: sample, score, update, push the new weights, and again."""
    engine, config = RecordingEngine(), make_config(tmp_path)
    cluster = make_cluster(Cluster, engine)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(cluster.actor_trainer.model)]

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        engine.calls.append("reward")
        return [float(len(completion)) for completion in completions]

    grpo = EngineGrpoLearner(cluster, GrpoAlgorithmConfig.from_section(config.algorithm), [reward])
    examples, build = [], grpo.train_example
    grpo.train_example = lambda rows: examples.append(build(rows)) or examples[-1]  # type: ignore[method-assign]
    grpo.train({"prompts": np.array(["abc", "de", "f", "ghij"])} for _ in range(5))

    assert engine.calls == ["generate", "reward", "install"] * 2
    first, sampled = examples[0], engine.answers[0]
    lengths = [len(c.token_ids) for c in sampled.completions]
    mask = np.asarray(first.completion_mask)
    assert mask.sum(axis=1).tolist() == lengths
    assert np.asarray(first.old_per_token_logps)[0, : lengths[0]].tolist() == [-2.5] * lengths[0]
    assert first.old_per_token_logps is first.rollout_per_token_logps
    np.testing.assert_allclose(np.asarray(first.token_weights).sum(axis=1), 1 / len(lengths), rtol=1e-6)
    assert not np.asarray(first.token_weights)[~mask].any()
    by_hand = np.sign(np.subtract(lengths[0::2], lengths[1::2]))
    assert np.sign(np.asarray(first.advantages)[0::2]).tolist() == by_hand.tolist()
    micro_steps = cluster.actor_trainer.take_micro_steps()
    assert [len(step.loss.shape) for step in micro_steps] == [0, 0]
    assert cluster.actor_trainer.take_micro_steps() == []
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(cluster.actor_trainer.model)]
    assert all((old != new).any() for old, new in zip(before, after, strict=True) if old.ndim > 1)
