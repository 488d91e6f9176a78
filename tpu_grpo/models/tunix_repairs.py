"""Repairs Tunix's models where they would compute something other than the checkpoint says.

``apply()`` replaces functions of Tunix by wrappers, for the whole process. Loading a model calls it; importing this
module changes nothing. A wrapper's ``__wrapped__`` is the original function of Tunix. The repairs were reviewed for
google-tunix 0.1.7:

**Rotary positions.** In ``tunix.models.qwen3.model`` and ``tunix.models.llama3.model``, ``Attention.block`` calls
``apply_rope`` without ``rope_theta``. Every model then rotates with the default 1e6, whatever its ``ModelConfig`` says,
and scaled positions are not supported. A checkpoint with another base (5e6 in the 2507 releases of Qwen3-4B, 5e5 in
Llama 3) would silently be another model in training than in sampling. The repair wraps both functions. While a module's
``block`` runs or is traced, ``apply_rope`` takes ``rope_theta`` and, where it is set, ``rope_scaling`` from that
module's ``config``. Models with different bases can therefore share a process, and calls from elsewhere keep the
default. ``Qwen2`` passes its ``rope_theta``, so its repair only adds the scaling, in ``_generate_pos_embeddings``.

**Logits in float32.** ``Llama3`` returns logits in the dtype of the parameters. Tunix's other models return float32, as
the log-probabilities need. The repair casts the logits of ``Llama3``.

**Experts on TPUs.** ``MoELayer`` computes on as many rows as could arrive on a device in the worst case, and in tiles
of 128. It also gathers over an axis ``tp`` of one device, and libtpu 0.0.42.1 aborts when it compiles this gather. The
repair keeps the layer's router and shardings, and replaces the rest by tpu_grpo/models/expert_parallel.py.

**Attention in blocks.** Without flash attention, Tunix computes and keeps the scores of all pairs of tokens, and all
models' scores are in the dtype of the parameters. For rows of at least two blocks of QUERIES tokens, calls without a
cache use `_attend`, which leaves out the keys after a block of queries. An update of a small model with rows of 515
tokens takes 0.64 of the time on two cores.

**Flash attention.** Tunix has none for ``Llama3``, ``Gemma`` and ``Gemma3``. In the others, it computes all
earlier blocks of a packed row, even those of other sequences. Where a config sets ``use_flash_attention``, the
repair makes all these models use `trainer_attention.flash_attention`, in calls without a cache and with more than one
token.

**Gemma's windows.** ``_create_sliding_mask`` compares the keys' indices in the row with the queries' positions. Rows of
prompts are padded on the left, and positions do not count padding. With P tokens of padding, a query's window therefore
begins P tokens too early, and a window of at most P tokens ends before the query itself.

**Gemma's settings.** Tunix always uses a rotary base of 10,000 and an epsilon of 1e-6 in norms, and multiplies scores
by ``head_dim ** -0.5``. Checkpoints may differ: the 27B model divides scores by sqrt(144), although its
heads have a width of 128.

**Gemma in bfloat16.** Tunix computes norms, scores, soft caps, softmax and logits in the dtype of the parameters.
In bfloat16, scores up to 50 are then rounded to steps of 0.25. The published model computes norms and
softmax in float32. The sampler computes all of them in float32.

One repair covers Gemma's three problems: it replaces attention, norms and the output head. Calls with a cache, which
only Tunix's own sampler makes, keep Tunix's attention.

**Gemma 3.** It has the same problems, except those of windows and rotary bases, and the same repair. In addition,
``Gemma3`` always has five layers with a window before one without, whatever ``layer_types`` say, and its embedding is
its head. The repair gives its layers the kinds in ``attention_types`` of its config, and a head of its own if
``use_tied_embedding`` is false.

**Gemma 4.** Its router sees what the experts' own norm has changed, not the layer's hidden state (3.9 nats at most,
0.27 in the mean, in two random layers). On TPUs it picks experts with ``approx_max_k``, which finds 95% of the
likeliest. Values are normalized in the dtype of the computation, with an epsilon of 1e-6, as all norms are. Windows
count indices in the row. Its rematerialization passes an argument that flax 0.12 does not have. It multiplies the
experts of all devices on every device. The repair replaces attention, norms, layers with experts and their router, and
moves the soft cap of logits to where ``Gemma`` has it. The inputs with which qwix creates adapters get one token.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import pxla
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tpu_grpo.models.families.rope import Scaling, inverse_timescales
from tpu_grpo.models.families.trainer_attention import block_of, flash_attention
from tpu_grpo.records.errors import ConfigError

TUNIX_VERSION = "0.1.7"
"""The version of google-tunix that this package was reviewed for."""

_config: ContextVar[Any] = ContextVar("config", default=None)
"""The config of the Tunix module (attention, Qwen2, a Gemma) that runs or is traced here; None outside."""


def require_reviewed_tunix() -> None:
    """Raise ConfigError if another version of google-tunix than the reviewed one is installed."""
    if (installed := metadata.version("google-tunix")) != TUNIX_VERSION:
        raise ConfigError(
            f"google-tunix must be {TUNIX_VERSION}, got {installed}; install google-tunix=={TUNIX_VERSION}, or review "
            f"the repairs in models/tunix_repairs.py and tunix_loop/loop_repairs.py for {installed} and raise "
            f"TUNIX_VERSION in {__name__}"
        )


def apply() -> None:
    """Repair Tunix in this process; a second call does nothing. Raises the error of `require_reviewed_tunix`."""
    require_reviewed_tunix()
    _repair_models()


@functools.cache
def _repair_models() -> None:
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4, moe
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3

    for module in (qwen2, qwen3, llama3):
        wrap(module.Attention, "block", functools.partial(_attention_block, module))
    for module in (qwen3, llama3):
        wrap(module, "apply_rope", _current_positions)
        wrap(module.Attention, "block", _with_config_in_context)
    wrap(qwen3.MoELayer, "__call__", _experts_in_fitting_buffers)
    wrap(llama3.Llama3, "__call__", _float32_logits)
    wrap(qwen2, "_generate_pos_embeddings", _scaled_sines)
    wrap(qwen2.Qwen2, "__call__", _with_config_in_context)
    for module, model, offset in (
        (gemma, gemma.Gemma, 1.0),
        (gemma3, gemma3.Gemma3, 1.0),
        (gemma4, gemma4.Gemma4, 0.0),
    ):
        wrap(model, "__call__", _with_config_in_context)
        wrap(module.Attention, "block", functools.partial(_published_attention, module))
        wrap(module.RMSNorm, "__call__", functools.partial(_published_norm, offset))
        wrap(module.Embedder, "decode", _float32_head)
    wrap(gemma3.Gemma3, "__init__", functools.partial(_published_layers, gemma3))
    wrap(gemma3.Gemma3, "__call__", _with_own_head)
    gemma4.nnx = SimpleNamespace(**vars(nnx) | {"remat": _remat})  # pyrefly: ignore[bad-assignment]
    wrap(gemma4.Gemma4, "__init__", _with_soft_cap_outside)
    wrap(gemma4.Gemma4, "__call__", _soft_capped)
    wrap(gemma4.Gemma4, "get_model_input", _one_token)
    wrap(gemma4.DecoderLayer, "block", _published_layer)
    wrap(moe.MoERagged, "__init__", _with_router)


def wrap(holder: Any, name: str, repair: Callable[..., Any]) -> None:
    """Replace a function of a module or class by ``repair``, which also gets the original, as its first argument."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        return repair(original, *args, **kwargs)

    setattr(holder, name, repaired)


def _current_positions(
    original: Any, inputs: Any, positions: Any, head_dim: int, rope_theta: float | None = None
) -> Any:
    config = _config.get()
    if rope_theta is not None:
        return original(inputs, positions, head_dim, rope_theta)
    if config is None:
        return original(inputs, positions, head_dim)
    if (scaling := getattr(config, "rope_scaling", None)) is None:
        return original(inputs, positions, head_dim, config.rope_theta)
    return _rotate(inputs, *_sines(positions[..., None], head_dim, config.rope_theta, scaling))


def _scaled_sines(original: Any, positions: Any, features: int, rope_theta: float) -> tuple[Any, Any]:
    if (scaling := getattr(_config.get(), "rope_scaling", None)) is None:
        return original(positions, features, rope_theta)
    return _sines(positions, features, rope_theta, scaling)


def _sines(positions: Any, head_dim: int, rope_theta: float, scaling: Scaling | None) -> tuple[Any, Any]:
    """Return sines and cosines [..., H/2] of the rotary angles of positions [...], times the scaling's amplitude."""
    angles = positions[..., None] * jnp.asarray(inverse_timescales(head_dim, rope_theta, scaling), jnp.float32)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return amplitude * jnp.sin(angles), amplitude * jnp.cos(angles)


def _rotate(inputs: Any, sin: Any, cos: Any) -> Any:
    """Turn dimensions i and i + H/2 of heads [B, L, N, H] by angles, whose sines and cosines are [B, L, 1, H/2]."""
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(inputs.dtype)


def _with_config_in_context(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    token = _config.set(self.config)
    try:
        return original(self, *args, **kwargs)
    finally:
        _config.reset(token)


def _float32_logits(original: Any, *args: Any, **kwargs: Any) -> Any:
    logits, cache = original(*args, **kwargs)
    return logits.astype(jnp.float32), cache


def has_ragged_exchange(mesh: Mesh) -> bool:
    """Whether XLA has the ragged all-to-all for expert parallelism. CPUs lack it; there Tunix computes every expert."""
    return not mesh.empty and mesh.devices.flat[0].platform != "cpu"


def _experts_in_fitting_buffers(original: Any, self: Any, x: Any, use_megablox: bool = True) -> Any:
    mesh = pxla.thread_resources.env.physical_mesh
    if not use_megablox or not has_ragged_exchange(mesh):
        return original(self, x, use_megablox)
    scores = self.router(x).astype(jnp.float32)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), self.experts_per_tok)
    shares = (shares / jnp.sum(shares, axis=-1, keepdims=True)).astype(self.dtype)
    weights = [w.value.astype(self.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj)]
    return _spread(self.shd_config, mesh, x, shares, chosen, weights, jax.nn.silu)


def _spread(
    axes: Any, mesh: Mesh, x: Any, shares: Any, chosen: Any, weights: Any, activation: Any
) -> Float[Array, "B T D"]:
    """Run `expert_parallel.mixture` on rows and experts that are spread over ``mesh``.

    Args:
        axes: Tunix's mesh axes of activations [B, T, D], and of experts' down projections [E, F, D].
        mesh: the trainer's mesh.
        x: the inputs [B, T, D].
        shares: the router's weights of the chosen experts [B, T, k].
        chosen: the numbers of these experts [B, T, k].
        weights: gate and up projections [E, D, F], and down projections [E, F, D].
        activation: the function of the gate's outputs.
    """
    from tpu_grpo.models.expert_parallel import Weights, mixture  # only needed here

    spec, to_width = PartitionSpec(*axes.act_btd), PartitionSpec(*axes.exp_weight_efd)
    tp, fsdp = (axis if axis and mesh.shape[axis] > 1 else None for axis in (spec[-1], to_width[0]))
    of_routing, to_hidden = PartitionSpec(*spec[:-1], None), PartitionSpec(to_width[0], None, to_width[1])

    def mixed(x: Any, shares: Any, chosen: Any, weights: Any) -> Any:
        if tp is not None:
            x = jax.lax.all_gather(x, tp, tiled=True, axis=2)
        rows, length, width = x.shape
        x, shares, chosen = (array.reshape(rows * length, -1) for array in (x, shares, chosen))
        out: Any = mixture(x, shares, chosen, weights, fsdp, activation)
        out = out.reshape(rows, length, width)
        return out if tp is None else jax.lax.psum_scatter(out, tp, scatter_dimension=2, tiled=True)

    of_weights: Any = (to_hidden, to_hidden, to_width)
    given = (spec, of_routing, of_routing, Weights(*of_weights))
    spread = jax.shard_map(mixed, mesh=mesh, in_specs=given, out_specs=spec, check_vma=False)
    return spread(x, shares, chosen, Weights(*weights))


def _attention_block(module: Any, original: Any, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(self, x, *args, **kwargs).arguments
    takes_flash = _takes_flash(self.config, x)
    if given["cache"] is not None or not (takes_flash or x.shape[1] >= 2 * QUERIES):
        return original(self, x, *args, **kwargs)
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if module.__name__ == "tunix.models.qwen2.model":
        biases = (each.astype(self.config.dtype) for each in (self.q_bias, self.k_bias, self.v_bias))
        q, k, v = (heads + bias.reshape(heads.shape[2:]) for heads, bias in zip((q, k, v), biases, strict=True))
        rotate, sequences = module.apply_rotary_embedding, given.get("segment_ids")
        q, k = (rotate(heads, given["sin"], given["cos"]) for heads in (q, k))
    else:
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        positions = given["segment_pos"]
        q, k = (module.apply_rope(heads, positions, head_dim=self.head_dim) for heads in (q, k))
        sequences = _starts(positions)
    q, k, v = (module.shard(heads, self.shd_config.act_btnh) for heads in (q, k, v))
    if takes_flash:
        mixed = _flash(q, k, v, sequences, self.shd_config, self.config, scale=self.scale)
    else:
        mixed = _attend(q, k, v, given["attn_mask"], self.scale)
    return None, module.shard(self.o_proj(mixed), self.shd_config.act_btd)


def _takes_flash(config: Any, x: Any) -> bool:
    """Whether flash attention computes ``x``; not for rows of a single token, with which qwix creates adapters."""
    return block_of(config) is not None and x.shape[1] > 1


def _starts(positions_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the index at which each token's sequence begins; the sequences of a packed row follow each other."""
    return jnp.arange(positions_BT.shape[1]) - positions_BT


def _flash(q: Any, k: Any, v: Any, sequences: Any, shardings: Any, config: Any, **settings: Any) -> Any:
    where = {"mesh": pxla.thread_resources.env.physical_mesh, "axes": shardings.act_btnh}
    return flash_attention(q, k, v, sequences, block=config.flash_attention_block_size, **where, **settings)


QUERIES, MOST_BLOCKS = 128, 8
"""The fewest queries in a block of attention, and the most blocks of a row, because every block adds to what XLA
compiles."""


# --- Gemma -----------------------------------------------------------------------------------------------------------
# B rows, T tokens, S the same tokens as keys, N query heads, K key-value heads, G = N / K, H head width


def _published_attention(
    gemma: Any,
    original: Any,
    self: Any,
    x: Any,
    segment_pos: Any,
    cache: Any,
    attn_mask: Any,
    *shared: Any,
    **named: Any,
) -> Any:
    config = _config.get()
    if cache is not None or not hasattr(config, "query_pre_attn_scalar"):
        return original(self, x, segment_pos, cache, attn_mask, *shared, **named)
    shard = gemma.shard if hasattr(gemma, "shard") else gemma.sharding_utils.shard
    axes, is_gemma4 = getattr(self, "shd_config", config.shd_config), hasattr(self, "rope_proportion")
    if getattr(self, "use_qkv_einsum", False):
        projected = self.qkv_einsum(x)
    elif hasattr(self, "k_einsum"):
        projected = self.q_einsum(x), *(self.k_einsum(x),) * 2
    else:
        projected = self.q_einsum(x), *self.kv_einsum(x)
    q, k, v = (shard(heads, axes.act_btnh) for heads in projected)
    if hasattr(self, "_query_norm"):
        q, k = self._query_norm(q), self._key_norm(k)
    if is_gemma4:
        v = _divided_by_size(v)
    is_sliding = self.attn_type == gemma.AttentionType.LOCAL_SLIDING
    theta = getattr(self, "rope_base_frequency", config.rope_theta)
    sin, cos = _sines(segment_pos[..., None], self.head_dim, theta, None if is_sliding else config.rope_scaling)
    q, k = _rotate(q, sin, cos), _rotate(k, sin, cos)
    window = config.sliding_window_size if is_sliding else None
    scale, soft_cap = config.query_pre_attn_scalar**-0.5, getattr(self, "attn_logits_soft_cap", None)
    if _takes_flash(config, x):
        settings = {"scale": scale, "soft_cap": soft_cap, "window": window}
        mixed = _flash(q, k, v, _starts(segment_pos), axes, config, **settings)
    else:
        seen = attn_mask if window is None else attn_mask & in_window(segment_pos, window)
        mixed = _attend(q, k, v, seen, scale, soft_cap)
    attended = shard(self.attn_vec_einsum(mixed), axes.act_btd)
    return (None, attended, (k, v)) if is_gemma4 else (None, attended)


def in_window(positions_BT: Int[Array, "B T"], window: int) -> Bool[Array, "B T T"]:
    """Whether key S is less than ``window`` positions before query T; the causal mask excludes keys after the query."""
    return positions_BT[:, None, :] > positions_BT[:, :, None] - window


def _attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    seen_BTS: Bool[Array, "B T S"],
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Compute attention, with scores and softmax in float32. No token may see a later one.

    Long rows are computed in blocks of queries, each with the keys up to its last query, in 2 to MOST_BLOCKS blocks of
    at least QUERIES tokens. The backward pass computes a block's scores again.
    """
    length = q_BTNH.shape[1]
    count = min(MOST_BLOCKS, length // QUERIES)
    if count < 2:
        return _attend_block(q_BTNH, k_BSKH, v_BSKH, seen_BTS, scale, soft_cap)
    size, attend = -(-length // count), jax.checkpoint(_attend_block, static_argnums=(4, 5))
    blocks = []
    for start in range(0, length, size):
        own, seen = slice(start, start + size), slice(start + size)
        keys = k_BSKH[:, seen], v_BSKH[:, seen], seen_BTS[:, own, seen]
        blocks.append(attend(q_BTNH[:, own], *keys, scale, soft_cap))
    return jnp.concatenate(blocks, axis=1)


def _attend_block(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    seen_BTS: Bool[Array, "B T S"],
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    rows, length, _, width = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(rows, length, k_BSKH.shape[2], -1, width)
    scores = jnp.einsum("BTKGH,BSKH->BTKGS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    probs = jax.nn.softmax(jnp.where(seen_BTS[:, :, None, None], scores, -1e30), axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BTKGS,BSKH->BTKGH", probs, v_BSKH).reshape(q_BTNH.shape)


def _published_norm(offset: float, original: Any, self: Any, x: Any) -> Any:
    del original
    weight = offset + self.scale.value.astype(jnp.float32)
    return _divided_by_size(x, weight.reshape(*(1,) * (x.ndim - 1), -1))


def _divided_by_size(x: Float[Array, "*rows D"], weight: Any = 1.0) -> Float[Array, "*rows D"]:
    """Divide vectors by their root mean square, and multiply them by a weight, in float32."""
    epsilon, wide = getattr(_config.get(), "norm_eps", 1e-6), x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def _float32_head(original: Any, self: Any, x: Any) -> Any:
    if not getattr(_config.get(), "use_tied_embedding", True):
        return x  # to which `_with_own_head` applies the head
    return original(self, x).astype(jnp.float32)  # the caller then applies the soft cap


def _published_layers(gemma3: Any, original: Any, self: Any, config: Any, *, rngs: nnx.Rngs) -> None:
    kinds = getattr(config, "attention_types", gemma3.GEMMA3_ATTENTION_PATTERN)
    with mock.patch.object(gemma3, "GEMMA3_ATTENTION_PATTERN", kinds):
        original(self, config, rngs=rngs)
    if not getattr(config, "use_tied_embedding", True):
        shape, axes = (config.embed_dim, config.num_embed), config.shd_config.emb_vd[::-1]
        settings = {"rngs": rngs, "sharding": axes, "param_dtype": config.param_dtype}
        self.lm_head = gemma3.Einsum("BTD,DV->BTV", shape, **settings)


def _with_own_head(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    x, cache = original(self, *args, **kwargs)
    return (self.lm_head(x).astype(jnp.float32) if hasattr(self, "lm_head") else x), cache


def _remat(block: Callable[..., Any], *, graph_updates: bool) -> Callable[..., Any]:
    del graph_updates
    return nnx.remat(block)


def _with_soft_cap_outside(original: Any, self: Any, config: Any, *, rngs: nnx.Rngs) -> None:
    original(self, config, rngs=rngs)
    self.final_logits_softcap = getattr(config, "soft_cap", None)


def _soft_capped(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    logits, cache = original(self, *args, **kwargs)
    cap = self.final_logits_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap), cache


def _one_token(original: Any, self: Any) -> Any:
    return jax.tree.map(lambda each: each[..., :1], original(self))


class _Scores(nnx.Module):
    """Returns a router's scores; `with_replay` replaces it."""

    def __call__(self, scores: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        return scores


def _with_router(original: Any, self: Any, config: Any, *, rngs: nnx.Rngs) -> None:
    original(self, config, rngs=rngs)
    self.router = _Scores()


def _published_layer(original: Any, self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any, *more: Any) -> Any:
    if cache is not None or not self.config.enable_moe or not hasattr(self.config, "norm_eps"):
        return original(self, x, segment_pos, cache, attn_mask, *more)
    _, attended, kept = self.attn(self.pre_attention_norm(x), segment_pos, None, attn_mask)
    x = x + self.post_attention_norm(attended)
    dense = self.dense_post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))
    mixed = self.moe_post_ffw_norm(_gemma4_experts(self.moe, x, self.moe_pre_ffw_norm(x)))
    return None, (x + self.post_ffw_norm(dense + mixed)) * self.skip_scale[...], kept


def _gemma4_experts(self: Any, routed: Float[Array, "B T D"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Compute the experts of a layer on ``x``, chosen and weighted by ``routed``."""
    routed = _divided_by_size(routed) * self.features**-0.5 * self.router_scale[...].astype(x.dtype)[None, None]
    kernel = self.router_logits[...].astype(x.dtype)
    scores = self.router(jnp.einsum("BTD,DE->BTE", routed, kernel, preferred_element_type=jnp.float32))
    probs = jax.nn.softmax(scores, axis=-1)
    shares, chosen = jax.lax.top_k(probs, self.num_experts_per_datapoint)
    total, mesh = shares.sum(axis=-1, keepdims=True), pxla.thread_resources.env.physical_mesh
    if not has_ragged_exchange(mesh):
        return self._run_ffw_and_routing(x, chosen, probs / total).astype(x.dtype)
    shares = (shares / total * self.per_expert_scale[...].astype(jnp.float32)[chosen]).astype(x.dtype)
    gate, up = self.gating_einsum[...].astype(x.dtype).transpose(1, 0, 3, 2)
    weights = gate, up, self.linear[...].astype(x.dtype)
    return _spread(self.config.shd_config, mesh, x, shares, chosen, weights, jax.nn.gelu)
