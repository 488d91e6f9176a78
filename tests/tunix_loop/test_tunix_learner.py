"""The learner of tunix:NAME beside this package's own, on a tiny model over two virtual devices."""

import gc
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import common, function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import sharding_utils

from tests.learner.test_programs import described, held
from tests.learner.toy import (
    counted_compilations,
    flat_params,
    make_config,
    make_learner,
    make_mesh,
    make_model,
    make_scored,
    model_logps,
    with_completion,
    with_noise,
)
from tests.talks import talk
from tests.tunix_loop.parts import make_tunix
from tpu_grpo.config import RunConfig
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.learner.batches import DATA_AXIS
from tpu_grpo.records.errors import ConfigError, DataError, NonFiniteError
from tpu_grpo.records.stages import ScoredRollout
from tpu_grpo.tunix_loop.engine_grpo import EngineGrpoLearner
from tpu_grpo.tunix_loop.tunix_learner import TunixLearner

TRACED = {"name": "sgd", "options": {"momentum": 0.9}, "max_grad_norm": 1e6}
"""After one update the momentum is the gradient."""


def tunix_config(directory: Path, options: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    algorithm = {"name": "tunix:grpo", "options": {"beta": 0.0} | (options or {})} | sections.pop("algorithm", {})
    return make_config(directory, {"algorithm": algorithm, **sections})


def scored_of(config: RunConfig, step: int = 1) -> ScoredRollout:
    return make_scored(make_model(make_mesh()), config, step)


def gradients(learner: Learner) -> dict[Any, np.ndarray]:
    (trace,) = (part for part in learner._updater.state.optimizer if isinstance(part, optax.TraceState))
    assert isinstance(trace.trace, dict)
    return {name: np.asarray(leaf) for name, leaf in trace.trace.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("ours", "options", "old_policy"),
    [
        pytest.param({}, {}, "rollout", marks=pytest.mark.slow),  # the last case has all of it
        pytest.param({"old_policy": "trainer", "importance_cap": 1.05}, {}, "trainer", marks=pytest.mark.slow),
        pytest.param(
            {"advantage": "drgrpo", "loss_aggregation": "sequence-mean-token-scale"},
            {"advantage_estimator": "drgrpo", "loss_agg_mode": "sequence-mean-token-scale"}, "rollout",
            marks=pytest.mark.slow),
        pytest.param(
            {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "options": {"per_token": True}},
            {"loss_algo": "gspo-token"}, "rollout", marks=pytest.mark.slow),
        ({"beta": 0.001, "clip_high": 0.28, "dual_clip": 3.0},
         {"beta": 0.001, "kl_loss_mode": "low_var_kl", "epsilon_high": 0.28, "epsilon_c": 3.0}, "rollout"),
    ],
    ids=["grpo", "trainer", "dr_grpo", "gspo", "kl"],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_packed_learner(
    tmp_path: Path, ours: dict[str, Any], options: dict[str, Any], old_policy: str
) -> None:
    """Of the same rows, whose engine is off by so much that ratios are clipped. In the first group one row is unscored,
    in the second all but one."""
    packed = make_config(tmp_path / "ours", {"algorithm": {"group_size": 3, **ours}, "optimizer": TRACED})
    own = {"group_size": 3, "old_policy": old_policy, **({"importance_cap": 1.05} if old_policy == "trainer" else {})}
    theirs = tunix_config(tmp_path / "tunix", options, algorithm=own, optimizer=TRACED)
    scored = with_noise(scored_of(packed), 0.2)
    scored.scores.total[[1, 3, 4]] = np.nan
    reference: dict[str, Any] = {"reference": make_model(make_mesh(), scale=0.29)}
    one, other = make_learner(packed, **reference), make_tunix(theirs, **reference)
    expected, found = one.update(scored), other.update(scored)
    assert found.metrics["update/loss"] == pytest.approx(expected.metrics["update/loss"], abs=1e-6)
    for name, gradient in gradients(one).items():
        gap = np.abs(gradients(other)[name] - gradient).max()
        assert gap <= 1e-5 * np.abs(gradient).max(), name
    np.testing.assert_allclose(found.advantages, expected.advantages, atol=1e-6)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_the_learner_is_generic_as_its_base_is() -> None:
    assert get_origin(EngineGrpoLearner[GRPOConfig]) is EngineGrpoLearner
    assert issubclass(types.new_class("Mine", (EngineGrpoLearner[GRPOConfig],)), EngineGrpoLearner)


@pytest.mark.full
def test_what_tunix_takes_by_itself(tmp_path: Path) -> None:
    """One iteration: the ratio is 1 whatever the engine says. Two: against a forward pass before the first."""
    config = tunix_config(tmp_path, algorithm={"old_policy": "tunix"}, optimizer=TRACED)
    scored = scored_of(config)
    noisy, exact = make_tunix(config), make_tunix(config)
    noisy.update(with_noise(scored, 0.3))
    exact.update(scored)
    for name, gradient in gradients(exact).items():
        np.testing.assert_array_equal(gradients(noisy)[name], gradient)
    twice = make_tunix(tunix_config(tmp_path, {"num_iterations": 2}, algorithm={"old_policy": "tunix"}))
    grpo: Any = twice._parts.learner
    examples, build = [], grpo._generate_and_compute_advantage
    grpo._generate_and_compute_advantage = lambda *a: examples.append(build(*a)) or examples[-1]
    twice.update(with_noise(scored, 0.3))
    assert twice._updater.state.count == 2
    (example,) = examples
    completions = [c.token_ids.tolist() for c in scored.rollout.completions]
    logps = model_logps(make_model(make_mesh()), [p.token_ids for p in scored.rollout.row_prompts], completions)
    found = [line[: len(row)] for line, row in zip(example.old_per_token_logps, completions, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(logps), atol=1e-5)


@pytest.mark.full
def test_later_updates_need_no_new_program_and_mini_batches_one_step_each(tmp_path: Path) -> None:
    section = {"mini_batch_prompts": 2, "micro_batch_prompts": 1}
    config = tunix_config(tmp_path, {"num_iterations": 2}, algorithm=section)
    learner = make_tunix(config)
    first, second = scored_of(config), scored_of(config, 2)
    learner.update(first)
    assert learner._updater.state.count == config.updates_per_step == 4
    with counted_compilations() as compiled:
        learner.update(second)
    assert compiled == []


@pytest.mark.full
def test_what_is_planned_is_the_program_of_the_learner(tmp_path: Path) -> None:
    """Lowered of descriptions, to the letter; a reference, a second forward pass, and gradients that add up."""
    section = {"micro_batch_prompts": 1, "old_policy": "trainer"}
    config, mesh = tunix_config(tmp_path, {"beta": 0.1}, algorithm=section), make_mesh()
    model, reference = described(make_model(mesh)), described(make_model(mesh, 100))
    planned = TunixLearner.build(config, LearnerInputs(model=model, reference=reference, mesh=mesh))
    learner, made = make_tunix(config, mesh), list[Any]()
    trainer: Any = learner._updater
    with mock.patch.object(trainer, "_prepare_inputs", lambda batch: made.append(batch) or batch):
        learner.update(scored_of(config))
    with mesh:
        placed = sharding_utils.shard_input(made[0], (DATA_AXIS,))
        lowered: Any = nnx.jit(trainer._train_step, donate_argnames=("optimizer",))
        lowered = lowered.lower(trainer.model, trainer.optimizer, placed)
    assert held(planned.batch) == held(placed)
    assert held(planned.held) == held(nnx.state(trainer.optimizer))
    assert planned.lower_train_step().as_text() == lowered.lowered.as_text()
    assert planned.forward_passes == 2
    assert planned.lower_logprobs().compile().memory_analysis().output_size_in_bytes > 0


@pytest.mark.full
def test_no_parameters_are_kept_beside_those_of_the_policy(tmp_path: Path) -> None:
    config = tunix_config(tmp_path)
    learner = make_tunix(config, reference=None)
    first = [weakref.ref(leaf) for leaf in learner._updater.trained.values()]
    learner.update(scored_of(config))
    gc.collect()
    assert [ref() for ref in first] == [None] * len(first)


@pytest.mark.full
def test_continuing_is_the_same_to_the_bit(tmp_path: Path) -> None:
    config = tunix_config(tmp_path, {"beta": 0.1}, model={"dtype": "bfloat16"})
    whole = make_tunix(config)
    for step in (1, 2):
        whole.update(scored_of(config, step))
    whole.save(2)
    whole.close()
    again = make_tunix(config)
    assert again.restored_step == 2
    assert again.params_digest() == whole.params_digest()
    for learner in (whole, again):
        learner.update(scored_of(config, 3))
    assert again.params_digest() == whole.params_digest()
    stepped, model = again._updater.stepped(), again._updater.trained
    assert {leaf.dtype for leaf in stepped.values()} == {np.dtype(np.float32)}
    for name, leaf in model.items():  # the model computes with the rounded float32 parameters
        np.testing.assert_array_equal(leaf, stepped[name].astype(jnp.bfloat16), err_msg=name)
    start = make_model(make_mesh())
    assert flat_params(again).keys() == stepped.keys()
    gap = max(float(jnp.abs(a - b).max()) for a, b in zip(stepped.values(), jax.tree.leaves(start), strict=True))
    assert 0 < gap < 0.01


@pytest.mark.full
def test_what_did_not_come_from_the_policy_does_not_count(tmp_path: Path) -> None:
    """Tokens of an environment are masked: neither their log-probabilities nor what the engine says changes a thing."""
    config = tunix_config(tmp_path, optimizer=TRACED)
    scored = scored_of(config)
    row = next(r for r, c in enumerate(scored.rollout.completions) if len(c.token_ids) > 2)
    completion = scored.rollout.completions[row]
    sampled = np.arange(len(completion.token_ids)) != 1
    masked = with_completion(scored, row, sampled=sampled)
    wild = np.where(sampled, completion.logprobs, 7.0).astype(np.float32)
    one, other = make_tunix(config), make_tunix(config)
    first, second = one.update(masked), other.update(with_completion(masked, row, logprobs=wild))
    assert first.metrics == second.metrics
    assert one.params_digest() == other.params_digest()


@pytest.fixture
def mine() -> Iterator[dict[str, Any]]:
    """Functions that are registered for the time of a test."""
    registry = function_registry.default_registry._registry
    added: dict[str, Any] = {}
    kinds = {category: dict(functions) for category, functions in registry.items()}
    yield added
    for category, functions in kinds.items():
        registry[category].clear()
        registry[category].update(functions)


@pytest.mark.full
def test_a_loss_of_ones_own_file_is_trained_with(tmp_path: Path, mine: dict[str, Any]) -> None:
    """It imports Tunix's function by name and returns no metrics: the agreement is measured all the same."""
    (tmp_path / "losses.py").write_text(
        "from flax import nnx\nimport jax.numpy as jnp\nfrom tunix.rl import function_registry as registry\n"
        "from tunix.rl.common import compute_per_token_logps\n\n"
        "@registry.register_policy_loss_fn('plain')\n"
        "def plain(model, train_example, algo_config, pad_id, eos_id):\n"
        "    now = compute_per_token_logps(*nnx.split(model), train_example.prompt_ids, train_example.completion_ids,\n"
        "        pad_id=pad_id, eos_id=eos_id, stop_gradient=False, temperature=algo_config.temperature)\n"
        "    return -(now * train_example.advantages[:, None] * train_example.completion_mask).mean(), {}\n\n"
        "@registry.register_advantage_estimator('sign')\n"
        "def sign(rewards, num_generations):\n"
        "    return jnp.sign(rewards)\n"
    )
    name, options = f"tunix:{tmp_path}/losses.py:plain", {"advantage_estimator": "sign"}
    config = tunix_config(tmp_path, options, algorithm={"name": name})
    original, learner, scored = common.compute_per_token_logps, make_tunix(config), scored_of(config)
    assert common.compute_per_token_logps is original  # its results are recorded only while a loss is traced
    result = learner.update(scored)
    np.testing.assert_array_equal(result.advantages, np.sign(scored.scores.total))
    assert 0.0 < result.metrics["agreement/logprob_abs_diff_max"] < 1e-5
    assert 0.0 < result.metrics["update/entropy"] < np.log(64)


def bad(answer: Any) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return function


@pytest.mark.full
@pytest.mark.parametrize(
    ("category", "answer", "message"),
    [
        ("policy_loss_fn", ValueError("no"), "Tunix's policy loss mine raised ValueError: no"),
        (
            "policy_loss_fn",
            (np.zeros(3), {}),
            r"policy loss mine must return a scalar and a dict, got the shape \(3,\)",
        ),
        ("policy_loss_fn", 1.0, "policy loss mine raised TypeError"),
        ("advantage_estimator", KeyError("x"), "tunix:grpo with advantage_estimator=mine: advantages raised KeyError"),
        ("advantage_estimator", np.zeros(3), r"=mine: what advantages returns must have the shape .* got \(3,\)"),
        ("advantage_estimator", np.full(4, np.nan), "advantage_estimator=mine: what advantages returns must be finite"),
    ],
)
def test_a_registered_function_that_is_wrong_is_named(
    tmp_path: Path, mine: dict[str, Any], category: str, answer: Any, message: str
) -> None:
    function_registry.default_registry.register(category, "mine")(bad(answer))
    chosen = {"name": "tunix:mine"} if category == "policy_loss_fn" else {}
    options = {} if chosen else {"advantage_estimator": "mine"}
    with pytest.raises(ConfigError, match=message):
        make_tunix(tunix_config(tmp_path, options, algorithm=chosen))


@pytest.mark.full
@pytest.mark.parametrize("on_non_finite", ["stop", "skip"])
def test_nothing_of_a_loss_that_is_not_finite_reaches_the_policy(
    tmp_path: Path, mine: dict[str, Any], on_non_finite: str
) -> None:
    def infinite(model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int) -> Any:
        loss, aux = function_registry.get_policy_loss_fn("grpo")(model, train_example, algo_config, pad_id, eos_id)
        return jnp.where(train_example.advantages.max() > 0, jnp.inf, 0.0) + loss, aux

    function_registry.register_policy_loss_fn("infinite")(infinite)
    config = tunix_config(
        tmp_path,
        algorithm={"name": "tunix:infinite"},
        update={"on_non_finite": on_non_finite},
        model={"dtype": "bfloat16"},
    )
    learner = make_tunix(config)
    before = learner.params_digest()
    if on_non_finite == "stop":
        told = "loss of step 1 with algorithm.name=tunix:infinite must be finite, got (inf|nan)"
        with pytest.raises(NonFiniteError, match=told):
            learner.update(scored_of(config))
    else:
        result = learner.update(scored_of(config))
        assert result.metrics["update/skipped"] == 1
        assert "the update was skipped" in result.notes[0]
    assert learner.params_digest() == before
    assert learner._updater.state.count == 0


@pytest.mark.full
def test_conversations_of_several_sequences_and_empty_completions_are_refused(tmp_path: Path) -> None:
    config = tunix_config(tmp_path)
    scored, learner = scored_of(config), make_tunix(config)
    told = talk(scored.rollout.row_prompts[0].token_ids, ([5, 6], [7]), ([8], []), prompts={1: [3, 4]})
    changes = {name: getattr(told, name) for name in ("token_ids", "logprobs", "sampled", "episode")}
    with pytest.raises(DataError, match="takes a conversation as one sequence, got 2 in row 0"):
        learner.update(with_completion(scored, 0, **changes))
    with pytest.raises(DataError, match="must have 1 to rollout.max_new_tokens"):
        learner.update(with_completion(scored, 2, token_ids=np.zeros(0, np.int32)))
