"""One test per repair that fails when Tunix no longer needs it; ``__wrapped__`` is Tunix's own function."""

import importlib.metadata
import threading
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl import rl_cluster, rl_learner
from tunix.rl.grpo import grpo_learner
from tunix.sft import sharding_utils

from tests.learner.toy import RecordingEngine, make_mesh
from tests.tunix_loop.parts import make_cluster
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.tunix_loop import loop_repairs

OTHER = lambda: Mesh(np.array(jax.devices()[2:4]).reshape(2, 1), ("fsdp", "tp"))  # noqa: E731  # after the first test


def original(function: Any) -> Any:
    return function.__wrapped__


@pytest.fixture(autouse=True)
def repaired() -> None:
    loop_repairs.apply()


def test_another_tunix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ConfigError, match=r"google-tunix must be 0\.1\.7, got 0\.2\.0"):
        loop_repairs.apply()


def test_tunix_takes_the_rows_of_a_host_for_its_own_and_we_do_not() -> None:
    """Its function makes the array of this process' rows; ours cuts every host's shards out of all rows."""
    mesh, rows = make_mesh(), np.arange(8).reshape(4, 2)
    with mesh, mock.patch.object(jax, "make_array_from_process_local_data", side_effect=AssertionError) as made:
        with pytest.raises(AssertionError):
            original(sharding_utils.shard_input)(rows, ("fsdp",))
        found = sharding_utils.shard_input(rows, ("fsdp",))  # pyrefly: ignore[bad-argument-type]
    assert made.call_count == 1
    assert found.sharding == NamedSharding(mesh, PartitionSpec("fsdp"))
    np.testing.assert_array_equal(found, rows)


@pytest.mark.full
def test_tunix_copies_the_parameters_to_the_host_and_we_do_not() -> None:
    ours = make_cluster()
    ours.sync_weights()
    leaf, copy = jax.tree.leaves(nnx.state(ours.actor_trainer.model))[0], jax.tree.leaves(ours._anchor_policy_state)[0]
    assert copy is leaf
    with jax.transfer_guard("allow"):
        original(rl_cluster.RLCluster.sync_weights)(ours)
    assert jax.tree.leaves(ours._anchor_policy_state)[0].sharding.memory_kind == "pinned_host"


@pytest.mark.full
def test_tunix_keeps_log_probabilities_on_devices_and_we_bring_them_to_every_host() -> None:
    cluster, ids = make_cluster(), np.full((4, 5), 7)
    with make_mesh():
        theirs = original(rl_cluster.RLCluster.get_old_per_token_logps)(cluster, ids, ids)
    assert isinstance(theirs, jax.Array)
    ours = cluster.get_old_per_token_logps(prompt_tokens=ids, completion_tokens=ids, micro_batch_size=2)
    assert isinstance(ours, np.ndarray)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def learner(cluster: Any, seen: list[Any]) -> Any:
    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.append(threading.current_thread())
        return [float(len(text)) for text in completions]

    return grpo_learner.GRPOLearner(cluster, grpo_learner.GRPOConfig(beta=0.0), reward)


@pytest.mark.full
def test_tunix_samples_on_another_thread_and_we_do_not() -> None:
    """Tunix's own learner, with nothing replaced but the engine, learns on the thread that called it."""
    engine, seen = RecordingEngine(), list[Any]()
    ours = learner(make_cluster(engine, OTHER()), seen)
    assert not ours.can_enable_async_rollout
    before = np.asarray(jax.tree.leaves(nnx.state(ours.rl_cluster.actor_trainer.model))[0])
    ours.train({"prompts": np.array(["abc", "de", "f", "ghij"])} for _ in range(3))
    assert engine.calls == ["generate", "install"] * 2
    assert set(seen) == {threading.main_thread()}
    after = np.asarray(jax.tree.leaves(nnx.state(ours.rl_cluster.actor_trainer.model))[0])
    assert (before != after).any()
    with mock.patch.object(rl_learner.RLLearner, "__init__", original(rl_learner.RLLearner.__init__)):
        theirs = learner(make_cluster(RecordingEngine(), OTHER()), seen)
    assert theirs.can_enable_async_rollout


@pytest.mark.full
def test_a_restored_policy_reaches_the_engine_before_it_samples() -> None:
    for wrapped, calls in ((True, ["install"]), (False, [])):
        engine = RecordingEngine()
        cluster = make_cluster(engine)
        cluster.actor_trainer._train_steps = 3  # as after Tunix's restore
        function = rl_learner.RLLearner.__init__
        with mock.patch.object(rl_learner.RLLearner, "__init__", function if wrapped else original(function)):
            learner(cluster, [])
        assert engine.calls == calls


@pytest.mark.full
def test_optax_sums_in_the_type_of_gradients_and_we_in_float32() -> None:
    """The mean of 1 and seven times 2^-9, which no bfloat16 number is."""
    parts = [jnp.asarray(value, jnp.bfloat16) for value in (1.0, *[2.0**-9] * 7)]
    params, found = jnp.zeros((), jnp.bfloat16), {}
    both: dict[str, Any] = {
        "ours": loop_repairs.float32_sums(optax.sgd(1.0), 8),
        "optax": optax.MultiSteps(optax.sgd(1.0), 8),
    }
    for name, optimizer in both.items():
        state = optimizer.init(params)
        for part in parts:
            updates, state = optimizer.update(part, state, params)
            found.setdefault(name, []).append(float(updates))
    assert found["ours"] == [*[0.0] * 7, -(1 + 7 * 2.0**-9) / 8]
    assert abs(found["optax"][7] - found["ours"][7]) > 1e-4
    kept: Any = loop_repairs.float32_sums(optax.identity(), 4).init(params)
    (leaf,) = jax.tree.leaves(kept.sums)
    assert leaf.dtype == jnp.float32
    state_of = make_cluster(mini_batch_size=4, train_micro_batch_size=2).actor_trainer.optimizer.opt_state
    assert hasattr(state_of, "sums")  # Tunix's trainer sums with ours
