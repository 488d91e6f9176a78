"""The engine that samples on one replica's devices; it hides sglang-jax's internals from the rest of this package.

    engine = Engine.build(checkpoint_dir, mesh, options)
    engine.install_weights(weights)          # name -> array, as engine.weight_specs says; forgets cached prefixes
    completions = engine.generate(requests)  # in the order of the requests

Everything happens on the calling thread. A call passes through these layers (here with what each decides or runs):

    Engine.generate -> Generation.advance       which requests to submit            generation.py
        SteppedScheduler.start, finish          which rows to launch, which slots   scheduler.py
            Programs.launch, prefill            arrays, and the compiled program    launches.py
                decode_loop                     the steps on the devices            decode_loop.py
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.server_args import ServerArgs

from tpu_grpo.config import PROMPT_MARGIN_TOKENS
from tpu_grpo.engine import repairs
from tpu_grpo.engine.generation import Finished, Generation
from tpu_grpo.engine.launches import Runner
from tpu_grpo.engine.load_balancing import expected_tokens, make_groups, rows_kept
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.partial_rollouts import Cutoff
from tpu_grpo.engine.scheduler import EngineUse, SteppedScheduler
from tpu_grpo.engine.turns import Limits, Turns
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, Request

AXES = ("data", "tensor")
"""The mesh axes that sglang-jax's models use."""
CONTEXT_MARGIN_TOKENS = 8
"""Added to the context length passed to sglang-jax, which refuses prompts within six tokens of that length."""


class Engine:
    """One sglang-jax scheduler and model on one mesh with explicit axes ("data", "tensor")."""

    def __init__(self, scheduler: SteppedScheduler, options: EngineOptions):
        self._scheduler, self._runner, self._programs = scheduler, scheduler.runner, scheduler.programs
        self.options = options
        self.mesh: Mesh = self._runner.mesh
        """The engine's devices, with the axes AXES."""
        self.weight_specs = self._runner.weight_specs
        """The shape, dtype and sharding of every parameter, by name."""
        self.cache_specs = self._runner.cache_specs
        """The shape, dtype and sharding of every layer's cache."""
        self.layer_windows = [layer.sliding_window_size for layer in self._runner.layers]
        """The window of every layer in tokens; None for a layer without one."""
        self.expert_layout = self._programs.expert_layout
        """The layout of the expert indices that the engine returns; None without ``options.return_experts``."""
        self.steps_per_launch = self._programs.steps
        """The most decode steps of a launch."""

    @classmethod
    def build(cls, checkpoint: Path, mesh: Mesh, options: EngineOptions) -> "Engine":
        """Build an engine without weights or KV cache; ``install_weights`` stores weights and allocates the cache.

        ``checkpoint`` is a directory whose config.json describes the model; ``mesh`` comes from ``engine_mesh``.

        Raises:
            ConfigError: if flash attention does not support the size or number of pages.
        """
        context, chunk = options.context_tokens + CONTEXT_MARGIN_TOKENS, options.shapes.prefill[-1]
        if options.attention == "flash":
            from tpu_grpo.engine.flash_attention import check_pages  # only needed here

            check_pages(rows=options.max_running_requests, context_tokens=context, page_size=options.page_size)
        repairs.require_repaired_version()
        repairs.count_instead_of_clock()
        hf_config = abstract_checkpoint(checkpoint).hf_config  # of Gemma 3 and 4, the text model's
        arguments = ServerArgs(  # with these the library uses no port, thread or clock
            model_path=str(checkpoint),
            json_model_override_args=json.dumps({"architectures": hf_config["architectures"]}),
            device=jax.default_backend(),
            dtype=options.dtype,
            tp_size=mesh.size,
            nnodes=1,
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_overlap_schedule=True,
            disable_precompile=True,
            disable_radix_cache=not options.prefix_cache,
            schedule_policy="fcfs",
            random_seed=0,
            context_length=context,
            page_size=options.page_size,
            max_total_tokens=options.cache_tokens,
            max_running_requests=options.max_running_requests,
            max_prefill_tokens=chunk,
            chunked_prefill_size=chunk,
            mem_fraction_static=0.5,
            attention_backend="native",
            log_level="warning",
        )
        with repairs.config_of(hf_config):
            return cls(SteppedScheduler(arguments, mesh, functools.partial(Runner, options)), options)

    def share_device(self, other: "Engine") -> None:
        """Compute at the same time as an engine with the same options on the same device, with its compiled programs;
        only CPUs can."""
        self._programs.share_device(other._programs)

    @property
    def use(self) -> EngineUse:
        """A copy of the engine's counters, and of the seconds that the host spent on each activity."""
        return dataclasses.replace(self._scheduler.use)

    @property
    def digest(self) -> str:
        """SHA-256 of every scheduling decision and token so far; it is equal on all hosts that drive one engine."""
        return self._scheduler.digest

    def before_every_launch(self, call: Callable[[int, str], None]) -> None:
        """Call ``call(launch number, digest)`` before each launch, in place of a callback set earlier."""
        scheduler = self._scheduler
        scheduler.before_launch = lambda: call(scheduler.forward_ct, scheduler.digest)

    # --- weights and programs -----------------------------------------------------------------------------------------

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Store the parameters to sample with, and clear the prefix cache, which was computed with the old parameters.

        Raises:
            WeightsError: if names, shapes or types are not those of ``weight_specs``.
        """
        self._runner.install_weights(weights)
        self.forget_prefixes()

    def release(self) -> None:
        """Free the cache and drop the parameters until ``install_weights``; call it only between generations."""
        self.forget_prefixes()
        self._runner.release()

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; call it only between generations."""
        self._scheduler.forget_prefixes()

    @property
    def weights(self) -> dict[str, Array]:
        """The engine's parameters, by name; empty before ``install_weights`` and after ``release``."""
        weights = self._runner.weights
        return dict(zip(self.weight_specs, weights, strict=True)) if weights is not None else {}

    def compile_all(self, tell: Callable[[], None] = lambda: None) -> int:
        """Compile the program of every shape now, and return the number of shapes; calls ``tell`` after each."""
        return self._programs.compile_all(tell)

    def lower(self, mode: Literal["decode", "prefill"], size: int) -> jax.stages.Lowered:
        """Lower the program for decode steps of ``size`` rows or a prefill of ``size`` tokens, even without weights."""
        return self._programs.lower(ForwardMode.DECODE if mode == "decode" else ForwardMode.EXTEND, size)

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample a completion for every request, and return them in the order of the requests.

        Raises:
            RequestError: if the engine can never serve one of the requests. No request is started then.
        """
        self.check(requests)
        expected = expected_tokens(requests)
        generation = self.begin(requests, expected, Turns(self.limits(requests, expected)))
        generation.hold(make_groups(requests, expected))
        while generation.advance():
            pass
        return [generation.completions[index] for index in range(len(requests))]

    def begin(
        self,
        requests: Sequence[Request],
        expected: Sequence[int],
        turns: Turns,
        finished: Finished | None = None,
        cut: Cutoff | None = None,
    ) -> Generation:
        """Start a generation that serves no request yet; the caller passes groups of requests to ``Generation.hold``.

        ``check`` must have accepted the requests. See `Generation` for the arguments.
        """
        assert self._runner.weights is not None, "install_weights comes before a generation"
        return Generation(self._scheduler, requests, expected, turns, finished, cut)

    def limits(self, requests: Sequence[Request], expected: Sequence[int], places: int | None = None) -> Limits:
        """Return the limits of conversations that begin with these requests; see `Limits` for ``places``."""
        kept, windows = rows_kept(requests, expected, self.options), self._runner.windows
        return Limits(
            self.options.tool_steps, places, kept if windows is None else min(kept, windows.rows), self._check
        )

    def check(self, requests: Sequence[Request]) -> None:
        """Raise RequestError if the engine can never serve one of these requests."""
        for index, request in enumerate(requests):
            self._check(index, request)

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
        vocabulary = self._runner.model_config.vocab_size
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise RequestError(f"request {index}: token ids must be in [0, {vocabulary}), got {request.token_ids}")


def engine_mesh(devices: Sequence[Any], engines: int = 1) -> Mesh:
    """Make a mesh of equally large engines along the axis "data"; ``devices`` lists the devices engine by engine.

    Each engine shards heads and hidden units over the axis "tensor". Both axes are explicit (a traced array's type
    includes its sharding), as sglang-jax's models require.
    """
    return Mesh(np.asarray(devices).reshape(engines, -1), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
