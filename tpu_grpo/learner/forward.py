"""The forward pass over packed rows: the output head is applied to sampled tokens only.

Suffixes: R rows, S tokens of a row, D and F widths, L layers, E experts, k experts per token, LK = L * k (layer by
layer).
"""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer
from tunix.rl import common

from tpu_grpo.learner.embedding import add_gradients_in_float32, laid_out
from tpu_grpo.learner.output_head import OutputHead, likeliest_tokens, token_logprobs
from tpu_grpo.models.families.trainer_attention import block_of, sharing_prompts

PerToken = Float[Array, "R S"]
"""A number for each token of packed rows, float32."""


class ModelRows(NamedTuple):
    """The inputs of the model: arrays, or their descriptions; see rows.py."""

    token_ids: Any
    """int32 [R, S]."""
    segments: Any
    """int32 [R, S], 0 for padding."""
    positions: Any
    """int32 [R, S]."""
    mask: Any
    """bool [R, S], the tokens whose log-probabilities are wanted."""
    experts: Any = None
    """The experts that the engine chose, integers [R, LK, S]; None unless they are replayed, see `with_replay`."""
    kept: Any = None
    """How many of the likeliest tokens each token was drawn from, int32 [R, S]; None for the whole vocabulary."""
    shared: Any = None
    """Which prompt tokens other segments attend to, int32 [R, S], see rows.py; None if no prompt is shared."""


class TokenLogprobs(NamedTuple):
    """Log-probability and entropy of every token in float32; 0 outside of the mask."""

    logprobs_RS: PerToken
    entropies_RS: PerToken
    """The entropy of the distribution that the token was drawn from, in nats."""
    also_RSM: Any = None
    """The log-probabilities of further tokens in each token's place; None without such."""


def run_model(
    model: nnx.Module, rows: ModelRows, *, temperature: float, mesh: Mesh, also_RSM: Any = None
) -> TokenLogprobs:
    """Run the model on rows, and return log-probability and entropy of every token in ``rows.mask``, and the
    log-probabilities of the tokens ``also_RSM`` in its place, if there are any."""
    hidden_RSD, head, targets = _hidden(model, rows, mesh)
    found = token_logprobs(
        hidden_RSD,
        head,
        *targets,
        temperature=temperature,
        mesh=mesh,
        kept_BT=None if rows.kept is None else _next(rows.kept),
        also_BTM=None if also_RSM is None else _next(also_RSM),
    )
    logps_RS, entropies_RS, also = found
    return TokenLogprobs(_previous(logps_RS), _previous(entropies_RS), None if also is None else _previous(also))


@functools.partial(jax.jit, static_argnames=("count", "below", "temperature", "mesh"))
def likeliest(
    definition: Any, state: Any, rows: ModelRows, *, count: int, below: int, temperature: float, mesh: Mesh
) -> dict[str, Array]:
    """Run a model, split by ``nnx.split``. Return the log-probability of every token (``logprobs``), the ``count``
    likeliest tokens with ids less than ``below`` (``ids``), and theirs and the rest's (``top``); 0 where not wanted.
    With the count 0, only the first."""
    model = nnx.merge(definition, state)
    if not count:
        return {"logprobs": run_model(model, rows, temperature=temperature, mesh=mesh).logprobs_RS}
    hidden_RSD, head, targets = _hidden(model, rows, mesh)
    found = likeliest_tokens(hidden_RSD, head, *targets, count=count, below=below, temperature=temperature, mesh=mesh)
    return dict(zip(("logprobs", "ids", "top"), map(_previous, found), strict=True))


def _hidden(
    model: nnx.Module, rows: ModelRows, mesh: Mesh
) -> tuple[Float[Array, "R S D"], OutputHead, tuple[Any, Any]]:
    """Run the model on rows; return hidden states and head, and each place's target and whether it is wanted."""
    body, head = without_head(with_flat_products(with_replay(model, rows.experts), mesh))
    if head.weight.dtype != jnp.float32:  # in float32, what jax adds is right, and equal for one slice and for several
        add_gradients_in_float32(body.embedder.embedder if head.vocab_first else body.embedder, mesh)
        layout = ("tp", "fsdp") if head.vocab_first else ("fsdp", "tp")
        # The head's gradient comes in the same layout then, in the weight's type.
        head = dataclasses.replace(head, weight=laid_out(head.weight, mesh, *layout))
    seen_RSS = attention_mask(rows.segments, rows.shared)
    arguments = {"positions": rows.positions, "cache": None, "attention_mask": seen_RSS}
    if block_of(body) is not None and "segment_ids" in inspect.signature(type(body).__call__).parameters:
        # for flash_attention; Qwen2's dot attention would hide shared prompts from those that borrow them
        arguments["segment_ids"] = jnp.arange(rows.positions.shape[1]) - rows.positions
    with sharing_prompts(rows.segments, rows.shared):
        hidden_RSD, _ = body(rows.token_ids, **arguments)
    return hidden_RSD.astype(head.weight.dtype), head, (_next(rows.token_ids), _next(rows.mask))


@functools.partial(jax.jit, static_argnames=("temperature", "mesh", "field"))
def logprobs(
    definition: Any, state: Any, rows: ModelRows, *, temperature: float, mesh: Mesh, field: str = "logprobs_RS"
) -> PerToken:
    """Run a model, split by ``nnx.split``, and return one field of `TokenLogprobs`."""
    return getattr(run_model(nnx.merge(definition, state), rows, temperature=temperature, mesh=mesh), field)


def _next(values_RS: Array) -> Array:
    """Move every token's value one place to the left, to the hidden state that predicts the token; pad with 0."""
    return jnp.pad(values_RS[:, 1:], ((0, 0), (0, 1), *[(0, 0)] * (values_RS.ndim - 2)))


def _previous(values_RS: Array) -> Array:
    """Move the values of hidden states one place to the right, to the predicted tokens; pad with 0."""
    return jnp.pad(values_RS[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * (values_RS.ndim - 2)))


kl_divergence = common.compute_kl_divergence
"""Estimates KL(policy || reference) at every token, from the policy's and the reference's log-probabilities [R, S]
and the estimator's name (http://joschu.net/blog/kl-approx.html)."""


def attention_mask(segments_RS: Int[Array, "R S"], shared_RS: Int[Array, "R S"] | None = None) -> Bool[Array, "R S S"]:
    """Return whether token i of a row attends to token j: j is not after i, and in the same segment or in the prompt
    that i's segment shares, if ``shared_RS`` (see rows.py) says that prompts are shared."""
    tokens = segments_RS.shape[1]
    causal_SS = jnp.tri(tokens, dtype=jnp.bool_)
    seen_RSS = segments_RS[:, :, None] == segments_RS[:, None, :]
    if shared_RS is not None:
        seen_RSS |= (shared_RS[:, :, None] < 0) & (shared_RS[:, :, None] == -shared_RS[:, None, :])
    return causal_SS & seen_RSS


def vocabulary(model: nnx.Module) -> int:
    """Return the number of tokens for which the model's output head has a row."""
    head = without_head(model)[1]
    return head.weight.shape[0 if head.vocab_first else 1]


# --- the model that is run --------------------------------------------------------------------------------------------


def without_head(model: Any) -> tuple[Any, OutputHead]:
    """Split a model of Tunix into a model that returns the hidden states after the last norm, and the output head.

    The given model is unchanged, and shares its arrays with the results. In a model without an ``lm_head``, the
    embedding is also the head. The head includes the soft cap of Gemma's logits.
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
    """Replaces an output head, and returns its input."""

    def __call__(self, hidden_RSD: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        return hidden_RSD


class _EmbedderWithoutHead(nnx.Module):
    """Embeds tokens as before, but returns hidden states instead of logits."""

    def __init__(self, embedder: Any):
        self.embedder = embedder

    def encode(self, token_ids: Int[Array, "R S"]) -> Float[Array, "R S D"]:
        return self.embedder.encode(token_ids)

    def decode(self, hidden_RSD: Float[Array, "R S D"]) -> Float[Array, "R S D"]:
        return hidden_RSD


class Replayed(nnx.Variable[Any]):
    """The experts of every token in one layer, integers [R, k, S]; an nnx variable, so that rematerialization keeps
    them."""


class ReplayingRouter(nnx.Module):
    """A router that replays given choices of experts; it chooses experts itself for tokens without a given choice."""

    def __init__(self, router: Any, experts_RkS: Integer[Array, "R k S"]):
        self.router = router
        self.experts = Replayed(experts_RkS)

    def __call__(self, x_RSD: Float[Array, "R S D"]) -> Float[Array, "R S E"]:
        """Compute the router's logits, minus infinity for every expert that was not chosen."""
        scores_RSE = self.router(x_RSD)
        experts_RkS1 = self.experts.get_value().astype(jnp.int32)[..., None]
        chosen_RSE = (experts_RkS1 == jnp.arange(scores_RSE.shape[-1])).any(axis=1)
        return jnp.where(chosen_RSE | ~chosen_RSE.any(axis=-1, keepdims=True), scores_RSE, -jnp.inf)


def with_replay(model: Any, experts_RLKS: Integer[Array, "R LK S"] | None) -> Any:
    """Return a model that routes tokens to the experts that the engine chose, or the given model if ``experts_RLKS`` is
    None.

    Engine and trainer round differently. Where two experts are about equally likely, rounding decides which of them
    gets a token, and the trainer's log-probabilities would not be those of the policy that the engine sampled from.
    R3 ("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370) uses the
    engine's choice I (1 for chosen experts, else 0) and the trainer's router logits s:

        weight of expert e = I_e exp(s_e) / sum over j of I_j exp(s_j)

    These are the models' own weights, a softmax over all experts that is normalized over the chosen ones. Through these
    weights gradients reach the router. Only the router is replaced. The new router returns minus infinity for experts
    outside of I, so that Tunix's layer, which takes the k largest logits, takes the chosen experts.

    The given model is unchanged, and shares its arrays.
    """
    if experts_RLKS is None:
        return model
    copy: Any = nnx.merge(*nnx.split(model))
    layers = list(copy.layers)
    for layer, experts_RkS in zip(layers, jnp.split(experts_RLKS, len(layers), axis=1), strict=True):
        mixture = getattr(layer, "moe", layer.mlp)  # Gemma 4 has an MLP beside its experts
        mixture.router = ReplayingRouter(mixture.router, experts_RkS)
    return copy


def with_flat_products(model: Any, mesh: Mesh) -> Any:
    """On a mesh of one CPU, return a model whose linear modules flatten rows and tokens into one axis; on other meshes,
    return the given model.

    The gradient of a weight sums over the rows and tokens of its inputs. XLA's CPU backend turns a sum over two
    dimensions into a matrix product with transposed copies of the inputs; a sum over one dimension needs no copy. The
    update of a small model then takes a tenth less time:

        [R, S, D]  ->  [R x S, D]  ->  the module, without a dimension for rows  ->  [R x S, F]  ->  [R, S, F]

    TPUs need no copies, and rows that are sharded over devices cannot be flattened. The given model is unchanged, and
    shares its arrays.
    """
    if mesh.devices.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return model
    copy: Any = nnx.merge(*nnx.split(model))
    modules: list[Any] = [module for _, module in nnx.iter_modules(copy)]
    for module in modules:
        equation = _without_rows(getattr(module, "einsum_str", ""))
        if equation:
            module.einsum_str = equation
        if equation or isinstance(module, nnx.Linear):
            object.__setattr__(module, "__class__", _flat(type(module)))
    return copy


def _without_rows(equation: str) -> str | None:
    """Turn BTD,DF->BTF of Tunix's ``Einsum`` into TD,DF->TF; None unless rows and tokens are the first two axes."""
    inputs, _, output = equation.partition("->")
    if not output or "." in equation or inputs[:2] != output[:2]:
        return None
    return f"{inputs[1:]}->{output[1:]}"


@functools.cache
def _flat(kind: Any) -> Any:
    """Derive a class from ``kind`` whose call flattens rows and tokens into one axis; all else is as in ``kind``."""

    def call(self: Any, inputs_RSD: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
        rows, tokens, *widths = inputs_RSD.shape
        found = kind.__call__(self, inputs_RSD.reshape(rows * tokens, *widths))
        return found.reshape(rows, tokens, *found.shape[1:])

    return type(f"Flat{kind.__name__}", (kind,), {"__call__": call})
