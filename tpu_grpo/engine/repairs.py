"""All changes to sglang-jax 0.1.0rc0, each with its reason.

Nothing here runs at import. A repair is a context manager around the one call that needs it, a function that fixes an
object after it was built, or a function that makes a changed copy. Parts of the library are replaced by
``mock.patch.object``, and only for the duration of that call. The one exception is the clock of the prefix tree: it
stays replaced, because the tree reads it at every step. Each repair has a test that fails once the library no longer
needs it.
"""

import copy
import functools
import inspect
import itertools
import os
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import pallas
from jax.experimental.pallas import tpu
from jax.sharding import Mesh
from sgl_jax.srt.configs import model_config
from sgl_jax.srt.kernels.ragged_paged_attention import ragged_paged_attention_v3 as library_attention
from sgl_jax.srt.layers.embeddings import Embed, RotaryEmbedding
from sgl_jax.srt.managers import schedule_batch, scheduler, tp_worker
from sgl_jax.srt.mem_cache import radix_cache
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.models import gemma4, qwen3_moe
from transformers import CONFIG_MAPPING, PretrainedConfig

from tpu_grpo.engine.experts import Experts
from tpu_grpo.models.families.rope import Scaling, inverse_timescales
from tpu_grpo.records.errors import ConfigError

REPAIRED_VERSION = "0.1.0rc0"


def require_repaired_version() -> None:
    """Refuse other versions of sglang-jax: these repairs reach into its internals.

    Raises:
        ConfigError: if another version is installed; the message names both.
    """
    found = version("sglang-jax")
    if found != REPAIRED_VERSION:
        raise ConfigError(
            f"sglang-jax must be {REPAIRED_VERSION}, found {found}: the repairs in tpu_grpo/engine/repairs.py were "
            f"made for that version; install it, or review each repair"
        )


@contextmanager
def in_process(build_runner: Callable[..., Any]) -> Iterator[None]:
    """Let the library build a Scheduler with our runner, without sockets, threads or reseeded random generators.

    ``build_runner`` is called in place of ``ModelRunner``, with the arguments of its constructor.

    Reason: ``Scheduler.__init__`` makes a zmq context, starts a thread that kills the process when a step takes long,
    seeds ``random`` and ``numpy.random``, and sets another compilation cache for jax. ``ModelWorker`` hard-codes its
    runner class and starts a thread. The environment variable SGLANG_CI_SMALL_KV_SIZE would change the cache's size on
    one host only.
    """
    silent_thread = types.SimpleNamespace(start=lambda: None)
    threading = types.SimpleNamespace(Thread=lambda **_: silent_thread, Event=scheduler.threading.Event)
    states = random.getstate(), np.random.get_state()
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_CI_SMALL_KV_SIZE"}
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(scheduler.zmq, "Context", return_value=None),
        mock.patch.object(scheduler.Scheduler, "_setup_jit_cache"),
        mock.patch.object(scheduler, "threading", threading),
        mock.patch.object(tp_worker, "threading", threading),
        mock.patch.object(tp_worker, "ModelRunner", build_runner),
    ):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def config_of(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let the library take these settings as those of the model if transformers does not know its type, and else read
    them anew.

    Reasons: transformers 4 has no Gemma 4, so the library cannot read the config.json of its text model. Of others it
    keeps what it read by the path, also if another model is there by now, or the path is relative and the working
    directory another one.
    """
    if settings["model_type"] in CONFIG_MAPPING:
        read = model_config.get_config.__wrapped__
    else:
        read = mock.Mock(return_value=PretrainedConfig.from_dict(dict(settings)))
    with mock.patch.object(model_config, "get_config", read):
        yield


def abstract_model(
    model_class: type,
    hf_config: Any,
    dtype: jnp.dtype,
    mesh: Mesh,
    *,
    split_vocabulary: bool,
) -> Any:
    """Build the model with ``jax.ShapeDtypeStruct`` parameters, with our class for its mixture-of-experts layers.

    Without ``split_vocabulary``, embedding and output head are replicated on every device.

    Reasons: the library allocates random parameters. It shards embedding and output head by vocabulary, which fails if
    the number of devices does not divide the vocabulary. Its ``EPMoE`` keeps weights on a separate mesh, with an axis
    "expert", and cannot take arrays on the engine's mesh.
    """
    initialise = Embed.__init__

    def initialise_replicated(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **(kwargs | {"kernel_axes": (None, None)}))

    with (
        jax.set_mesh(mesh),
        mock.patch.object(qwen3_moe, "EPMoE", Experts),
        mock.patch.object(gemma4, "EPMoE", Experts),
        nullcontext() if split_vocabulary else mock.patch.object(Embed, "__init__", initialise_replicated),
    ):
        return nnx.eval_shape(lambda: model_class(hf_config, mesh=mesh, dtype=dtype))


@contextmanager
def cache_without_arrays(layers: Callable[[Any], list[jax.ShapeDtypeStruct]]) -> Iterator[None]:
    """Let the library build a cache that has the specs ``layers(pool)`` in place of the layers' arrays.

    Reason: ``MHATokenToKVPool`` allocates its layers when it is built, and all in one shape. We allocate them with the
    weights, and never for an engine that is only compiled.
    """

    def describe(pool: Any) -> None:
        pool.kv_buffer = layers(pool)
        pool.kv_sharding = pool.kv_buffer[0].sharding

    with mock.patch.object(MHATokenToKVPool, "_create_buffers", describe):
        yield


def rope_as_published(model: nnx.Module, dtype: jnp.dtype, scaling: Scaling | None) -> None:
    """Apply ``scaling`` to the rotary embeddings of a model, and let them return sines and cosines in ``dtype``.

    Reason: ``Llama3RotaryEmbedding`` computes the scaled frequencies but never uses them, and Qwen3 models ignore a
    scaling. ``get_rope`` shares these objects between models, so the model gets its own copies.
    """
    for _, node in nnx.iter_modules(model):
        for name, value in list(vars(node).items()):
            if isinstance(value, RotaryEmbedding):
                rope: Any = copy.copy(value)
                rope.dtype = dtype
                if scaling is not None:
                    rope._inv_freq_np = inverse_timescales(rope.rotary_dim, rope.base, scaling).astype(np.float32)
                    if scaling.amplitude != 1.0:
                        rope._compute_cos_sin = _amplified(rope._compute_cos_sin, scaling.amplitude)
                setattr(node, name, rope)


def _amplified(cosines_and_sines: Callable[[Any], Any], amplitude: float) -> Callable[[Any], Any]:
    return lambda positions: tuple(amplitude * values for values in cosines_and_sines(positions))


def count_instead_of_clock() -> None:
    """Let the prefix tree order its nodes by a counter instead of the time.

    Reason: the tree evicts by ``time.monotonic()``, so hosts, or two runs of one program, could evict different
    prefixes. A second call changes nothing.
    """
    if not isinstance(radix_cache.time, types.SimpleNamespace):
        ticks = itertools.count()
        counter = types.SimpleNamespace(monotonic=lambda: next(ticks))
        mock.patch.object(radix_cache, "time", counter).start()  # never stopped: the tree reads it at every step


@contextmanager
def slots_taken(slots_b: np.ndarray) -> Iterator[None]:
    """Let the library prepare a decode step with cache slots that were reserved before.

    Reason: the library would check for free slots, evict prefixes or retract rows if none are free, and allocate.
    """

    def enough(*_: Any) -> bool:  # functions, because a Mock takes 0.15 ms to build, and this runs at every launch
        return True

    def taken(*_: Any, **__: Any) -> np.ndarray:
        return slots_b

    batch = schedule_batch.ScheduleBatch
    with (
        mock.patch.object(batch, "check_decode_mem", enough),
        mock.patch.object(batch, "alloc_paged_token_slots_decode", taken),
        mock.patch.object(schedule_batch, "alloc_token_slots", taken),
    ):
        yield


class NoSamplingInfo:
    """An empty replacement for the library's ``SamplingBatchInfo``; launches.py has our table of sampling settings.

    Reason: the library builds, filters and merges a ``SamplingBatchInfo`` (with three penalty objects) at every change
    of the batch. That takes a good part of the time of a small step, and our sampler does not read the result.
    """

    penalizer_orchestrator = types.SimpleNamespace(is_required=False)
    sampling_info_done = None

    @classmethod
    def from_schedule_batch(cls, *_: Any, **__: Any) -> "NoSamplingInfo":
        """Make an instance, in place of the library's constructor."""
        return cls()

    def filter_batch(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no columns to filter."""

    def merge_batch(self, *_: Any, **__: Any) -> None:
        """Do nothing: there are no columns to merge."""


@contextmanager
def without_sampling_info() -> Iterator[None]:
    """Let the library schedule a step with NoSamplingInfo."""
    with mock.patch.object(schedule_batch, "SamplingBatchInfo", NoSamplingInfo):
        yield


@functools.cache
def attention_of(case: library_attention.RpaCase) -> Callable[..., Any]:
    """Make a copy of the library's ``ragged_paged_attention`` that runs its kernel for rows of one case only.

    Reasons: the library runs the kernel for rows of one new token (DECODE), and again for other rows (MIXED), but all
    rows of a step are of one case here. The kernel also begins by zeroing its buffers of keys and values, which takes
    2 K + 2 bundles (cycles) per key for K heads, although it masks whatever it has not fetched.

    It is a copy because engines are traced in several threads, which would share a patched function.
    """
    parameters = inspect.signature(library_attention._ragged_paged_attention_kernel_loop).parameters
    buffers = list(parameters).index("bkv_x2_ref") - 1  # the first one is the row, which the loop passes

    def pallas_call(kernel: Any, **settings: Any) -> Callable[..., Any]:
        def without_zeroing(*refs: Any) -> None:
            kernel(*refs[:buffers], _NeverZeroed(refs[buffers]), *refs[buffers + 1 :])

        def call(*inputs: Any) -> Any:
            pairs: list[tuple[Any, Any]] = [x if isinstance(x, tuple) else (x, pallas.ANY) for x in inputs]
            if kernel.keywords["case"] != case:  # without rows, its outputs are inputs
                return [pairs[place][0] for place in settings["input_output_aliases"]]
            placed = (tpu.with_memory_space_constraint(x, space) for x, space in pairs)
            return pallas.pallas_call(without_zeroing, **settings)(*placed)

        return call

    whole: Any = inspect.unwrap(library_attention.ragged_paged_attention)
    pairing = {"with_memory_space_constraint": lambda x, space: (x, space)}  # on v7x; ``call`` needs x without a space
    names = {
        "pl": types.SimpleNamespace(**{**vars(pallas), "pallas_call": pallas_call}),
        "pltpu": types.SimpleNamespace(**{**vars(tpu), **pairing}),
    }
    copied = types.FunctionType(whole.__code__, vars(library_attention) | names)
    copied.__kwdefaults__ = whole.__kwdefaults__
    copied.__defaults__ = whole.__defaults__
    return copied


class _NeverZeroed:
    """The kernel's buffers. Writes to their view as int32, through which the kernel only zeroes them, do nothing."""

    def __init__(self, buffers: Any):
        self.buffers, self.shape, self.at = buffers, buffers.shape, buffers.at

    def bitcast(self, dtype: Any) -> Any:
        view = self.buffers.bitcast(dtype)
        return _NeverZeroed(view) if dtype == jnp.int32 else view

    def __setitem__(self, *_: Any) -> None:
        pass
