"""The model of an engine with its weights and its cache: sglang-jax's ModelRunner, whose steps are ours (launches.py).

runner.install_weights({"model.embed_tokens.embedding": array, ...})
runner.restore_cache()
runner.programs                     # runs the model
runner.release()                    # frees both until they come back
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.engine import repairs
from tpu_grpo.engine.attention import AttentionMode, NativeMode, cache_dtype
from tpu_grpo.engine.experts import EXPERTS
from tpu_grpo.engine.flash_attention import FlashMode
from tpu_grpo.engine.gather_attention import GatherMode
from tpu_grpo.engine.launches import Programs
from tpu_grpo.engine.options import EngineOptions, splits_vocabulary
from tpu_grpo.engine.sampling import VOCABULARY_LEAVES, WholeVocabularyLogits
from tpu_grpo.records.errors import WeightsError


class Runner(ModelRunner):
    """sglang-jax's ModelRunner, with our own step around the model and the cache that it builds."""

    attention: AttentionMode
    weights: list[Array] | None = None
    cache_specs: list[jax.ShapeDtypeStruct]
    token_to_kv_pool: MHATokenToKVPool

    def __init__(self, options: EngineOptions, **library_arguments: Any):
        """Build the runner; ``library_arguments`` are those of ModelRunner's constructor."""
        self.options = options  # set first: the library's constructor calls the methods below
        super().__init__(**library_arguments)
        self.programs = Programs(self)

    # --- what the library's constructor calls ----------------------------------------------------------------------

    @override
    def load_model(self) -> None:
        """Build the model without allocating its parameters, which arrive by ``install_weights``."""
        config = self.model_config
        config.validate_tensor_parallel_config(self.tp_size)
        config.configure_for_tensor_parallel(self.tp_size)
        config.hf_config.ep_size, config.hf_config.moe_backend = 1, "epmoe"  # what models with experts ask for
        split = splits_vocabulary(self.options.shard_vocab, config.vocab_size, self.tp_size)
        model_class, _ = get_model_architecture(config)
        model = repairs.abstract_model(
            model_class,
            config.hf_config,
            config.dtype,
            self.mesh,
            split_vocabulary=split,
            experts=EXPERTS[self.options.experts],
        )
        repairs.rope_as_published(model, config.dtype)
        if not split:
            soft_cap = model.logits_processor.soft_cap
            model.logits_processor = WholeVocabularyLogits(config.vocab_size, self.mesh, soft_cap)
        self.model = None  # an attribute of ModelRunner; parameters are in self.weights alone
        self.dtype = config.dtype
        self.sliding_window_size = None
        self._splits_vocabulary = split
        self.graph, self.abstract_state = nnx.split(model)

    @override
    def initialize_jit(self) -> None:
        """Compile nothing yet: each shape of a program is compiled when it first runs."""

    @override
    def init_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Describe the cache without allocating it; ``restore_cache`` does that."""
        with repairs.cache_without_arrays(self.attention.cache_layer):
            super().init_memory_pool(*args, **kwargs)
        self.cache_specs = self.token_to_kv_pool.kv_buffer

    @override
    def _init_kv_cache_dtype(self) -> None:
        """Choose the cache's type, of which the library knows none of 8 bits."""
        self.kv_cache_dtype = cache_dtype(self.options.kv_dtype, self.dtype)

    @override
    def init_routed_experts_capturer(self) -> None:
        """Keep no record on the devices of the experts that served each token; the step returns them."""

    @override
    def profile_max_num_token(self, total_device_memory: int) -> int:
        """Return the configured size, because free memory differs between hosts and its measurement drops programs."""
        size = self.server_args.max_total_tokens
        assert size is not None
        return size

    @override
    def get_available_device_memory(self) -> int:
        """Return 0, because memory is never measured; see ``profile_max_num_token``."""
        return 0

    @override
    def _get_attention_backend(self) -> Any:
        modes: dict[str, Callable[[], AttentionMode]] = {
            "gather": lambda: GatherMode(self.page_size, self.model_config.head_dim),
            "native": lambda: NativeMode(self),
            "flash": lambda: FlashMode(self),
        }
        self.attention = modes[self.options.attention]()
        return self.attention.library_backend()

    # --- weights and cache --------------------------------------------------------------------------------------------

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding of every parameter by name, in the order of ``self.weights``."""
        found = {}
        for path, leaf in nnx.to_flat_state(self.abstract_state):
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
