"""What the learner takes from ``tunix.rl``: the forward pass over rows, and two formulas.

Suffixes: B rows, T completion tokens, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from tunix.rl import algo_core, common

from tpu_grpo.learner.routing import split_replaying


class RowIds(NamedTuple):
    """What the model is run on: arrays, or their descriptions."""

    prompt_ids: Any
    """Int [B, T_prompt], padded on the left."""
    completion_ids: Any
    """Int [B, T], padded on the right."""
    experts: Any
    """What is replayed of the engine's routing, None if nothing is; see routing.py."""


def logprobs_and_logits(
    model: nnx.Module, rows: RowIds, *, temperature: float, pad_id: int, eos_id: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T V"]]:
    """Run the model: the log-probability of every completion token, float32, and the logits it was taken from."""
    found = common.compute_per_token_logps(
        *split_replaying(model, rows.experts),
        prompt_tokens=rows.prompt_ids,
        completion_tokens=rows.completion_ids,
        temperature=temperature,
        pad_id=pad_id,
        eos_id=eos_id,
        stop_gradient=False,
        return_logits=True,
    )
    assert isinstance(found, tuple)  # because of return_logits
    logprobs_BT, logits_BTV = found
    return logprobs_BT.astype(jnp.float32), logits_BTV


def logprobs(model: nnx.Module, rows: RowIds, *, temperature: float, pad_id: int, eos_id: int) -> Float[Array, "B T"]:
    """Run the model for the log-probability of every completion token alone, without a gradient."""
    return _logprobs(*nnx.split(model), rows, temperature=temperature, pad_id=pad_id, eos_id=eos_id)


def lower_logprobs(
    model: nnx.Module, rows: RowIds, *, temperature: float, pad_id: int, eos_id: int
) -> jax.stages.Lowered:
    """Lower the program of `logprobs`."""
    program: Any = _logprobs
    return program.lower(*nnx.split(model), rows, temperature=temperature, pad_id=pad_id, eos_id=eos_id)


@functools.partial(jax.jit, static_argnames=("temperature", "pad_id", "eos_id"))
def _logprobs(definition: Any, state: Any, rows: RowIds, **settings: Any) -> Float[Array, "B T"]:
    found = common.compute_per_token_logps(
        *split_replaying(nnx.merge(definition, state), rows.experts),
        prompt_tokens=rows.prompt_ids,
        completion_tokens=rows.completion_ids,
        **settings,
    )
    assert isinstance(found, jax.Array)  # a tuple only with return_logits
    return found


def kl_divergence(
    logprobs_BT: Float[Array, "B T"], reference_BT: Float[Array, "B T"], estimator: str
) -> Float[Array, "B T"]:
    """Estimate KL(policy || reference) at every token (http://joschu.net/blog/kl-approx.html)."""
    return common.compute_kl_divergence(logprobs_BT, reference_BT, estimator)


def entropy(logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Compute the entropy of every distribution, in nats; no gradient flows through it."""
    return algo_core.compute_entropy_from_logits(jax.lax.stop_gradient(logits_BTV))
