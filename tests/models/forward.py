"""Running a loaded Tunix model, or the reference, on whole sequences."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike

from tpu_grpo.models import reference


def trainer_mesh(fsdp: int, tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


def logprobs(model: nnx.Module, tokens_BT: ArrayLike) -> jax.Array:
    """Log-probabilities [B, T, V] of the next token, causal, positions from 0."""
    rows, length = jnp.shape(tokens_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    logits, _ = model(jnp.asarray(tokens_BT), positions_BT, None, mask_BTT)
    return jax.nn.log_softmax(logits)


def compiled_logprobs(model: nnx.Module, tokens_BT: ArrayLike) -> np.ndarray:
    """The same through a newly traced and compiled program."""
    return np.asarray(nnx.jit(lambda m, t: logprobs(m, t))(model, tokens_BT))


def reference_experts(directory: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """The indices [B, T, layers, k] of the experts that the reference's routers choose, likeliest first."""
    routed, seen = reference._routed, list[np.ndarray]()

    def recorded(*given: Any) -> np.ndarray:
        seen.append(routed(*given))
        return seen[-1]

    with mock.patch.object(reference, "_routed", recorded):
        reference.reference_logprobs(directory, tokens_BT)
    return np.stack(seen, axis=2)
