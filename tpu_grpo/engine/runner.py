"""The model runner of an engine: one compiled program per shape runs the model and samples tokens.

    runner.install_weights({"model.embed_tokens.embedding": array, ...})
    output = runner.prefill(batch)                  # device arrays; the cache was updated in place
    output = runner.launch(batch, reservation)      # several decode steps

Weights are arguments of the programs, so that new ones need no compilation.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.mem_cache.memory_pool import MemoryPools, MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.engine import repairs
from tpu_grpo.engine.attention import AttentionMode, AttentionName, FlashMode, GatherMode, NativeMode
from tpu_grpo.engine.decode_loop import LaunchInputs, LaunchOutput, decode_loop, nothing_before
from tpu_grpo.engine.experts import EXPERTS, ExpertsName
from tpu_grpo.engine.forward_batch import forward_batch, logits_metadata
from tpu_grpo.engine.kv_formats import KVDtype, cache_dtype
from tpu_grpo.engine.reservation import Reservation
from tpu_grpo.engine.routed_experts import ExpertLayout
from tpu_grpo.engine.shapes import Shapes, choose_steps
from tpu_grpo.engine.step_arrays import StepInputs, StepOutput
from tpu_grpo.engine.step_inputs import InputBuilder
from tpu_grpo.engine.vocabulary import VOCABULARY_LEAVES, WholeVocabularyLogits, sample_rows, splits_vocabulary
from tpu_grpo.records.errors import WeightsError


@dataclass(frozen=True)
class RunnerSettings:
    """What our runner needs to know beside the library's ServerArgs."""

    attention: AttentionName
    shapes: Shapes
    shard_vocab: bool | None
    stop_token_ids: frozenset[int]
    steps_per_launch: int | None
    """The most decode steps of a launch; None chooses by the model's size."""
    return_experts: bool = False
    experts: ExpertsName = "ragged"
    kv_dtype: KVDtype = "auto"
    filtered: bool = False
    """Return log-probabilities among the tokens that the filters keep, and the number of these."""


class Runner(ModelRunner):
    """sglang-jax's ModelRunner, with our own step around the model and the cache that it builds."""

    weights: list[Array] | None = None
    cache_specs: list[jax.ShapeDtypeStruct]
    token_to_kv_pool: MHATokenToKVPool

    def __init__(self, settings: RunnerSettings, **library_arguments: Any):
        """Build the runner; ``library_arguments`` are those of ModelRunner's constructor."""
        self.settings = settings  # set first: the library's constructor calls the methods below
        super().__init__(**library_arguments)

    # --- what the library's constructor calls ----------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model without allocating its parameters, which arrive by ``install_weights``."""
        config = self.model_config
        config.validate_tensor_parallel_config(self.tp_size)
        config.configure_for_tensor_parallel(self.tp_size)
        config.hf_config.ep_size, config.hf_config.moe_backend = 1, "epmoe"  # what models with experts ask for
        split = splits_vocabulary(self.settings.shard_vocab, config.vocab_size, self.tp_size)
        model_class, _ = get_model_architecture(config)
        model = repairs.abstract_model(
            model_class,
            config.hf_config,
            config.dtype,
            self.mesh,
            split_vocabulary=split,
            experts=EXPERTS[self.settings.experts],
        )
        repairs.rope_as_published(model, config.dtype)
        if not split:
            soft_cap = model.logits_processor.soft_cap
            model.logits_processor = WholeVocabularyLogits(config.vocab_size, self.mesh, soft_cap)
        self.model = None  # an attribute of ModelRunner; parameters are in self.weights alone
        self.dtype = config.dtype
        self.sliding_window_size = None
        self._splits_vocabulary = split
        self._graph, self._abstract = nnx.split(model)

    def initialize_jit(self) -> None:
        """Compile nothing yet: each shape of a program is compiled when it first runs."""

    def init_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Describe the cache without allocating it; ``restore_cache`` does that."""
        with repairs.cache_without_arrays(self._attention.cache_layer):
            super().init_memory_pool(*args, **kwargs)
        self.cache_specs = self.token_to_kv_pool.kv_buffer

    def _init_kv_cache_dtype(self) -> None:
        """Choose the cache's type, of which the library knows none of 8 bits."""
        self.kv_cache_dtype = cache_dtype(self.settings.kv_dtype, self.dtype)

    def init_routed_experts_capturer(self) -> None:
        """Keep no record on the devices of the experts that served each token; the step returns them."""

    def profile_max_num_token(self, total_device_memory: int) -> int:
        """Return the configured size, because free memory differs between hosts and its measurement drops programs."""
        del total_device_memory
        size = self.server_args.max_total_tokens
        assert size is not None
        return size

    def get_available_device_memory(self) -> int:
        """Return 0, because memory is never measured; see ``profile_max_num_token``."""
        return 0

    def _get_attention_backend(self) -> Any:
        modes: dict[str, Callable[[], AttentionMode]] = {
            "gather": lambda: GatherMode(self.page_size, self.model_config.head_dim),
            "native": lambda: NativeMode(self),
            "flash": lambda: FlashMode(self),
        }
        self._attention = modes[self.settings.attention]()
        return self._attention.library_backend()

    # --- weights -----------------------------------------------------------------------------------------------------

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding of every parameter by name, in the order of ``self.weights``."""
        found = {}
        for path, leaf in nnx.to_flat_state(self._abstract):
            value = leaf.get_value()
            name, partition = ".".join(map(str, path)), value.sharding.spec
            if self._splits_vocabulary and name.endswith(VOCABULARY_LEAVES):
                partition = P("tensor", None)
            sharding = NamedSharding(self.mesh, partition)
            found[name] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        return found

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Use these parameters from the next step on.

        Raises:
            WeightsError: if names are missing or unknown, or an array has another shape or type; it lists them.
        """
        specs = self.weight_specs
        if weights.keys() != specs.keys():
            missing, unknown = sorted(specs.keys() - weights.keys()), sorted(weights.keys() - specs.keys())
            raise WeightsError(f"weights do not match the sampler's: missing {missing}, unknown {unknown}")
        for name, spec in specs.items():
            array = weights[name]
            if (array.shape, array.dtype) != (spec.shape, spec.dtype):
                raise WeightsError(
                    f"{name} must be {spec.dtype}{list(spec.shape)}, got {array.dtype}{list(array.shape)}"
                )
        self.weights = [weights[name] for name in specs]

    # --- memory between rollouts -------------------------------------------------------------------------------------

    def release(self) -> None:
        """Delete the cache and drop the references to the parameters; both must be back before the next step."""
        self.weights, pool = None, self.token_to_kv_pool
        for layer in pool.kv_buffer:
            layer.delete()
        pool.kv_buffer = self.cache_specs

    def restore_cache(self) -> None:
        """Allocate an empty cache if there is none."""
        pool = self.token_to_kv_pool
        if pool.kv_buffer is self.cache_specs:
            pool.kv_buffer = [self._empty_layer() for _ in pool.kv_buffer]

    @cached_property
    def _empty_layer(self) -> Any:
        """A function that allocates the empty cache of one layer; it is compiled at the first call."""
        layer = self.cache_specs[0]
        return jax.jit(lambda: jnp.zeros(layer.shape, layer.dtype), out_shardings=layer.sharding)

    # --- programs ----------------------------------------------------------------------------------------------------

    @cached_property
    def steps_per_launch(self) -> int:
        """The most decode steps of a launch."""
        if self.settings.steps_per_launch is not None:
            return self.settings.steps_per_launch
        per_device = (
            math.prod(spec.sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
            for spec in self.weight_specs.values()
            if spec.sharding is not None
        )
        return choose_steps(sum(per_device), self.mesh.devices.flat[0].platform)

    @cached_property
    def inputs(self) -> InputBuilder:
        """Pads batches to the shapes of the programs."""
        return InputBuilder(self.settings.shapes, self._attention, self.steps_per_launch)

    @cached_property
    def expert_layout(self) -> ExpertLayout | None:
        """What a step returns of the experts that its tokens passed; None if it returns nothing of them."""
        return ExpertLayout.of(self.model_config.hf_config) if self.settings.return_experts else None

    def prefill(self, batch: ScheduleBatch) -> StepOutput:
        """Launch the prefill step of a scheduled batch; rows beyond those of the batch are padding."""
        return self._run(self.inputs.prefill(batch))

    def launch(
        self, batch: ScheduleBatch, reservation: Reservation, before: LaunchOutput | None = None
    ) -> LaunchOutput:
        """Launch several decode steps of a scheduled batch; rows beyond those of the batch are padding.

        With ``before``, the launch takes up the rows of that one where it leaves them.
        """
        return self._run(self.inputs.launch(batch, reservation, None if before is None else before.after))

    def _run(self, inputs: StepInputs | LaunchInputs) -> Any:
        """Run a program, and keep the cache that it returns."""
        assert self.weights is not None, "install_weights comes before the first step"
        if isinstance(inputs, LaunchInputs) and not isinstance(inputs.before, jax.Array):
            inputs = inputs._replace(before=nothing_before(len(inputs.rows), self.mesh))
        with jax.set_mesh(self.mesh):
            output, cache = self._program(inputs)(self.weights, self.token_to_kv_pool.kv_buffer, inputs)
        self.token_to_kv_pool.kv_buffer = cache
        return output

    def _program(self, inputs: StepInputs | LaunchInputs) -> Any:
        return self._decode_program if isinstance(inputs, LaunchInputs) else self._prefill_program

    @cached_property
    def _prefill_program(self) -> Any:
        """The jitted prefill step (weights, cache, inputs) -> (StepOutput, cache), which donates the cache."""
        return self._jitted(functools.partial(self._step, mode=ForwardMode.EXTEND))

    @cached_property
    def _decode_program(self) -> Any:
        """The jitted decode steps (weights, cache, inputs) -> (LaunchOutput, cache), which donate the cache."""
        return self._jitted(self._decode_steps)

    def _jitted(self, program: Callable[..., Any]) -> Any:
        cache = [self.token_to_kv_pool.kv_sharding] * self.token_to_kv_pool.layer_num
        return jax.jit(program, donate_argnums=1, out_shardings=(NamedSharding(self.mesh, P()), cache))

    def _decode_steps(self, weights: list[Array], cache: list[Array], inputs: LaunchInputs) -> Any:
        eos: set[int] = self.model_config.hf_eos_token_id or set()  # which the library looks for, too
        return decode_loop(
            lambda cache, step: self._step(weights, cache, step, mode=ForwardMode.DECODE),
            cache,
            inputs,
            attention=self._attention,
            stop_token_ids=self.settings.stop_token_ids | eos,
            experts=self.expert_layout,
            filtered=self.settings.filtered,
        )

    def _step(self, weights: list[Array], cache: list[Array], inputs: StepInputs, *, mode: ForwardMode) -> Any:
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), weights)
        model: Any = nnx.merge(self._graph, state)
        pool = copy.copy(self.token_to_kv_pool)
        pool.kv_buffer = list(cache)
        pools = MemoryPools(token_to_kv_pool=pool)
        batch = forward_batch(inputs, mode, self._attention.backend(inputs.attention))
        logits, new_pools, _, experts = model(batch, pools, logits_metadata(inputs, mode))
        filtered, layout = self.settings.filtered, self.expert_layout
        drawn = sample_rows(logits.next_token_logits, inputs.sampling, self.mesh, filtered=filtered)
        chosen = None if layout is None else layout.stack(experts)
        output = StepOutput(drawn.token, drawn.logprob, chosen, drawn.kept)
        return output, new_pools["token_to_kv_pool"]

    def compile_all(self, tell: Callable[[], None]) -> int:
        """Run every shape once on padding, so that nothing compiles later, and tell of each. Returns how many."""
        sizes = [(ForwardMode.DECODE, rows) for rows in self.settings.shapes.batch]
        sizes += [(ForwardMode.EXTEND, tokens) for tokens in self.settings.shapes.prefill]
        for mode, size in sizes:
            self._run(self.inputs.padding(mode, size))
            tell()
        return len(sizes)

    def lower(self, mode: ForwardMode, size: int) -> jax.stages.Lowered:
        """Lower the program of one shape, for the installed weights or, without any, for their specs."""
        inputs, weights = self.inputs.padding(mode, size), self.weights
        program = self._program(inputs)
        if weights is None:
            weights, replicated = list(self.weight_specs.values()), NamedSharding(self.mesh, P())
            inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), inputs)
        with jax.set_mesh(self.mesh):
            return program.lower(weights, self.token_to_kv_pool.kv_buffer, inputs)
