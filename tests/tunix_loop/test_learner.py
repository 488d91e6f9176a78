import functools
from pathlib import Path
from typing import Any

import numpy as np

from tests.learner.toy import EOS, PAD, RecordingEngine, Tokenizer, make_config, make_mesh, make_model
from tpu_grpo.learner.adapter import RolloutAdapter
from tpu_grpo.learner.building import _cluster_config, row_shape
from tpu_grpo.learner.repairs import Cluster
from tpu_grpo.learner.tunix_learner import EngineGrpoLearner, GrpoAlgorithmConfig


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


def test_tunix_own_loop_learns_from_what_the_engine_sampled(tmp_path: Path) -> None:
    """Two steps of ``GRPOLearner.train``: sample, score, update, push the new weights, and again."""
    mesh, engine, config = make_mesh(), RecordingEngine(), make_config(tmp_path)
    model, adapter = make_model(mesh), functools.partial(RolloutAdapter, engine=engine, pad_id=PAD, eos_id=EOS)
    settings = _cluster_config(config, mesh, adapter, row_shape(config, model, PAD))
    settings.training_config.max_steps = 2
    cluster = Cluster(actor=model, tokenizer=Tokenizer(), cluster_config=settings)

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
    assert np.asarray(first.completion_mask).sum(axis=1).tolist() == lengths
    assert np.asarray(first.old_per_token_logps)[0, : lengths[0]].tolist() == [-2.5] * lengths[0]
    assert first.old_per_token_logps is first.rollout_per_token_logps
    by_hand = np.sign(np.subtract(lengths[0::2], lengths[1::2]))
    assert np.sign(np.asarray(first.advantages)[0::2]).tolist() == by_hand.tolist()
    assert [len(step.loss.shape) for step in cluster.actor_trainer.take_micro_steps()] == [0, 0]
