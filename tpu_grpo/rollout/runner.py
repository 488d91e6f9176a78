"""The model runner of an engine: weights as arguments, and one compiled program per shape for model and sampler.

    runner.install_weights({"transformer.embed_tokens.embedding": array, ...})
    tokens_B, logprobs_B = runner.launch(batch)       # device arrays; the cache was updated in place

Suffix: B rows (padded).
"""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.errors import WeightsError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.attention import AttentionMode, Flash, Gather, Native
from tpu_grpo.rollout.flash_attention import kernel_width
from tpu_grpo.rollout.sampling import sample_tokens
from tpu_grpo.rollout.shapes import Shapes
from tpu_grpo.rollout.step_inputs import InputBuilder, StepInputs
from tpu_grpo.rollout.vocabulary import VOCABULARY_LEAVES, deal_rows, splits_vocabulary


class Runner(ModelRunner):
    """sglang-jax's ModelRunner with the model, the cache and the attention it builds, and our step around them."""

    attention: str
    shapes: Shapes
    shard_vocab: bool | None
    weights: list[Array] | None = None
    cache_specs: list[jax.ShapeDtypeStruct]

    # --- what ModelRunner.initialize calls -------------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model without allocating its parameters; they arrive by ``install_weights``."""
        config = self.model_config
        repairs.own_hf_config(config)
        config.validate_tensor_parallel_config(self.tp_size)
        config.configure_for_tensor_parallel(self.tp_size)
        if self.attention == "flash":
            config.head_dim = kernel_width(config.head_dim)  # the cache's; the model reads hf_config
        model_class, _ = get_model_architecture(config)
        model = repairs.abstract_model(model_class, config.hf_config, config.dtype, self.mesh)
        repairs.lm_head_in_model_dtype(model, config.dtype)
        repairs.rope_as_published(model)
        self.model = None  # ModelRunner's attribute; parameters live in self.weights alone
        self.dtype = config.dtype
        self._splits_vocabulary = splits_vocabulary(self.shard_vocab, config.vocab_size, self.tp_size)
        self._graph, self._abstract = nnx.split(model)

    def initialize_jit(self) -> None:
        """Nothing yet: each shape of ``step_program`` is compiled when it is first run."""

    def init_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Describe the cache; ``restore_cache`` makes it."""
        with repairs.cache_without_arrays():
            super().init_memory_pool(*args, **kwargs)
        self.cache_specs = self.token_to_kv_pool.kv_buffer

    def profile_max_num_token(self, total_device_memory: int) -> int:
        """The configured size: measuring free memory would differ between hosts and drop compiled programs."""
        del total_device_memory
        size = self.server_args.max_total_tokens
        assert size is not None
        return size

    def get_available_device_memory(self) -> int:
        """Never measured; see ``profile_max_num_token``."""
        return 0

    def _get_attention_backend(self) -> Any:
        modes: dict[str, Callable[[], AttentionMode]] = {
            "gather": lambda: Gather(self.page_size),
            "native": lambda: Native(self),
            "flash": lambda: Flash(self),
        }
        self._attention = modes[self.attention]()
        self.inputs = InputBuilder(self.shapes, self._attention)
        return self._attention.library_backend()

    # --- weights -----------------------------------------------------------------------------------------------------

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape, dtype and sharding of every parameter, in the order of ``self.weights``."""
        specs = nnx.to_flat_state(nnx.get_partition_spec(self._abstract))
        found = {}
        for (path, leaf), (_, spec) in zip(nnx.to_flat_state(self._abstract), specs, strict=True):
            name, partition = ".".join(map(str, path)), _whole_in_an_engine(spec.value)
            if self._splits_vocabulary and name.endswith(VOCABULARY_LEAVES):
                partition = P("tensor", None)
            sharding = NamedSharding(self.mesh, partition)
            found[name] = jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype, sharding=sharding)
        return found

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Use these parameters from the next step on.

        Raises:
            WeightsError: listing names that are missing or unknown, or arrays of another shape or type.
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
        """Delete the cache and let go of the parameters; both are back before the next step."""
        self.weights, pool = None, self.token_to_kv_pool
        for layer in pool.kv_buffer:
            layer.delete()
        pool.kv_buffer = self.cache_specs

    def restore_cache(self) -> None:
        """Make the cache, empty, if there is none."""
        pool = self.token_to_kv_pool
        if pool.kv_buffer is self.cache_specs:
            pool.kv_buffer = [self._empty_layer() for _ in pool.kv_buffer]

    @cached_property
    def _empty_layer(self) -> Any:
        """() -> one layer's cache; compiled at the first call."""
        layer = self.cache_specs[0]
        return jax.jit(lambda: jnp.zeros(layer.shape, layer.dtype), out_shardings=layer.sharding)

    # --- a step ------------------------------------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Start the step of a scheduled batch; rows beyond the batch's are padding."""
        return self.run(batch.forward_mode, self.inputs.build(batch))

    def run(self, mode: ForwardMode, inputs: StepInputs) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Run the step program and keep the cache it returns."""
        assert self.weights is not None, "install_weights comes before the first step"
        with jax.set_mesh(self.mesh):
            tokens, logprobs, cache = self.step_program(
                self.weights, self.token_to_kv_pool.kv_buffer, inputs, mode=mode
            )
        self.token_to_kv_pool.kv_buffer = cache
        return tokens, logprobs

    @cached_property
    def step_program(self) -> Any:
        """The jitted step: (weights, cache, inputs, mode) -> (tokens, log-probabilities, cache). Donates the cache."""
        replicated = NamedSharding(self.mesh, P())
        cache = [self.token_to_kv_pool.kv_sharding] * self.token_to_kv_pool.layer_num
        outputs = (replicated, replicated, cache)
        return jax.jit(self._step, static_argnames="mode", donate_argnames="cache", out_shardings=outputs)

    def _step(self, weights: list[Array], cache: list[Array], inputs: StepInputs, *, mode: ForwardMode) -> Any:
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), weights)
        model: Any = nnx.merge(self._graph, state)
        pool = copy.copy(self.token_to_kv_pool)
        pool.kv_buffer = list(cache)
        output, new_cache, _ = model(self._forward_batch(inputs, mode), pool, _logits_metadata(inputs, mode))
        logits = deal_rows(output.next_token_logits, self.mesh, split=self._splits_vocabulary)
        tokens, logprobs = sample_tokens(logits, inputs.sampling)
        return tokens, logprobs, new_cache

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
        """Run every shape once on padding, so that nothing compiles later. Returns how many programs there are."""
        sizes = [(ForwardMode.DECODE, rows) for rows in self.shapes.batch]
        sizes += [(ForwardMode.EXTEND, tokens) for tokens in self.shapes.prefill]
        for mode, size in sizes:
            self.run(mode, self.inputs.padding(mode, size))
        return len(sizes)

    def lower(self, mode: ForwardMode, size: int) -> jax.stages.Lowered:
        """The step program of one shape, without weights or cache."""
        replicated = NamedSharding(self.mesh, P())
        inputs = jax.tree.map(
            lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=replicated),
            self.inputs.padding(mode, size),
        )
        with jax.set_mesh(self.mesh):
            return self.step_program.lower(list(self.weight_specs.values()), self.cache_specs, inputs, mode=mode)


def _whole_in_an_engine(spec: P | None) -> P:
    """Without the axis "data", which counts the engines, while the library's router of experts is split over it."""
    parts = [tuple(axis for axis in part if axis != "data") if isinstance(part, tuple) else part for part in spec or ()]
    return P(*parts)


def _logits_metadata(inputs: StepInputs, mode: ForwardMode) -> LogitsMetadata:
    extend_lens = inputs.extend_lens if mode == ForwardMode.EXTEND else None
    return LogitsMetadata(forward_mode=mode, capture_hidden_mode=CaptureHiddenMode.NULL, extend_seq_lens=extend_lens)
