"""The model runner of an engine: one compiled program per shape runs the model and samples tokens.

    runner.install_weights({"model.embed_tokens.embedding": array, ...})
    output = runner.launch(batch)       # device arrays; the cache was updated in place

Weights are arguments of the program, so that new ones need no compilation.

Suffixes: B rows (padded), T tokens of the step (padded), L layers, K experts per token.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Integer
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.mem_cache.memory_pool import MemoryPools, MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.errors import WeightsError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.attention import AttentionMode, AttentionName, FlashMode, GatherMode, NativeMode
from tpu_grpo.rollout.experts import EXPERTS, ExpertsName
from tpu_grpo.rollout.routed_experts import ExpertLayout
from tpu_grpo.rollout.shapes import Shapes
from tpu_grpo.rollout.step_inputs import InputBuilder, StepInputs
from tpu_grpo.rollout.vocabulary import VOCABULARY_LEAVES, WholeVocabularyLogits, sample_rows, splits_vocabulary


@dataclass(frozen=True)
class RunnerSettings:
    """What our runner needs to know beside the library's ServerArgs."""

    attention: AttentionName
    shapes: Shapes
    shard_vocab: bool | None
    return_experts: bool = False
    experts: ExpertsName = "ragged"


class StepOutput(NamedTuple):
    """What a step leaves on the devices, beside the cache."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    experts: Integer[Array, "T L K"] | None
    """The experts of every token that the step computed, if the runner returns them."""


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
        """Compile nothing yet: each shape of ``step_program`` is compiled when it first runs."""

    def init_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Describe the cache without allocating it; ``restore_cache`` does that."""
        with repairs.cache_without_arrays(self._attention.cache_layer):
            super().init_memory_pool(*args, **kwargs)
        self.cache_specs = self.token_to_kv_pool.kv_buffer

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
        self.inputs = InputBuilder(self.settings.shapes, self._attention)
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

    # --- a step ------------------------------------------------------------------------------------------------------

    @cached_property
    def expert_layout(self) -> ExpertLayout | None:
        """What a step returns of the experts that its tokens passed; None if it returns nothing of them."""
        return ExpertLayout.of(self.model_config.hf_config) if self.settings.return_experts else None

    def launch(self, batch: ScheduleBatch) -> StepOutput:
        """Launch the step of a scheduled batch; rows beyond those of the batch are padding."""
        return self.run(batch.forward_mode, self.inputs.build(batch))

    def run(self, mode: ForwardMode, inputs: StepInputs) -> StepOutput:
        """Run the step program, and keep the cache that it returns."""
        assert self.weights is not None, "install_weights comes before the first step"
        with jax.set_mesh(self.mesh):
            output, cache = self.step_program(self.weights, self.token_to_kv_pool.kv_buffer, inputs, mode=mode)
        self.token_to_kv_pool.kv_buffer = cache
        return output

    @cached_property
    def step_program(self) -> Any:
        """The jitted step (weights, cache, inputs, mode) -> (StepOutput, cache), which donates the cache."""
        replicated = NamedSharding(self.mesh, P())
        cache = [self.token_to_kv_pool.kv_sharding] * self.token_to_kv_pool.layer_num
        outputs = (replicated, cache)
        return jax.jit(self._step, static_argnames="mode", donate_argnames="cache", out_shardings=outputs)

    def _step(self, weights: list[Array], cache: list[Array], inputs: StepInputs, *, mode: ForwardMode) -> Any:
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), weights)
        model: Any = nnx.merge(self._graph, state)
        pool = copy.copy(self.token_to_kv_pool)
        pool.kv_buffer = list(cache)
        pools = MemoryPools(token_to_kv_pool=pool)
        logits, new_pools, _, experts = model(self._forward_batch(inputs, mode), pools, _logits_metadata(inputs, mode))
        tokens, logprobs = sample_rows(logits.next_token_logits, inputs.sampling, self.mesh)
        layout = self.expert_layout
        output = StepOutput(tokens, logprobs, None if layout is None else layout.stack(experts))
        return output, new_pools["token_to_kv_pool"]

    def _forward_batch(self, inputs: StepInputs, mode: ForwardMode) -> ForwardBatch:
        extend = mode == ForwardMode.EXTEND
        return ForwardBatch(
            bid=0,
            forward_mode=mode,
            batch_size=inputs.seq_lens.shape[0],
            input_ids=inputs.input_ids,
            req_pool_indices=inputs.seq_lens,  # read by no model or backend
            seq_lens=inputs.seq_lens,
            out_cache_loc=inputs.out_cache_loc,
            positions=inputs.positions,
            attn_backend=self._attention.backend(inputs.attention),
            cache_loc=inputs.cache_loc,
            extend_prefix_lens=inputs.prefix_lens if extend else None,
            extend_seq_lens=inputs.extend_lens if extend else None,
        )

    # --- compiling ahead ---------------------------------------------------------------------------------------------

    def compile_all(self) -> int:
        """Run every shape once on padding, so that nothing compiles later. Returns the number of programs."""
        sizes = [(ForwardMode.DECODE, rows) for rows in self.settings.shapes.batch]
        sizes += [(ForwardMode.EXTEND, tokens) for tokens in self.settings.shapes.prefill]
        for mode, size in sizes:
            self.run(mode, self.inputs.padding(mode, size))
        return len(sizes)

    def lower(self, mode: ForwardMode, size: int) -> jax.stages.Lowered:
        """Lower the step program of one shape, for the installed weights or, without any, for their specs."""
        inputs, weights = self.inputs.padding(mode, size), self.weights
        if weights is None:
            weights, replicated = list(self.weight_specs.values()), NamedSharding(self.mesh, P())
            inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), inputs)
        with jax.set_mesh(self.mesh):
            return self.step_program.lower(weights, self.token_to_kv_pool.kv_buffer, inputs, mode=mode)


def _logits_metadata(inputs: StepInputs, mode: ForwardMode) -> LogitsMetadata:
    """Ask for the logits of each row's last token, which are those of all tokens in a decode step."""
    metadata = LogitsMetadata(forward_mode=mode, capture_hidden_mode=CaptureHiddenMode.NULL)
    if mode == ForwardMode.EXTEND:
        metadata.extend_seq_lens = inputs.extend_lens
        last = jnp.maximum(jnp.cumsum(inputs.extend_lens) - 1, 0)
        metadata.logits_indices = jax.sharding.reshard(last, P("data"))
    return metadata
