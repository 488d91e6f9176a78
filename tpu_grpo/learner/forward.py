"""What the learner takes from ``tunix.rl``: the forward pass over rows, and two formulas.

Suffixes: B rows, T completion tokens, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl import algo_core, common


def logprobs_and_logits(
    model: nnx.Module,
    prompt_ids: Int[Array, "B T_prompt"],
    completion_ids: Int[Array, "B T"],
    *,
    temperature: float,
    pad_id: int,
    eos_id: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T V"]]:
    """Run the model: the log-probability of every completion token, float32, and the logits it was taken from."""
    found = common.compute_per_token_logps(
        *nnx.split(model),
        **_rows(prompt_ids, completion_ids, temperature, pad_id, eos_id),
        stop_gradient=False,
        return_logits=True,
    )
    assert isinstance(found, tuple)  # because of return_logits
    logprobs_BT, logits_BTV = found
    return logprobs_BT.astype(jnp.float32), logits_BTV


def logprobs(
    model: nnx.Module, prompt_ids: Any, completion_ids: Any, *, temperature: float, pad_id: int, eos_id: int
) -> Float[Array, "B T"]:
    """Run the model for the log-probability of every completion token alone, without a gradient."""
    rows = _rows(prompt_ids, completion_ids, temperature, pad_id, eos_id)
    found = common.compute_per_token_logps(*nnx.split(model), **rows)
    assert isinstance(found, jax.Array)  # a tuple only with return_logits
    return found


def lower_logprobs(
    model: nnx.Module, prompt_ids: Any, completion_ids: Any, *, temperature: float, pad_id: int, eos_id: int
) -> jax.stages.Lowered:
    """Lower the program of `logprobs`, for arrays or their descriptions."""
    program: Any = common.compute_per_token_logps
    rows = _rows(prompt_ids, completion_ids, temperature, pad_id, eos_id)
    return program.lower(*nnx.split(model), **rows)


def kl_divergence(
    logprobs_BT: Float[Array, "B T"], reference_BT: Float[Array, "B T"], estimator: str
) -> Float[Array, "B T"]:
    """Estimate KL(policy || reference) at every token (http://joschu.net/blog/kl-approx.html)."""
    return common.compute_kl_divergence(logprobs_BT, reference_BT, estimator)


def entropy(logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Compute the entropy of every distribution, in nats; no gradient flows through it."""
    return algo_core.compute_entropy_from_logits(jax.lax.stop_gradient(logits_BTV))


def _rows(prompt_ids: Any, completion_ids: Any, temperature: float, pad_id: int, eos_id: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_ids,
        "completion_tokens": completion_ids,
        "pad_id": pad_id,
        "eos_id": eos_id,
        "temperature": temperature,
    }
