"""The model runner of an engine: weights as arguments, and one compiled program per shape for model and sampler.

    runner.install_weights({"transformer.embed_tokens.embedding": array, ...})
    tokens_B, logprobs_B = runner.launch(batch)       # device arrays; the cache was updated in place

Suffixes: B rows (padded), T tokens of the step (padded), N pages per row.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.errors import WeightsError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.arrays import AnyArray
from tpu_grpo.rollout.gather_attention import GatherAttention, block_metadata, decode_metadata
from tpu_grpo.rollout.sampling import SamplingColumns, sample_tokens
from tpu_grpo.rollout.shapes import Shapes, pad_to
from tpu_grpo.types import Request


class StepInputs(NamedTuple):
    """What one step needs on the devices, all of it replicated."""

    input_ids: Int[AnyArray, " T"]
    positions: Int[AnyArray, " T"]
    out_cache_loc: Int[AnyArray, " T"]
    """Cache slot of each new token; -1 for padding."""
    seq_lens: Int[AnyArray, " B"]
    """Tokens of each row after this step; 0 for padding."""
    prefix_lens: Int[AnyArray, " B"]
    extend_lens: Int[AnyArray, " B"]
    cache_loc: Int[AnyArray, " S"]
    """Cache slots of all rows, concatenated; used by the library's native attention only."""
    attention: Any
    """The attention backend's metadata."""
    sampling: SamplingColumns


class Runner(ModelRunner):
    """sglang-jax's ModelRunner with the model, the cache and the attention it builds, and our step around them."""

    attention: str
    shapes: Shapes
    weights: list[Array] | None = None

    # --- what ModelRunner.initialize calls -------------------------------------------------------------------------

    def load_model(self) -> None:
        """Build the model without allocating its parameters; they arrive by ``install_weights``."""
        config = self.model_config
        repairs.own_hf_config(config)
        config.validate_tensor_parallel_config(self.tp_size)
        config.configure_for_tensor_parallel(self.tp_size)
        model_class, _ = get_model_architecture(config)
        model = repairs.abstract_model(model_class, config.hf_config, config.dtype, self.mesh)
        repairs.lm_head_in_model_dtype(model, config.dtype)
        repairs.rope_in_float32(model)
        self.model = None  # ModelRunner's attribute; parameters live in self.weights alone
        self.dtype = config.dtype
        self._graph, self._abstract = nnx.split(model)

    def initialize_jit(self) -> None:
        """Compiled on first use per shape; see ``step_program``."""
        self._table = SamplingColumns(
            *(np.zeros(self.shapes.max_rows + 2, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)),
            key=np.zeros((self.shapes.max_rows + 2, 4), np.uint32),
            position=np.zeros(0, np.int32),
        )

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
        if self.attention == "native":
            return repairs.import_native_attention()(self.num_attn_heads, self.num_kv_heads)
        if self.attention == "flash":
            from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention

            head_dim = self.model_config.head_dim
            return FlashAttention(
                self.num_attn_heads, self.num_kv_heads, head_dim, page_size=self.page_size, mesh=self.mesh
            )
        return _NoBackend()

    # --- weights -----------------------------------------------------------------------------------------------------

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape, dtype and sharding of every parameter, in the order of ``self.weights``."""
        specs = nnx.to_flat_state(nnx.get_partition_spec(self._abstract))
        return {
            ".".join(map(str, path)): jax.ShapeDtypeStruct(
                leaf.value.shape, leaf.value.dtype, sharding=NamedSharding(self.mesh, spec.value or P())
            )
            for (path, leaf), (_, spec) in zip(nnx.to_flat_state(self._abstract), specs, strict=True)
        }

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

    # --- a step ------------------------------------------------------------------------------------------------------

    def admit(self, row: int, request: Request) -> None:
        """Note the sampling settings of the request that now holds row ``row`` of the request table."""
        sampling, key = request.sampling, request.key
        self._table.temperature[row] = sampling.temperature
        self._table.top_k[row] = sampling.top_k
        self._table.top_p[row] = sampling.top_p
        self._table.min_p[row] = sampling.min_p
        self._table.key[row] = (key.seed, key.step, key.prompt, key.sample)

    def launch(self, batch: ScheduleBatch) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Start the step of a scheduled batch; rows beyond the batch's are padding."""
        inputs = self.decode_inputs(batch) if batch.forward_mode.is_decode() else self.prefill_inputs(batch)
        return self.run(batch.forward_mode, inputs)

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
        tokens, logprobs = sample_tokens(output.next_token_logits, inputs.sampling)
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
            attn_backend=self._backend_with(inputs.attention),
            cache_loc=inputs.cache_loc,
            extend_prefix_lens=inputs.prefix_lens if extend else None,
            extend_seq_lens=inputs.extend_lens if extend else None,
        )

    def _backend_with(self, metadata: Any) -> Any:
        if self.attention == "gather":
            return GatherAttention(self.page_size, metadata)
        backend = self._get_attention_backend()  # made anew: flax lets nobody change a module inside a trace
        if self.attention == "flash":
            backend.forward_metadata = metadata
        return backend

    # --- inputs of a step --------------------------------------------------------------------------------------------

    def decode_inputs(self, batch: ScheduleBatch) -> StepInputs:
        """Inputs of a decode step: one token per row."""
        rows = pad_to(self.shapes.batch, len(batch.seq_lens))
        seq_lens = _padded(batch.seq_lens, rows)
        ones = (seq_lens > 0).astype(np.int32)
        return self._inputs(
            batch,
            mode=ForwardMode.DECODE,
            input_ids=_padded(batch.input_ids, rows),
            positions=np.maximum(seq_lens - 1, 0),
            out_cache_loc=_padded(batch.out_cache_loc, rows, fill=-1),
            seq_lens=seq_lens,
            prefix_lens=seq_lens - ones,
            extend_lens=ones,
        )

    def prefill_inputs(self, batch: ScheduleBatch) -> StepInputs:
        """Inputs of a prefill step: the rows' new tokens, concatenated."""
        rows, tokens = self.shapes.max_rows, pad_to(self.shapes.prefill, len(batch.input_ids))
        positions = np.concatenate([np.arange(p, s) for p, s in zip(batch.prefix_lens, batch.seq_lens, strict=True)])
        return self._inputs(
            batch,
            mode=ForwardMode.EXTEND,
            input_ids=_padded(batch.input_ids, tokens),
            positions=_padded(positions, tokens),
            out_cache_loc=_padded(batch.out_cache_loc, tokens, fill=-1),
            seq_lens=_padded(batch.seq_lens, rows),
            prefix_lens=_padded(np.asarray(batch.prefix_lens), rows),
            extend_lens=_padded(np.asarray(batch.extend_lens), rows),
        )

    def _inputs(self, batch: ScheduleBatch, *, mode: ForwardMode, **columns: Int[np.ndarray, " n"]) -> StepInputs:
        seq_lens = columns["seq_lens"]
        table = batch.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices, : self.shapes.context]
        cache_loc = self._cache_loc(slots, seq_lens)
        return StepInputs(
            **columns,
            cache_loc=cache_loc,
            attention=self._attention_metadata(mode, columns, slots, cache_loc),
            sampling=self._sampling_columns(batch.req_pool_indices, seq_lens),
        )

    def _cache_loc(self, slots: Int[np.ndarray, "b L"], seq_lens: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        if self.attention == "gather":  # reads pages instead
            return np.zeros(0, np.int32)
        return _concatenated_slots(slots, seq_lens, self.page_size, len(seq_lens) * self.shapes.context)

    def _attention_metadata(self, mode: ForwardMode, columns: Mapping[str, Any], slots: Any, cache_loc: Any) -> Any:
        if self.attention == "gather":
            pages = _padded(slots[:, :: self.page_size] // self.page_size, len(columns["seq_lens"]))
            if mode == ForwardMode.DECODE:
                return decode_metadata(pages)
            return block_metadata(pages, columns["extend_lens"], len(columns["input_ids"]))
        batch = _worker_batch(mode, columns, cache_loc)
        return self.attn_backend.get_forward_metadata(batch)

    def _sampling_columns(self, pool_rows: Int[np.ndarray, " b"], seq_lens: Int[np.ndarray, " B"]) -> SamplingColumns:
        rows = np.full(len(seq_lens), self.shapes.max_rows + 1, np.int64)  # the last row of the table is padding's
        rows[: len(pool_rows)] = pool_rows
        *settings, _ = (column[rows] if len(column) else column for column in self._table)
        return SamplingColumns(*settings, position=seq_lens)

    # --- compiling ahead ---------------------------------------------------------------------------------------------

    def compile_all(self) -> int:
        """Run every shape once on padding, so that nothing compiles later. Returns how many programs there are."""
        sizes = [(ForwardMode.DECODE, rows) for rows in self.shapes.batch]
        sizes += [(ForwardMode.EXTEND, tokens) for tokens in self.shapes.prefill]
        for mode, size in sizes:
            self.run(mode, self._padding_inputs(mode, size))
        return len(sizes)

    def _padding_inputs(self, mode: ForwardMode, size: int) -> StepInputs:
        rows = size if mode == ForwardMode.DECODE else self.shapes.max_rows
        columns = {
            "input_ids": np.zeros(size, np.int32),
            "positions": np.zeros(size, np.int32),
            "out_cache_loc": np.full(size, -1, np.int32),
            "seq_lens": np.zeros(rows, np.int32),
            "prefix_lens": np.zeros(rows, np.int32),
            "extend_lens": np.zeros(rows, np.int32),
        }
        slots = np.zeros((0, self.shapes.context), np.int32)
        cache_loc = self._cache_loc(slots, columns["seq_lens"])
        return StepInputs(
            **columns,
            cache_loc=cache_loc,
            attention=self._attention_metadata(mode, columns, slots, cache_loc),
            sampling=self._sampling_columns(np.zeros(0, np.int32), columns["seq_lens"]),
        )


class _NoBackend:
    """In ModelRunner's slot for an attention backend when ours is built inside the step."""

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:
        del max_context_len, page_size
        return 1 << 20


def _logits_metadata(inputs: StepInputs, mode: ForwardMode) -> LogitsMetadata:
    extend_lens = inputs.extend_lens if mode == ForwardMode.EXTEND else None
    return LogitsMetadata(forward_mode=mode, capture_hidden_mode=CaptureHiddenMode.NULL, extend_seq_lens=extend_lens)


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    values = np.asarray(values, np.int32)
    padded = np.full((size, *values.shape[1:]), fill, np.int32)
    padded[: len(values)] = values
    return padded


def _concatenated_slots(
    slots: Int[np.ndarray, "b L"], seq_lens: Int[np.ndarray, " B"], page_size: int, size: int
) -> Int[np.ndarray, " S"]:
    """Each row's cache slots up to whole pages, one row after the other; the rest is 0."""
    aligned = -(-seq_lens[: len(slots)] // page_size) * page_size
    concatenated = np.zeros(size, np.int32)
    if len(slots):
        position = np.arange(slots.shape[1])
        values = np.where(position < seq_lens[: len(slots), None], slots, 0)[position < aligned[:, None]]
        concatenated[: len(values)] = values
    return concatenated


def _worker_batch(mode: ForwardMode, columns: Mapping[str, Any], cache_loc: Any) -> ModelWorkerBatch:
    """What the library's backends read to build their metadata."""
    batch = ModelWorkerBatch.__new__(ModelWorkerBatch)
    batch.forward_mode, batch.cache_loc = mode, cache_loc
    batch.seq_lens, batch.extend_seq_lens = columns["seq_lens"], columns["extend_lens"]
    return batch
