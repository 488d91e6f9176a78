"""The forward pass over packed rows: the model without its output head, and the head over sampled tokens alone.

Suffixes: R rows, S tokens of a row, D width.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from tunix.rl import common

from tpu_grpo.learner.flat_products import with_flat_products
from tpu_grpo.learner.output_head import OutputHead, token_logprobs
from tpu_grpo.learner.routing import with_replay


class ModelRows(NamedTuple):
    """What the model is run on: arrays, or their descriptions; see rows.py."""

    token_ids: Any
    """int32 [R, S]."""
    segments: Any
    """int32 [R, S], 0 for padding."""
    positions: Any
    """int32 [R, S]."""
    mask: Any
    """bool [R, S], the tokens whose log-probabilities are wanted."""
    experts: Any = None
    """What is replayed of the engine's routing, None if nothing is; see routing.py."""
    kept: Any = None
    """How many of the likeliest tokens each was drawn among, int32 [R, S]; None for all."""


class TokenLogprobs(NamedTuple):
    """What the policy says of every token, float32; 0 for tokens that were not asked for."""

    logprobs_RS: Float[Array, "R S"]
    entropies_RS: Float[Array, "R S"]
    """Of the distribution that the token was drawn from, in nats."""


def run_model(model: nnx.Module, rows: ModelRows, *, temperature: float, mesh: Mesh | None) -> TokenLogprobs:
    """Run the model on rows, for the log-probability and entropy of every token in ``rows.mask``."""
    body, head = without_head(with_flat_products(with_replay(model, rows.experts), mesh))
    arguments = {
        "positions": rows.positions,
        "cache": None,
        "attention_mask": attention_mask(rows.segments),
    }
    if "segment_ids" in inspect.signature(type(body).__call__).parameters:
        arguments["segment_ids"] = rows.segments  # what flash attention looks at in place of the mask
    hidden_RSD, _ = body(rows.token_ids, **arguments)
    found = token_logprobs(
        hidden_RSD.astype(head.weight.dtype),
        head,
        _next(rows.token_ids),
        _next(rows.mask),
        temperature=temperature,
        mesh=mesh,
        kept_BT=None if rows.kept is None else _next(rows.kept),
    )
    return TokenLogprobs(*(jnp.pad(values_RS[:, :-1], ((0, 0), (1, 0))) for values_RS in found))


def logprobs(model: nnx.Module, rows: ModelRows, *, temperature: float, mesh: Mesh | None) -> Float[Array, "R S"]:
    """Run the model for the log-probability of every token in ``rows.mask``, without a gradient."""
    return _logprobs(*nnx.split(model), rows, temperature=temperature, mesh=mesh)


def lower_logprobs(model: nnx.Module, rows: ModelRows, *, temperature: float, mesh: Mesh | None) -> jax.stages.Lowered:
    """Lower the program of `logprobs`."""
    program: Any = _logprobs
    return program.lower(*nnx.split(model), rows, temperature=temperature, mesh=mesh)


@functools.partial(jax.jit, static_argnames=("temperature", "mesh"))
def _logprobs(definition: Any, state: Any, rows: ModelRows, **settings: Any) -> Float[Array, "R S"]:
    return run_model(nnx.merge(definition, state), rows, **settings).logprobs_RS


def attention_mask(segments_RS: Int[Array, "R S"]) -> Bool[Array, "R S S"]:
    """Whether token i of a row sees token j: j is not after i, and of the same segment."""
    tokens = segments_RS.shape[1]
    causal_SS = jnp.tri(tokens, dtype=jnp.bool_)
    return causal_SS & (segments_RS[:, :, None] == segments_RS[:, None, :])


def without_head(model: Any) -> tuple[Any, OutputHead]:
    """Split a model of Tunix into one that returns the states after its last norm, and its output head.

    The model itself stays as it is, and shares its arrays. All of its models have an ``embedder``, which is also the
    head where the model has no ``lm_head``; Gemma's logits then pass a soft cap.
    """
    body: Any = nnx.merge(*nnx.split(model))
    soft_cap = getattr(body, "final_logits_softcap", None)
    if soft_cap is not None:
        body.final_logits_softcap = None
    if hasattr(body, "lm_head"):
        head = OutputHead(body.lm_head.w.get_value(), vocab_first=False, soft_cap=soft_cap)
        body.lm_head = _Unchanged()
    else:
        head = OutputHead(body.embedder.input_embedding.get_value(), vocab_first=True, soft_cap=soft_cap)
        body.embedder = _EmbedderWithoutHead(body.embedder)
    return body, head


class _Unchanged(nnx.Module):
    """Stands in the place of a head."""

    def __call__(self, hidden_RSD: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        return hidden_RSD


class _EmbedderWithoutHead(nnx.Module):
    """Embeds tokens as before, and returns states where logits were asked for."""

    def __init__(self, embedder: Any):
        self.embedder = embedder

    def encode(self, token_ids: Int[Array, "R S"]) -> Float[Array, "R S D"]:
        return self.embedder.encode(token_ids)

    def decode(self, hidden_RSD: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        return hidden_RSD


def kl_divergence(
    logprobs_RS: Float[Array, "R S"], reference_RS: Float[Array, "R S"], estimator: str
) -> Float[Array, "R S"]:
    """Estimate KL(policy || reference) at every token (http://joschu.net/blog/kl-approx.html)."""
    return common.compute_kl_divergence(logprobs_RS, reference_RS, estimator)


def _next(values_RS: Array) -> Array:
    """Move every value to the place of the token before it, whose state predicts it; the last place gets none."""
    return jnp.pad(values_RS[:, 1:], ((0, 0), (0, 1)))
