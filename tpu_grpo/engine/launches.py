"""Launches prefill steps and decode steps on the devices: ``Programs.prefill`` and ``Programs.launch``.

    runner.install_weights({"model.embed_tokens.embedding": array, ...})    # a sglang-jax ModelRunner
    programs = runner.programs
    programs.inputs.admit(row, request)             # stores a request's sampling settings, once it has a row
    output = programs.prefill(batch)                # device arrays; the cache was updated in place
    output = programs.launch(batch, reservation)    # several decode steps: decode_loop.py

A scheduled batch is padded to one of the compiled shapes. The program of that shape runs the model, samples tokens, and
updates the cache, which is donated to it. Weights are arguments of the programs, so new weights need no compilation.

Suffixes: B rows (padded), b rows of the batch, T tokens of the step (padded), L context, k the most steps of a launch.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Int
from sgl_jax.srt.layers.linear import LinearBase, QuantizedLinear
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.mem_cache.memory_pool import MemoryPools, MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.model_loader.loader import get_model_architecture

from tpu_grpo.config.plugins import Shipped
from tpu_grpo.engine import repairs
from tpu_grpo.engine.attention import AttentionMode, Windows, cache_dtype, padded
from tpu_grpo.engine.decode_loop import (
    LaunchInputs,
    LaunchOutput,
    LaunchRows,
    StepInputs,
    StepOutput,
    decode_loop,
    pack_rows,
)
from tpu_grpo.engine.experts import ExpertLayout, Experts
from tpu_grpo.engine.options import EngineOptions, Shapes, choose_steps, pad_to, splits_vocabulary
from tpu_grpo.engine.reservation import Reservation
from tpu_grpo.engine.sampling import VOCABULARY_LEAVES, AnyArray, SamplingColumns, WholeVocabularyLogits, sample_rows
from tpu_grpo.engine.window_pages import Rows, WindowPages
from tpu_grpo.hosts.sharded_arrays import bytes_per_device
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.models.families.rope import Scaling
from tpu_grpo.records.errors import ConfigError, WeightsError
from tpu_grpo.records.stages import Request


class Programs:
    """The compiled programs of an engine: one per batch size of decode steps, and one per size of a prefill."""

    def __init__(self, runner: "Runner"):
        self._runner = runner
        self._options, config = runner.options, runner.model_config
        self._mesh: Mesh = runner.mesh
        self.expert_layout = ExpertLayout.of(config.hf_config) if self._options.return_experts else None
        """The layout of the expert indices that a step returns; None if it returns none."""
        weight_bytes = sum(map(bytes_per_device, runner.weight_specs.values()))
        platform = self._mesh.devices.flat[0].platform
        self.steps = self._options.steps_per_launch or choose_steps(weight_bytes, platform)
        """The most decode steps of a launch."""
        self.inputs = InputBuilder(self._options.shapes, runner.attention, self.steps, runner.windows)
        eos: set[int] = config.hf_eos_token_id or set()
        self._stop_token_ids = self._options.stop_token_ids | eos  # the library stops at eos, too
        self._thread: ThreadPoolExecutor | None = None

    def share_device(self, other: "Programs") -> None:
        """Use the compiled programs of an engine on the same device, and compute at the same time as that engine.

        jax runs in order what one thread asks for; therefore this engine gets a thread.
        """
        self._programs, self._thread = other._programs, ThreadPoolExecutor(1)

    def prefill(self, batch: ScheduleBatch) -> StepOutput:
        """Launch the prefill step of a scheduled batch; rows beyond those of the batch are padding."""
        return self._run(self.inputs.prefill(batch))

    def launch(
        self, batch: ScheduleBatch, reservation: Reservation, before: LaunchOutput | None = None
    ) -> LaunchOutput:
        """Launch several decode steps of a scheduled batch; rows beyond those of the batch are padding.

        With ``before``, the output of the previous launch, rows continue from its arrays on the devices.
        """
        return self._run(self.inputs.launch(batch, reservation, None if before is None else before.after))

    def _run(self, inputs: StepInputs | LaunchInputs) -> Any:
        """Start a program, and keep the cache that it returns."""
        return self._start(inputs) if self._thread is None else self._thread.submit(self._start, inputs).result()

    def _start(self, inputs: StepInputs | LaunchInputs) -> Any:
        weights, pool = self._runner.weights, self._runner.token_to_kv_pool
        assert weights is not None, "install_weights comes before the first step"
        if isinstance(inputs, LaunchInputs) and not isinstance(inputs.before, jax.Array):
            inputs = inputs._replace(before=_nothing_before(len(inputs.rows), self._mesh))
        with jax.set_mesh(self._mesh):
            output, cache = self._programs[type(inputs)](weights, pool.kv_buffer, inputs)
        pool.kv_buffer = cache
        return output

    def compile_all(self, tell: Callable[[], None]) -> int:
        """Run every shape once on padding, so that nothing compiles later; calls ``tell`` after each. Returns the
        number of shapes."""
        sizes = [(ForwardMode.DECODE, rows) for rows in self._options.shapes.batch]
        sizes += [(ForwardMode.EXTEND, tokens) for tokens in self._options.shapes.prefill]
        for mode, size in sizes:
            self._run(self.inputs.padding(mode, size))
            tell()
        return len(sizes)

    def lower(self, mode: ForwardMode, size: int) -> jax.stages.Lowered:
        """Lower the program of one shape, for the installed weights or, if none are installed, for ``weight_specs``."""
        inputs, weights = self.inputs.padding(mode, size), self._runner.weights
        if weights is None:
            weights, replicated = list(self._runner.weight_specs.values()), NamedSharding(self._mesh, P())
            inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), inputs)
        with jax.set_mesh(self._mesh):
            return self._programs[type(inputs)].lower(weights, self._runner.token_to_kv_pool.kv_buffer, inputs)

    # --- what is compiled ---------------------------------------------------------------------------------------------

    @cached_property
    def _programs(self) -> dict[type, Any]:
        """The jitted steps (weights, cache, inputs) -> (output, cache) by type of inputs; they donate the cache."""
        pool, prefill = self._runner.token_to_kv_pool, functools.partial(self._step, mode=ForwardMode.EXTEND)
        shardings = NamedSharding(self._mesh, P()), [pool.kv_sharding] * pool.layer_num
        steps = {StepInputs: prefill, LaunchInputs: self._decode_steps}
        return {kind: jax.jit(step, donate_argnums=1, out_shardings=shardings) for kind, step in steps.items()}

    def _decode_steps(self, weights: list[Array], cache: list[Array], inputs: LaunchInputs) -> Any:
        return decode_loop(
            lambda cache, step: self._step(weights, cache, step, mode=ForwardMode.DECODE),
            cache,
            inputs,
            attention=self._runner.attention,
            stop_token_ids=self._stop_token_ids,
            experts=self.expert_layout,
            filtered=self._options.filtered,
        )

    def _step(self, weights: list[Array], cache: list[Array], inputs: StepInputs, *, mode: ForwardMode) -> Any:
        """Run the library's model on one step, and sample a token of each row."""
        runner, extend = self._runner, mode == ForwardMode.EXTEND
        state = jax.tree.unflatten(jax.tree.structure(runner.abstract_state), weights)
        model: Any = nnx.merge(runner.graph, state)
        pool = copy.copy(runner.token_to_kv_pool)
        pool.kv_buffer = list(cache)
        batch = ForwardBatch(
            bid=0,
            forward_mode=mode,
            batch_size=inputs.seq_lens.shape[0],
            input_ids=inputs.input_ids,
            req_pool_indices=inputs.seq_lens,  # read by no model or backend
            seq_lens=inputs.seq_lens,
            out_cache_loc=inputs.out_cache_loc,
            positions=inputs.positions,
            attn_backend=runner.attention.backend(inputs.attention),
            extend_prefix_lens=inputs.prefix_lens if extend else None,
            extend_seq_lens=inputs.extend_lens if extend else None,
        )
        asked = LogitsMetadata(forward_mode=mode, capture_hidden_mode=CaptureHiddenMode.NULL)
        if extend:  # only each row's last token needs logits; in a decode step that is every token
            asked.extend_seq_lens = inputs.extend_lens
            last = jnp.maximum(jnp.cumsum(inputs.extend_lens) - 1, 0)
            asked.logits_indices = jax.sharding.reshard(last, P("data"))
        logits, new_pools, _, experts = model(batch, MemoryPools(token_to_kv_pool=pool), asked)
        drawn = sample_rows(logits.next_token_logits, inputs.sampling, self._mesh, filtered=self._options.filtered)
        chosen = None if self.expert_layout is None else self.expert_layout.stack(experts)
        output = StepOutput(drawn.token, drawn.logprob, chosen, drawn.kept, drawn.likeliest)
        return output, new_pools["token_to_kv_pool"]


@functools.cache
def _nothing_before(rows: int, mesh: Mesh) -> Int[Array, "2 B"]:
    """Make ``before`` for a launch that continues no other; a host array instead would need another program."""
    return jax.jit(lambda: jnp.zeros((2, rows), jnp.int32), out_shardings=NamedSharding(mesh, P()))()


NOTHING = np.zeros(0, np.int32)
ATTENTION: Mapping[str, type[AttentionMode]] = Shipped(
    "tpu_grpo.engine", {"gather": "gather_attention:GatherMode", "flash": "flash_attention:FlashMode"}
)


class InputBuilder:
    """Pads batches to the engine's shapes, and holds the sampling settings of each running request."""

    def __init__(
        self, shapes: Shapes, attention: AttentionMode, steps_per_launch: int, windows: WindowPages | None = None
    ):
        self._shapes = shapes
        self._attention = attention
        self._steps = steps_per_launch
        self._windows = windows
        rows = shapes.max_rows + 2  # the last, beyond the library's request table, is for padding: greedy, no filter
        self._stops = np.zeros(rows, np.bool_)
        self._likeliest = np.zeros(rows, np.bool_)
        self._table = SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            key=np.zeros((rows, 4), np.uint32),
            position=np.zeros(rows, np.int32),
        )

    def admit(self, row: int, request: Request) -> None:
        """Store the sampling settings of the request in row ``row`` of the library's request table."""
        sampling, key = request.sampling, request.key
        self._stops[row], self._likeliest[row] = not sampling.ignore_stop, request.return_likeliest
        self._table.temperature[row] = sampling.temperature
        self._table.top_k[row] = sampling.top_k
        self._table.top_p[row] = sampling.top_p
        self._table.min_p[row] = sampling.min_p
        self._table.key[row] = (key.seed, key.step, key.prompt, key.sample)

    def prefill(self, batch: ScheduleBatch, tokens: int = 0) -> StepInputs:
        """Build the inputs of a prefill step, padded to at least ``tokens`` tokens; the rows' new tokens are
        concatenated."""
        rows, tokens = self._shapes.max_rows, pad_to(self._shapes.prefill, max(tokens, len(batch.input_ids)))
        ranges = [np.arange(p, s) for p, s in zip(batch.prefix_lens, batch.seq_lens, strict=True)]
        columns = {
            "input_ids": padded(batch.input_ids, tokens),
            "positions": padded(np.concatenate([NOTHING, *ranges]), tokens),
            "out_cache_loc": padded(batch.out_cache_loc, tokens, fill=-1),
            "seq_lens": padded(batch.seq_lens, rows),
            "prefix_lens": padded(batch.prefix_lens, rows),
            "extend_lens": padded(batch.extend_lens, rows),
        }
        slots = self._slots(batch)
        windows = self._window_pages(batch, slots, np.asarray(batch.prefix_lens), np.asarray(batch.seq_lens))
        metadata = self._attention.prefill_metadata(columns, slots, windows)
        sampling = self._sampling(padded(batch.req_pool_indices, rows, fill=rows + 1))
        sampling = sampling._replace(position=columns["seq_lens"])
        return StepInputs(**columns, attention=metadata, sampling=sampling)

    def launch(
        self, batch: ScheduleBatch, reservation: Reservation, before: Int[AnyArray, "2 B"] | None = None
    ) -> LaunchInputs:
        """Build the inputs of a launch of decode steps. If it continues another launch, ``before`` is the ``after`` of
        that launch's output."""
        follows, places = before is not None, reservation.columns
        rows = before.shape[1] if before is not None else pad_to(self._shapes.batch, len(places))
        slots = np.full((rows, self._steps), -1, np.int32)
        slots[places, : reservation.steps] = reservation.slots
        table_rows = padded(batch.req_pool_indices, rows, fill=self._shapes.max_rows + 1, at=places)
        columns = LaunchRows(
            token=np.zeros(rows, np.int32) if follows else padded(batch.input_ids, rows),
            length=padded(reservation.lengths, rows, at=places),
            stops=self._stops[table_rows],
            sampling=self._sampling(table_rows),
            slots=slots,
        )
        filled = self._slots(batch)
        # with ``before``, a row may still have to begin where the launch before begins
        windows = self._window_pages(batch, filled, np.asarray(batch.seq_lens) - 1, reservation.ends)
        if follows:  # else rows have no gaps between them, and need no copy
            filled = padded(filled, rows, at=places)
            windows = None if windows is None else padded(windows, rows, at=places)
        metadata = self._attention.launch_metadata(filled, padded(reservation.ends, rows, at=places), windows)
        control = np.array([reservation.steps, reservation.left, follows], np.int32)
        last = np.zeros((2, rows), np.int32) if before is None else before
        return LaunchInputs(pack_rows(columns), control, metadata, last, columns.sampling.likeliest)

    def padding(self, mode: ForwardMode, size: int) -> StepInputs | LaunchInputs:
        """Build inputs of one shape that are padding only, for compiling."""
        names = ("reqs", "input_ids", "out_cache_loc", "seq_lens", "prefix_lens", "extend_lens", "req_pool_indices")
        table = SimpleNamespace(req_to_token=np.zeros((0, self._shapes.context), np.int32))
        batch: Any = SimpleNamespace(req_to_token_pool=table, **dict.fromkeys(names, NOTHING))
        if mode == ForwardMode.EXTEND:
            return self.prefill(batch, size)
        nobody = Reservation(np.zeros((0, 0), np.int32), NOTHING, NOTHING, left=0, columns=NOTHING)
        return self.launch(batch, nobody, np.zeros((2, size), np.int32))

    def _slots(self, batch: ScheduleBatch) -> Int[np.ndarray, "b L"]:
        return batch.req_to_token_pool.req_to_token[batch.req_pool_indices, : self._shapes.context]

    def _window_pages(
        self,
        batch: ScheduleBatch,
        slots_bL: Int[np.ndarray, "b L"],
        first_b: Int[np.ndarray, " b"],
        ends_b: Int[np.ndarray, " b"],
    ) -> Windows | None:
        """Take the pages that a launch needs in layers with a window; None if these have no pool of their own."""
        if self._windows is None:
            return None
        page, own = self._windows.page_size, [req.cache_protected_len for req in batch.reqs]
        return self._windows.take(Rows(slots_bL[:, ::page] // page, first_b, ends_b), np.array(own, np.int32))

    def _sampling(self, table_rows_B: Int[np.ndarray, " B"]) -> SamplingColumns:
        asked = () if self._likeliest[table_rows_B].any() else None
        return jax.tree.map(lambda column: column[table_rows_B], self._table)._replace(likeliest=asked)


OWN_MODELS: Mapping[str, Any] = Shipped("tpu_grpo.engine", {"Gemma3ForCausalLM": "gemma3"})
"""Architectures of which sglang-jax has no model -> the module that has it, and `settings` for it."""


def _read_settings(config: Any) -> Scaling | None:
    """Add to sglang-jax's ModelConfig what transformers 4 does not read; return the scaling of all layers, if any."""
    checkpoint = abstract_checkpoint(Path(config.model_path))
    family, sizes = checkpoint.family, checkpoint.config
    read = {"rope_theta": sizes.rope_theta, "rope_scaling": None, "head_dim": sizes.head_dim}
    if sizes.experts[1]:
        read |= dict(zip(("num_experts", "num_experts_per_tok"), sizes.experts, strict=True))
    if family.architecture in OWN_MODELS:
        config.hf_config = config.hf_text_config
        read |= OWN_MODELS[family.architecture].settings(sizes)
    read |= family.sampler_fields(sizes)
    config.hf_config.update(read | {"architectures": [family.sampler or family.architecture]})
    config.head_dim = config.v_head_dim = read["head_dim"]
    config.num_key_value_heads = read.get("num_key_value_heads", config.num_key_value_heads)
    return None if "layer_types" in read else sizes.scaling  # then the model scales its kinds of layers itself


def _quantize_layers(model: nnx.Module) -> None:
    """Replace the linear layers of an abstract model by sglang-jax's with int8 weights [outputs, inputs] and a scale
    for each output; activations stay as they are.

    Raises:
        ConfigError: for a model with experts.
    """
    modules = [node for _, node in nnx.iter_modules(model)]
    if any(isinstance(node, Experts) for node in modules):
        raise ConfigError(
            "rollout.weights_dtype=int8 needs a model without experts, got one with experts; use rollout.weights_dtype="
            "auto"
        )
    for node in modules:
        for name, value in list(vars(node).items()):
            if isinstance(value, LinearBase):
                setattr(node, name, QuantizedLinear.from_linear(value, jnp.int8, is_static_input=True))


class Runner(ModelRunner):
    """sglang-jax's ModelRunner with our own step around its model and cache."""

    attention: AttentionMode
    weights: list[Array] | None = None
    layers: list[RadixAttention]
    """The attention of each layer, which says how many heads it caches, and how wide."""
    cache_specs: list[jax.ShapeDtypeStruct]
    token_to_kv_pool: MHATokenToKVPool
    windows: WindowPages | None
    """The pages of layers with a window; None if these keep all tokens."""

    def __init__(self, options: EngineOptions, **library_arguments: Any):
        """Build the runner; ``library_arguments`` are those of ModelRunner's constructor."""
        self.options = options  # set first: the library's constructor calls the methods below
        self._scaling = _read_settings(library_arguments["model_config"])
        super().__init__(**library_arguments)
        self.programs = Programs(self)

    # --- what the library's constructor calls ----------------------------------------------------------------------

    @override
    def load_model(self) -> None:
        """Build the model without allocating its parameters, which arrive by ``install_weights``."""
        config = self.model_config
        config.validate_tensor_parallel_config(self.tp_size)
        config.configure_for_tensor_parallel(self.tp_size)
        config.hf_config.ep_size, config.hf_config.moe_backend = 1, "epmoe"  # read by models with experts
        split = splits_vocabulary(config.vocab_size, self.tp_size)
        architectures: Any = config.hf_config.architectures  # the one that _read_settings has set
        if (architecture := architectures[0]) in OWN_MODELS:
            model_class: Any = getattr(OWN_MODELS[architecture], architecture)
        else:
            model_class, _ = get_model_architecture(config)
        model = repairs.abstract_model(
            model_class,
            config.hf_config,
            config.dtype,
            self.mesh,
            split_vocabulary=split,
        )
        repairs.rope_as_published(model, config.dtype, self._scaling)
        if self.options.weights_dtype == "int8":
            _quantize_layers(model)
        if not split:
            soft_cap = model.logits_processor.soft_cap
            model.logits_processor = WholeVocabularyLogits(config.vocab_size, self.mesh, soft_cap)
        self.model = None  # an attribute of ModelRunner; parameters are in self.weights alone
        self.dtype = config.dtype
        self.sliding_window_size = None
        self._splits_vocabulary = split
        attention = (each for _, each in nnx.iter_modules(model) if isinstance(each, RadixAttention))
        self.layers = sorted(attention, key=lambda each: each.layer_id)
        self.graph, self.abstract_state = nnx.split(model)

    @override
    def initialize_jit(self) -> None:
        """Compile nothing yet: each shape of a program is compiled when it first runs."""

    @override
    def init_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Describe the cache; ``install_weights`` allocates it."""
        self.windows = windows = WindowPages.of((each.sliding_window_size for each in self.layers), self.options)

        def describe(pool: MHATokenToKVPool, layer: RadixAttention) -> jax.ShapeDtypeStruct:
            pages = pool.size // pool.page_size
            if windows is not None and layer.sliding_window_size is not None:
                pages = windows.window_pages
            return self.attention.cache_layer(pool, layer, 1 + pages)  # page 0 is nobody's

        with repairs.cache_without_arrays(lambda pool: [describe(pool, layer) for layer in self.layers]):
            super().init_memory_pool(*args, **kwargs)
        self.cache_specs = self.token_to_kv_pool.kv_buffer

    @override
    def _init_kv_cache_dtype(self) -> None:
        """Choose the cache's type; the library knows no 8-bit types."""
        self.kv_cache_dtype = cache_dtype(self.options.kv_dtype, self.dtype)

    @override
    def init_routed_experts_capturer(self) -> None:
        """Do nothing: the step returns the experts."""

    @override
    def profile_max_num_token(self, total_device_memory: int) -> int:
        """Return the configured cache size. Free memory differs by host, and measuring it drops compiled programs."""
        size = self.server_args.max_total_tokens
        assert size is not None
        return size

    @override
    def get_available_device_memory(self) -> int:
        """Return 0, because memory is never measured; see ``profile_max_num_token``."""
        return 0

    @override
    def _get_attention_backend(self) -> Any:
        self.attention = ATTENTION[self.options.attention](self)
        return self.attention.backend(None)

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
        """Use these parameters from the next step on, and allocate an empty cache if there is none.

        Raises:
            WeightsError: if names are missing or unknown, or an array has another shape or type.
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
        self.weights, pool = [weights[name] for name in specs], self.token_to_kv_pool
        if pool.kv_buffer is self.cache_specs:
            pool.kv_buffer = [_empty(layer.shape, layer.dtype, layer.sharding)() for layer in self.cache_specs]

    def release(self) -> None:
        """Delete the cache and drop the references to the parameters, until ``install_weights``."""
        self.weights, pool = None, self.token_to_kv_pool
        for layer in pool.kv_buffer:
            layer.delete()
        pool.kv_buffer = self.cache_specs


@functools.cache
def _empty(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], Array]:
    """Make a function that allocates zeros; it is compiled at the first call."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
