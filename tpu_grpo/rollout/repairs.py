"""Everything changed in sglang-jax 0.0.2, in one place, each with its reason.

Nothing here runs at import. A repair is a context manager around the one call that needs it, or a function that fixes
an object after it was built. Whatever is replaced in the library is replaced by ``mock.patch.object``, and only for the
duration of that call. The one exception is the clock of the prefix tree, which the tree reads at every step. Each
repair has a test that fails once the library no longer needs it.
"""

import copy
import importlib
import itertools
import os
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jax.tree_util
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_grpo.errors import ConfigError
from tpu_grpo.families.rope import Llama3Scaling, inverse_timescales

REPAIRED_VERSION = "0.0.2"


def require_repaired_version() -> None:
    """Refuse another sglang-jax: these repairs reach into its internals.

    Raises:
        ConfigError: if another version is installed; it names both.
    """
    found = version("sglang-jax")
    if found != REPAIRED_VERSION:
        raise ConfigError(
            f"sglang-jax must be {REPAIRED_VERSION}, found {found}: the repairs in tpu_grpo/rollout/repairs.py were "
            f"made for that version; install it, or review each repair"
        )


@contextmanager
def in_process(mesh: Mesh, build_runner: Callable[..., Any]) -> Iterator[None]:
    """Build a Scheduler with our mesh and runner, and without sockets, watchdog thread or reseeded global generators.

    ``build_runner`` is called in place of ``ModelRunner``, with the arguments of its constructor.

    Reason: ``Scheduler.__init__`` opens zmq sockets, makes a mesh of all devices, starts a thread that kills the
    process when a step takes long, and seeds ``random`` and ``numpy.random``; ``ModelWorker`` names its runner class.
    The environment variable SGLANG_CI_SMALL_KV_SIZE would change the cache's size on one host only.
    """
    from sgl_jax.srt.managers import scheduler, tp_worker

    silent_thread = types.SimpleNamespace(start=lambda: None)
    threading = types.SimpleNamespace(Thread=lambda **_: silent_thread, Event=scheduler.threading.Event)
    states = random.getstate(), np.random.get_state()
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_CI_SMALL_KV_SIZE"}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(scheduler.zmq, "Context", return_value=None),
        mock.patch.object(scheduler, "get_zmq_socket", return_value=None),
        mock.patch.object(scheduler, "create_device_mesh", return_value=mesh),
        mock.patch.object(scheduler, "threading", threading),
        mock.patch.object(tp_worker, "ModelRunner", build_runner),
    ):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def import_native_attention() -> type:
    """Import the library's NativeAttention class.

    Reason: its module registers a pytree that flax >= 0.12 has registered already (every ``nnx.Module``), so importing
    it raises ValueError.
    """
    with mock.patch.object(jax.tree_util, "register_pytree_node_class", lambda cls: cls):
        module = importlib.import_module("sgl_jax.srt.layers.attention.native_backend")
    return module.NativeAttention


def abstract_model(model_class: type, hf_config: Any, dtype: jnp.dtype, mesh: Mesh) -> nnx.Module:
    """Build the model with ``jax.ShapeDtypeStruct`` parameters, so that nothing is allocated.

    Reason: its ``nnx.with_partitioning`` parameters demand an ambient mesh under flax's eager sharding.
    """
    with nnx.use_eager_sharding(False), mesh, _our_experts():
        return nnx.eval_shape(lambda: model_class(hf_config, dtype, nnx.Rngs(0), mesh))


@contextmanager
def _our_experts() -> Iterator[None]:
    """Let models build their mixture-of-experts layers from our class.

    Reasons: ``EPMoE`` does not run on one device (its forward is defined twice, and the second has other arguments);
    on several it declares its weights a device's share too small, rounds the router's weights to bfloat16, and needs
    a TPU for its kernel and its exchange.
    """
    from sgl_jax.srt.models import qwen3_moe

    from tpu_grpo.rollout.experts import Experts

    with mock.patch.object(qwen3_moe, "EPMoE", Experts):
        yield


@contextmanager
def cache_without_arrays() -> Iterator[None]:
    """Build a cache of ``jax.ShapeDtypeStruct`` layers.

    Reason: ``MHATokenToKVPool`` allocates its layers when it is built; ours come with the weights, and an engine that
    is only compiled has none.
    """
    from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool

    def describe(pool: Any) -> None:
        pool.kv_sharding = NamedSharding(pool.mesh, PartitionSpec(None, pool.kv_partition_axis))
        shape = (pool.size + pool.page_size, pool.head_num * 2, pool.head_dim)  # keys and values in turn
        layer = jax.ShapeDtypeStruct(shape, pool.dtype, sharding=pool.kv_sharding)
        pool.kv_buffer = [layer] * pool.layer_num

    with mock.patch.object(MHATokenToKVPool, "_create_buffers", describe):
        yield


def lm_head_in_model_dtype(model: Any, dtype: jnp.dtype) -> None:
    """Give an untied output head the model's type.

    Reason: ``ParallelLMHead`` is built without a dtype and is always bfloat16: log-probabilities off by 3e-3 in a
    float32 model.
    """
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.dtype = dtype
        value = head.embedding.value
        head.embedding.value = jax.ShapeDtypeStruct(value.shape, dtype)


def rope_as_published(model: nnx.Module) -> None:
    """Compute rotary angles in float32 whatever the model's type, and with the scaling that the model asks for.

    Reasons: ``RotaryEmbedding`` rounds its inverse frequencies to the model's type; in bfloat16 the angle at position
    1000 is off by up to 2 radians. Sines and cosines are still rounded to the queries' type when they are applied, as
    the published model does. ``Llama3RotaryEmbedding`` has the scaled frequencies and never uses them. The library
    shares these objects between models, so the model gets its own.
    """
    from sgl_jax.srt.layers.embeddings import Llama3RotaryEmbedding, RotaryEmbedding

    for _, node in nnx.iter_modules(model):
        for name, value in list(vars(node).items()):
            if isinstance(value, RotaryEmbedding):
                rope = copy.copy(value)
                rope.dtype = jnp.float32
                if isinstance(rope, Llama3RotaryEmbedding):
                    rope._inv_freq_np = _scaled_frequencies(rope)
                setattr(node, name, rope)


def _scaled_frequencies(rope: Any) -> np.ndarray:
    scaling = Llama3Scaling(rope.scaling_factor, rope.low_freq_factor, rope.high_freq_factor, rope.orig_max_position)
    return inverse_timescales(rope.rotary_dim, rope.base, scaling).astype(np.float32)


def own_hf_config(model_config: Any) -> None:
    """Give a ModelConfig its own copy of the Hugging Face config.

    Reason: ``configure_for_tensor_parallel`` writes the replicated number of key-value heads into it, and loading is
    cached: the next engine of the process would read the changed number.
    """
    from sgl_jax.srt.hf_transformers_utils import get_hf_text_config

    model_config.hf_config = copy.deepcopy(model_config.hf_config)
    model_config.hf_text_config = get_hf_text_config(model_config.hf_config)


def count_instead_of_clock() -> None:
    """Let the prefix tree order its nodes by a counter.

    Reason: it evicts by ``time.monotonic()``, so hosts, or two runs of one program, could evict different prefixes. A
    second call changes nothing.
    """
    from sgl_jax.srt.mem_cache import radix_cache

    if not isinstance(radix_cache.time, types.SimpleNamespace):
        ticks = itertools.count()
        counter = types.SimpleNamespace(monotonic=lambda: next(ticks))
        mock.patch.object(radix_cache, "time", counter).start()  # never stopped: the tree reads it at every step


class NoSamplingInfo:
    """Stands in for the library's ``SamplingBatchInfo``: our sampler's columns live in the runner's table.

    Reason: building, filtering and merging it (with three penalty objects) at every change of the batch is a good part
    of a small step, and nothing here reads it.
    """

    penalizer_orchestrator = types.SimpleNamespace(is_required=False)
    sampling_info_done = None

    @classmethod
    def from_schedule_batch(cls, *_: Any) -> "NoSamplingInfo":
        """Make an instance, in place of the library's constructor."""
        return cls()

    def filter_batch(self, *_: Any) -> None:
        """Do nothing: there are no columns to filter."""

    def merge_batch(self, *_: Any) -> None:
        """Do nothing: there are no columns to merge."""


@contextmanager
def without_sampling_info() -> Iterator[None]:
    """Let the library schedule a step with NoSamplingInfo."""
    from sgl_jax.srt.managers import schedule_batch

    with mock.patch.object(schedule_batch, "SamplingBatchInfo", NoSamplingInfo):
        yield
