"""Routing replay: the trainer's tokens pass the experts that the engine chose for them.

Rounding differs between engine and trainer, and where two experts are about equally likely, it decides which one a
token passes. The trainer would then compute another function of the parameters than the one that was sampled from. R3
("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370) takes the
engine's choice I and the trainer's router logits s:

    weight of expert e = I_e exp(s_e) / sum over j of I_j exp(s_j)

which is the softmax over all experts at the chosen ones, divided by its sum there, as these models define it. Gradients
reach the router through the weights. The same comes of logits that are minus infinity outside of I, so the router is
all that changes: Tunix's layer takes the largest k of them.

Arrays: R packed rows, S tokens of a row, L layers, k experts per token, LK = L * k (layer by layer), E experts.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from tpu_grpo.learner.packing import Packing
from tpu_grpo.learner.sequences import TrainSequence
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import routing_dtype


class Replayed(nnx.Variable[Any]):
    """The experts of every token in one layer, integers [R, k, S]. A variable, so that recomputation passes it on."""


class ReplayingRouter(nnx.Module):
    """A router whose choice was made before; tokens without one are routed as ever."""

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
    """Return a model in which the routers of all layers replay; without experts, the model itself.

    The model stays as it is, and shares its arrays.
    """
    if experts_RLKS is None:
        return model
    copy: Any = nnx.merge(*nnx.split(model))
    layers = list(copy.layers)
    for layer, experts_RkS in zip(layers, jnp.split(experts_RLKS, len(layers), axis=1), strict=True):
        layer.mlp.router = ReplayingRouter(layer.mlp.router, experts_RkS)
    return copy


class ReplayShape:
    """The sizes of what is replayed in a model."""

    def __init__(self, model: Any):
        settings = model.config
        self.layers, self.per_token = settings.num_layers, settings.num_experts_per_tok
        self.dtype = routing_dtype(settings.num_experts)

    def empty(self, rows: int, tokens: int) -> Integer[np.ndarray, "{rows} LK {tokens}"]:
        """Make rows in which no token has experts; tokens come last, because a TPU pads the last two dimensions."""
        return np.full((rows, self.layers * self.per_token, tokens), np.iinfo(self.dtype).max, self.dtype)

    def fill(
        self, table_RLKS: Integer[np.ndarray, "R LK S"], sequences: Sequence[TrainSequence], packing: Packing
    ) -> None:
        """Write the experts of sequences into a table from `empty`, where the sequences are packed.

        The last token of a sequence has no experts: the engine sampled it, and only ran it if more came behind it.

        Raises:
            DataError: for a sequence without experts, or with those of another number of tokens; names the row.
        """
        for one, row, start in zip(sequences, packing.rows, packing.starts, strict=True):
            expected = (len(one) - 1, self.layers, self.per_token)
            found = None if one.experts is None else one.experts.shape
            beyond = found[0] - expected[0] if found is not None and found[1:] == expected[1:] else -1
            if one.experts is None or not 0 <= beyond <= one.experts_beyond:
                raise DataError(
                    f"with algorithm.routing_replay every computed token needs its experts: row {one.row} must have "
                    f"{list(expected)} (tokens, layers, experts per token), got {found and list(found)}; let the "
                    "engine return them"
                )
            table_RLKS[row, :, start : start + expected[0]] = one.experts[: expected[0]].reshape(expected[0], -1).T
