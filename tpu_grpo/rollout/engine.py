"""An in-process rollout engine: the seam between this package and sglang-jax's internals.

    engine = Engine.build(checkpoint_dir, mesh, options)
    engine.install_weights(weights)          # name -> array, as engine.weight_specs says; forgets cached prefixes
    completions = engine.generate(requests)  # in the order of the requests

Everything happens on the calling thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.server_args import ServerArgs

from tpu_grpo.config import CACHE_MARGIN_TOKENS, RunConfig
from tpu_grpo.errors import ConfigError, RequestError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.flash_attention import check_pages
from tpu_grpo.rollout.generation import Generation
from tpu_grpo.rollout.runner import Runner
from tpu_grpo.rollout.scheduler import SteppedScheduler, StepSeconds
from tpu_grpo.rollout.shapes import Shapes, choose_shapes
from tpu_grpo.types import Completion, Request

AttentionName = Literal["flash", "gather", "native"]
AXES = ("data", "tensor", "expert")
"""Of sglang-jax's meshes."""
CONTEXT_MARGIN_TOKENS = 8
"""sglang-jax refuses prompts within six tokens of its context length."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is built for; all sizes are fixed for its life."""

    context_tokens: int
    """Longest prompt and completion together."""
    stop_token_ids: frozenset[int]
    dtype: Literal["float32", "bfloat16"]
    attention: AttentionName
    max_running_requests: int
    kv_tokens: int | None
    """Size of the KV cache; enough for ``max_running_requests`` rows of ``context_tokens`` when None."""
    page_size: int
    prefill_tokens: int
    prefix_cache: bool
    batch_paddings: tuple[int, ...] | None
    shard_vocab: bool | None
    """Split embedding and output head by vocabulary; where the number of devices divides it when None."""

    @classmethod
    def from_config(
        cls, config: RunConfig, stop_token_ids: Sequence[int], *, replicas: int, platform: str
    ) -> "EngineOptions":
        """The options of each of a run's engines, on devices of a platform."""
        rollout = config.rollout
        rows = -(-config.data.prompts_per_step // replicas) * config.algorithm.group_size
        return cls(
            context_tokens=config.context_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            dtype=config.model.dtype,
            attention=choose_attention(rollout.attention, platform),
            max_running_requests=min(rollout.max_running_requests, rows),
            kv_tokens=rollout.kv_tokens,
            page_size=rollout.page_size,
            prefill_tokens=rollout.prefill_tokens,
            prefix_cache=rollout.prefix_cache,
            batch_paddings=rollout.batch_paddings,
            shard_vocab=config.meshes.sampler.shard_vocab,
        )

    @property
    def shapes(self) -> Shapes:
        """The padded shapes this engine compiles."""
        return choose_shapes(
            context_tokens=self.context_tokens,
            page_size=self.page_size,
            max_running_requests=self.max_running_requests,
            prefill_tokens=self.prefill_tokens,
            batch_paddings=self.batch_paddings,
        )

    @property
    def cache_tokens(self) -> int:
        """Size of the KV cache in tokens, whole pages."""
        if self.kv_tokens is not None:
            return self.kv_tokens // self.page_size * self.page_size
        return self.max_running_requests * self.tokens_of_request(self.context_tokens)

    def tokens_of_request(self, tokens: int) -> int:
        """Cache tokens that a request of ``tokens`` needs: whole pages, with the library's margin."""
        return -(-(tokens + CACHE_MARGIN_TOKENS) // self.page_size) * self.page_size


def choose_attention(name: Literal["auto", "flash", "gather", "native"], platform: str) -> AttentionName:
    """Resolve ``auto`` and refuse what the sampler's devices (tpu, cpu, gpu) cannot run.

    Raises:
        ConfigError: for flash without a TPU.
    """
    on_tpu = platform == "tpu"
    if name == "auto":
        return "flash" if on_tpu else "gather"
    if name == "flash" and not on_tpu:
        raise ConfigError(
            f"rollout.attention=flash needs a TPU, the sampler's devices are {platform}; "
            "use gather (any device) or auto"
        )
    return name


class Engine:
    """One sglang-jax scheduler and model on one mesh with axes ("data", "tensor", "expert")."""

    def __init__(self, scheduler: SteppedScheduler, options: EngineOptions):
        self._scheduler = scheduler
        self.options = options

    @classmethod
    def build(cls, checkpoint: Path, mesh: Mesh, options: EngineOptions) -> "Engine":
        """Describe the model and its cache; weights come by ``install_weights``, and the cache with them.

        Args:
            checkpoint: directory whose config.json says which model; no weight is read.
            mesh: from ``engine_mesh``.
            options: fixed sizes and settings.

        Raises:
            ConfigError: if ``options.shard_vocab`` asks for what the mesh's size does not divide, or flash attention
                cannot take the pages.
        """
        if options.attention == "flash":
            context = options.context_tokens + CONTEXT_MARGIN_TOKENS
            check_pages(rows=options.max_running_requests, context_tokens=context, page_size=options.page_size)
        repairs.require_repaired_version()
        repairs.count_instead_of_clock()
        settings = {name: getattr(options, name) for name in ("attention", "shapes", "shard_vocab")}
        runner_class = type("EngineRunner", (Runner,), settings)
        scheduler = SteppedScheduler(_server_args(checkpoint, mesh, options), mesh, runner_class)
        return cls(scheduler, options)

    @property
    def mesh(self) -> Mesh:
        """Its devices, with the axes AXES."""
        return self._scheduler.runner.mesh

    @property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape, dtype and sharding of every parameter."""
        return self._scheduler.runner.weight_specs

    @property
    def cache_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, type and sharding of every layer's cache."""
        return self._scheduler.runner.cache_specs

    @property
    def seconds(self) -> StepSeconds:
        """Where the time of all steps so far went."""
        return self._scheduler.seconds

    @property
    def digest(self) -> str:
        """sha256 of every scheduling decision and token so far; hosts that drive one engine have the same."""
        return self._scheduler.digest

    def before_every_step(self, call: Callable[[int, str], None]) -> None:
        """``call(number of the step, digest)`` before each step is launched, instead of what was called before."""
        scheduler = self._scheduler
        scheduler.before_launch = lambda: call(scheduler.forward_ct, scheduler.digest)

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Sample with these parameters from now on; prefixes computed by the old ones are forgotten.

        Raises:
            WeightsError: if names, shapes or types are not those of ``weight_specs``.
        """
        self._scheduler.runner.install_weights(weights)
        self._scheduler.runner.restore_cache()
        self._scheduler.forget_prefixes()

    def release(self) -> None:
        """Free the cache and let go of the parameters, until ``install_weights``; only between generations."""
        self._scheduler.forget_prefixes()
        self._scheduler.runner.release()

    def weight(self, name: str) -> Array:
        """The parameter it samples with."""
        runner = self._scheduler.runner
        assert runner.weights is not None, "install_weights comes first"
        return runner.weights[list(runner.weight_specs).index(name)]

    def compile_all(self) -> int:
        """Compile every shape now; returns the number of programs."""
        return self._scheduler.runner.compile_all()

    def lower(self, mode: Literal["decode", "prefill"], size: int) -> jax.stages.Lowered:
        """The program of a decode step of ``size`` rows or a prefill of ``size`` tokens; needs no weights."""
        return self._scheduler.runner.lower(ForwardMode.DECODE if mode == "decode" else ForwardMode.EXTEND, size)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample a completion for every request.

        Returns:
            Completions in the order of ``requests``.

        Raises:
            RequestError: for a request the engine can never serve, before any is started.
        """
        generation = self.begin(requests)
        while generation.advance():
            pass
        return generation.completions()

    def begin(self, requests: Sequence[Request]) -> Generation:
        """Start on requests, to be advanced step by step; one generation at a time. Raises as ``generate`` does."""
        assert self._scheduler.runner.weights is not None, "install_weights comes before a generation"
        self.check(requests)
        return Generation(self._scheduler, requests, self.options.stop_token_ids, share=self.options.prefix_cache)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise RequestError for a request the engine can never serve."""
        for index, request in enumerate(requests):
            self._check(index, request)

    def forget_prefixes(self) -> None:
        """Drop every cached key and value."""
        self._scheduler.forget_prefixes()

    def _check(self, index: int, request: Request) -> None:
        options, prompt, new = self.options, len(request.token_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise RequestError(f"request {index}: the prompt must not be empty")
        if new < 1:
            raise RequestError(f"request {index}: max_new_tokens must be >= 1, got {new}")
        if prompt + new > options.context_tokens:
            raise RequestError(
                f"request {index}: {prompt} prompt tokens and max_new_tokens={new} exceed the engine's context of "
                f"{options.context_tokens}; shorten the prompt or raise data.max_prompt_tokens"
            )
        needed = options.tokens_of_request(prompt + new)
        if needed > options.cache_tokens:
            raise RequestError(
                f"request {index}: {prompt} prompt tokens and max_new_tokens={new} need {needed} cache tokens, the "
                f"cache has {options.cache_tokens}; raise rollout.kv_tokens"
            )
        vocabulary = self._scheduler.model_config.vocab_size
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise RequestError(f"request {index}: token ids must be in [0, {vocabulary}), got {request.token_ids}")


def partition(spec: jax.ShapeDtypeStruct) -> PartitionSpec:
    """How one of an engine's ``weight_specs`` is split over AXES."""
    assert isinstance(spec.sharding, NamedSharding)
    return spec.sharding.spec


def engine_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh for one engine that splits heads and hidden units over ``devices``."""
    return Mesh(np.asarray(devices).reshape(1, len(devices), 1), AXES)


def _server_args(checkpoint: Path, mesh: Mesh, options: EngineOptions) -> ServerArgs:
    shapes = options.shapes
    return ServerArgs(
        model_path=str(checkpoint),
        device=jax.default_backend(),
        dtype=options.dtype,
        tp_size=mesh.size,
        nnodes=1,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_jax_precompile=True,
        disable_radix_cache=not options.prefix_cache,
        schedule_policy="fcfs",
        random_seed=0,
        context_length=options.context_tokens + CONTEXT_MARGIN_TOKENS,
        page_size=options.page_size,
        max_total_tokens=options.cache_tokens,
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=shapes.prefill[-1],
        chunked_prefill_size=shapes.prefill[-1],
        mem_fraction_static=0.5,
        attention_backend="native",
        log_level="warning",
    )
