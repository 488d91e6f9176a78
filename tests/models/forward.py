"""Running a loaded Tunix model on whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike


def trainer_mesh(fsdp: int, tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


def logprobs(model: nnx.Module, tokens_BT: ArrayLike) -> jax.Array:
    """Log-probabilities [B, T, V] of the next token, causal, positions from 0."""
    rows, length = jnp.shape(tokens_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    logits, _ = model(jnp.asarray(tokens_BT), positions_BT, None, mask_BTT)  # pyright: ignore[reportCallIssue]
    return jax.nn.log_softmax(logits)


def compiled_logprobs(model: nnx.Module, tokens_BT: ArrayLike) -> np.ndarray:
    """The same through a newly traced and compiled program."""
    return np.asarray(nnx.jit(lambda m, t: logprobs(m, t))(model, tokens_BT))
