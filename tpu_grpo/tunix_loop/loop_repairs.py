"""Repairs of Tunix's learner, which ``apply()`` makes for the whole process. Reviewed for google-tunix 0.1.7.

**Batches.** ``shard_input`` assumes that each process has rows of its own, so that two hosts with the same 16 rows
train on 32. It also does not reshard an array that spans all hosts. Here every host passes all the rows.

**A copy of the parameters on the host.** ``RLCluster`` makes one when it is built and at every ``sync_weights``, for
Tunix's agentic learners. On several hosts that fails, because ``device_put`` refuses arrays that span hosts. The
arrays themselves, which no update writes to, are used instead.

**Log-probabilities of the reference and of the old policy.** Tunix cuts these arrays into micro-batches on the devices,
and combines them with arrays of a single host. Here they are gathered on every host.

**Threads.** ``RLLearner`` samples and scores on a second thread, whose order of launches may differ between hosts.
Here the calling thread does both.

**Sums of gradients.** optax's ``MultiSteps`` adds gradients in their own type, so that in bfloat16 every sum is
rounded. Here the sums are float32.

**A restored policy.** Tunix gives it to the engine only after the first update. Here the engine gets it before that.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.interpreters import pxla
from jax.sharding import PartitionSpec
from tunix.rl import rl_cluster, rl_learner, utils as rl_utils
from tunix.sft import sharding_utils

from tpu_grpo.learner import whole
from tpu_grpo.learner.parameters import placed
from tpu_grpo.models.tunix_repairs import require_reviewed_tunix, wrap


def apply() -> None:
    """Repair Tunix's learner in this process, only once. Raises the error of `require_reviewed_tunix`."""
    require_reviewed_tunix()
    _repair_learner()


@functools.cache
def _repair_learner() -> None:
    wrap(sharding_utils, "shard_input", _shard_whole_batches)
    for name in ("_init_cluster", "sync_weights"):
        wrap(rl_cluster.RLCluster, name, _without_host_copy)
    for name in ("get_ref_per_token_logps", "get_old_per_token_logps"):
        wrap(rl_cluster.RLCluster, name, _on_every_host)
    wrap(rl_learner.RLLearner, "__init__", _on_one_thread)


def _shard_whole_batches(original: Any, input_data: Any, data_sharding_axis: tuple[str, ...]) -> Any:
    del original
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        return input_data

    def sharded(value: Any) -> jax.Array:
        sharding = sharding_utils.get_sharding(value, mesh=mesh, pspec=PartitionSpec(*data_sharding_axis))
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        return placed(np.asarray(value), sharding)

    with jax.transfer_guard("allow"):
        return jax.tree.map(sharded, input_data)


def _without_host_copy(original: Any, self: Any) -> Any:
    with mock.patch.object(optax, "MultiSteps", float32_sums):
        if self.cluster_config.offload_to_cpu:
            return original(self)
        with mock.patch.object(rl_utils, "put_params_on_memory_kind", lambda params, memory_kind: params):
            return original(self)


def _on_every_host(
    original: Any,
    self: Any,
    prompt_tokens: Any,
    completion_tokens: Any,
    *args: Any,
    micro_batch_size: int | None = None,
    **kw: Any,
) -> np.ndarray:
    prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
    pieces = rl_utils.chunk_slices_by_size(stop=len(prompts), step=micro_batch_size or len(prompts))
    return np.concatenate([whole(original(self, prompts[at], completions[at], *args, **kw)) for at in pieces])


def _on_one_thread(original: Any, self: Any, rl_cluster: Any, *args: Any, **kwargs: Any) -> None:
    original(self, rl_cluster, *args, **kwargs)
    self.can_enable_async_rollout, self.executor = False, _ThisThread()
    if self.should_sync_weights and rl_cluster.actor_trainer.train_steps:
        rl_cluster.rollout.update_params(nnx.state(rl_cluster.actor_trainer.model, nnx.Param))


class _ThisThread(futures.Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        done: futures.Future[Any] = futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # result() raises it, also StopIteration, which ends Tunix's loop
            done.set_exception(error)
        return done


class SumState(NamedTuple):
    """The optimizer state of `float32_sums`."""

    passes: jax.Array
    """The number of gradients added up since the last step."""
    sums: Any
    """The sums of these gradients, float32, sharded like the parameters."""
    inner: Any


def float32_sums(optimizer: optax.GradientTransformation, steps: int) -> optax.GradientTransformation:
    """Let the optimizer step only in every ``steps``-th call, with the float32 mean of ``steps`` gradients."""

    def init(params: Any) -> SumState:
        return SumState(jnp.zeros((), jnp.int32), jax.tree.map(_zeros, params), optimizer.init(params))

    def update(gradients: Any, state: SumState, params: Any = None) -> tuple[Any, SumState]:
        sums = jax.tree.map(lambda sum_, gradient: sum_ + gradient.astype(jnp.float32), state.sums, gradients)

        def step() -> tuple[Any, SumState]:
            updates, inner = optimizer.update(jax.tree.map(lambda value: value / steps, sums), state.inner, params)
            return updates, SumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, sums), inner)

        def wait() -> tuple[Any, SumState]:
            updates, _ = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(step))
            return updates, SumState(state.passes + 1, sums, state.inner)

        return jax.lax.cond(state.passes == steps - 1, step, wait)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore[bad-argument-type]  # pure states


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    return jnp.zeros_like(leaf, jnp.float32)
