"""An in-process rollout engine, which hides sglang-jax's internals from the rest of this package.

    engine = Engine.build(checkpoint_dir, mesh, options)
    engine.install_weights(weights)          # name -> array, as engine.weight_specs says; forgets cached prefixes
    completions = engine.generate(requests)  # in the order of the requests

Everything happens on the calling thread.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from tpu_grpo.config import PROMPT_MARGIN_TOKENS
from tpu_grpo.engine import repairs
from tpu_grpo.engine.conversing import Conversations
from tpu_grpo.engine.dealing import expected_tokens, make_groups, places_for, rows_kept
from tpu_grpo.engine.experts import check_tokens
from tpu_grpo.engine.flash_attention import check_pages
from tpu_grpo.engine.generation import Finished, Generation
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.routed_experts import ExpertLayout
from tpu_grpo.engine.runner import Runner, RunnerSettings
from tpu_grpo.engine.scheduler import SteppedScheduler
from tpu_grpo.engine.server_args import CONTEXT_MARGIN_TOKENS, server_args
from tpu_grpo.engine.use import EngineUse
from tpu_grpo.engine.waves import Limits, Waves
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, Request

AXES = ("data", "tensor")
"""The mesh axes that sglang-jax's models use."""


class Engine:
    """One sglang-jax scheduler and model on one mesh with explicit axes ("data", "tensor")."""

    def __init__(self, scheduler: SteppedScheduler, options: EngineOptions):
        self._scheduler = scheduler
        self.options = options
        self.figures: Mapping[str, float] = {}
        """What the last ``generate`` took, under the metrics' names."""

    @classmethod
    def build(cls, checkpoint: Path, mesh: Mesh, options: EngineOptions) -> "Engine":
        """Build an engine without weights or cache; ``install_weights`` brings both.

        Args:
            checkpoint: directory whose config.json describes the model; no weights are read.
            mesh: a mesh from ``engine_mesh``.
            options: the engine's sizes and settings.

        Raises:
            ConfigError: if ``options.shard_vocab`` is set and the mesh's size does not divide the vocabulary, if flash
                attention cannot take the pages, or the fused experts a number of tokens.
        """
        if options.attention == "flash":
            context = options.context_tokens + CONTEXT_MARGIN_TOKENS
            check_pages(rows=options.max_running_requests, context_tokens=context, page_size=options.page_size)
        repairs.require_repaired_version()
        repairs.count_instead_of_clock()
        if options.experts == "fused":
            check_tokens(options.shapes, mesh.size)
        settings = RunnerSettings(
            attention=options.attention,
            shapes=options.shapes,
            shard_vocab=options.shard_vocab,
            stop_token_ids=options.stop_token_ids,
            steps_per_launch=options.steps_per_launch,
            return_experts=options.return_experts,
            experts=options.experts,
            kv_dtype=options.kv_dtype,
            filtered=options.filtered,
        )
        build_runner = functools.partial(Runner, settings)
        return cls(SteppedScheduler(server_args(checkpoint, mesh, options), mesh, build_runner), options)

    @property
    def checkpoint(self) -> Path:
        """The directory whose config.json describes the model."""
        return Path(self._scheduler.server_args.model_path)

    @property
    def mesh(self) -> Mesh:
        """The engine's devices, with the axes AXES."""
        return self._scheduler.runner.mesh

    @property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding of every parameter, by name."""
        return self._scheduler.runner.weight_specs

    @property
    def cache_specs(self) -> list[jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding of every layer's cache."""
        return self._scheduler.runner.cache_specs

    @property
    def expert_layout(self) -> ExpertLayout | None:
        """What the engine returns of the experts that served each token; None if it was not built to return any."""
        return self._scheduler.runner.expert_layout

    @property
    def steps_per_launch(self) -> int:
        """The most decode steps of a launch."""
        return self._scheduler.runner.steps_per_launch

    @property
    def use(self) -> EngineUse:
        """A copy of what the engine has done so far, and the host's seconds by what it did."""
        return dataclasses.replace(self._scheduler.use)

    @property
    def retractions(self) -> int:
        """How many running requests so far went back to the queue because the cache ran short."""
        return self._scheduler.use.retracted

    @property
    def digest(self) -> str:
        """sha256 of every scheduling decision and token so far; it is equal on all hosts that drive one engine."""
        return self._scheduler.digest

    def before_every_launch(self, call: Callable[[int, str], None]) -> None:
        """Call ``call(number of the launch, digest)`` before each launch; this replaces an earlier ``call``."""
        scheduler = self._scheduler
        scheduler.before_launch = lambda: call(scheduler.forward_ct, scheduler.digest)

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Sample with these parameters from now on, and forget the prefixes that older ones computed.

        Raises:
            WeightsError: if names, shapes or types are not those of ``weight_specs``.
        """
        self._scheduler.runner.install_weights(weights)
        self._scheduler.runner.restore_cache()
        self.forget_prefixes()

    def release(self) -> None:
        """Free the cache and drop the parameters until ``install_weights``; call it only between generations."""
        self.forget_prefixes()
        self._scheduler.runner.release()

    @property
    def has_weights(self) -> bool:
        """Whether parameters are installed."""
        return self._scheduler.runner.weights is not None

    @property
    def weights(self) -> dict[str, Array]:
        """The parameters that the engine samples with, by name; empty where none are installed."""
        runner = self._scheduler.runner
        return dict(zip(runner.weight_specs, runner.weights, strict=True)) if runner.weights is not None else {}

    @property
    def cache(self) -> list[Array]:
        """The cached keys and values of every layer; empty where no cache is allocated."""
        layers = self._scheduler.runner.token_to_kv_pool.kv_buffer
        return [layer for layer in layers if isinstance(layer, jax.Array)]

    def compile_all(self, tell: Callable[[], None] = lambda: None) -> int:
        """Compile every shape now, and return the number of programs; ``tell`` is called after each."""
        return self._scheduler.runner.compile_all(tell)

    def lower(self, mode: Literal["decode", "prefill"], size: int) -> jax.stages.Lowered:
        """Lower the program of decode steps of ``size`` rows or a prefill of ``size`` tokens; it needs no weights."""
        return self._scheduler.runner.lower(ForwardMode.DECODE if mode == "decode" else ForwardMode.EXTEND, size)

    def generate(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        conversations: Conversations | None = None,
    ) -> list[Completion]:
        """Sample a completion for every request.

        Args:
            requests: what to sample.
            finished: is called with the index and the completion of each request as it ends.
            conversations: those of the requests, if their answers are conversations.

        Returns:
            The completions in the order of ``requests``.

        Raises:
            RequestError: if the engine can never serve one of them; none is started then.
        """
        self.check(requests)
        expected = expected_tokens(requests)
        waves = None
        if conversations is not None:
            waves = Waves(conversations, self.limits(requests, expected, conversations.places))
        generation, before = self.begin(requests, expected, finished, waves), self.use
        generation.hold(make_groups(requests, expected, converse=conversations is not None))
        while generation.advance():
            pass
        self.figures = (self.use - before).figures
        return [generation.completions[index] for index in range(len(requests))]

    def begin(
        self,
        requests: Sequence[Request],
        expected: Sequence[int],
        finished: Finished | None = None,
        waves: Waves | None = None,
    ) -> Generation:
        """Start a generation of those of the requests that its ``hold`` is given; the caller advances it by launches.

        Args:
            requests: what ``check`` has passed.
            expected: tokens that are expected of each of them.
            finished: is called with the index and the completion of each request as it ends.
            waves: brings their turns, if their answers are conversations.
        """
        assert self.has_weights, "install_weights comes before a generation"
        options = self.options
        return Generation(
            self._scheduler,
            requests,
            options.stop_token_ids,
            expected=expected,
            places=places_for(requests, expected, options),
            finished=finished,
            share=options.prefix_cache,
            waves=waves,
        )

    def limits(self, requests: Sequence[Request], expected: Sequence[int], places: int | None = None) -> Limits:
        """Return what conversations may do that begin with these requests, and have so many places on each host."""
        return Limits(self.options.tool_steps, places, rows_kept(requests, expected, self.options), self._check)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise RequestError if the engine can never serve one of these requests."""
        for index, request in enumerate(requests):
            self._check(index, request)

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; call it only between generations."""
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
        needed = max(options.tokens_of_request(prompt + new), prompt + PROMPT_MARGIN_TOKENS)
        if needed > options.cache_tokens:
            raise RequestError(
                f"request {index}: {prompt} prompt tokens and max_new_tokens={new} need {needed} cache tokens, the "
                f"cache has {options.cache_tokens}; raise rollout.kv_tokens"
            )
        if request.return_experts and not options.return_experts:
            raise RequestError(f"request {index}: this engine keeps no experts; build it with return_experts=True")
        vocabulary = self._scheduler.model_config.vocab_size
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise RequestError(f"request {index}: token ids must be in [0, {vocabulary}), got {request.token_ids}")


def partition_spec(spec: jax.ShapeDtypeStruct) -> PartitionSpec:
    """Return the partition spec of one of an engine's ``weight_specs``."""
    assert isinstance(spec.sharding, NamedSharding)
    return spec.sharding.spec


def engine_mesh(devices: Sequence[Any], engines: int = 1) -> Mesh:
    """Make the mesh of one engine, which shards heads and hidden units over ``devices``, or of several alike.

    Its axes are explicit: the type of a traced array says how it is sharded, as sglang-jax's models ask. The devices of
    several engines are listed engine by engine.
    """
    return Mesh(np.asarray(devices).reshape(engines, -1), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
