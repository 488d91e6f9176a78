"""Sharding of embedding and output head by vocabulary, and the resharding of logits that token sampling needs.

sglang-jax replicates both on every device, which takes 2.3 GiB for Qwen3-8B. We shard them over the devices of an
engine. XLA then looks up a token on the device that has its row, and adds the results with one all-reduce of [T, D], as
after every layer. Each device computes the logits of its own part of the vocabulary. Token sampling needs the whole
vocabulary of a row on one device: see ``shard_rows``.

Suffixes: B rows, V vocabulary.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from tpu_grpo.errors import ConfigError

VOCABULARY_LEAVES = ("embed_tokens.embedding", "lm_head.embedding")
"""The names of all parameters of shape [V, D] end in one of these."""


def splits_vocabulary(asked: bool | None, vocabulary: int, tensor: int) -> bool:
    """Decide whether ``tensor`` devices shard a vocabulary; with None they do where ``tensor`` divides it.

    Raises:
        ConfigError: if sharding was asked for and ``tensor`` does not divide the vocabulary.
    """
    divides = vocabulary % tensor == 0
    if asked and not divides:
        fitting = [t for t in range(1, 257) if vocabulary % t == 0]
        raise ConfigError(
            f"meshes.sampler.shard_vocab=true needs meshes.sampler.tensor to divide the model's vocabulary of "
            f"{vocabulary}, got {tensor}; use one of {fitting}, or leave shard_vocab unset for a copy on every device"
        )
    return tensor > 1 and divides and asked is not False


def shard_rows(logits_BV: Float[Array, "B V"], mesh: Mesh, *, split: bool) -> Float[Array, "B V"]:
    """Reshard logits over ``mesh`` by rows, with one all-to-all.

    With whole rows, every maximum and sum over the vocabulary is computed by one device in the same order as without
    sharding, so that sharding the vocabulary changes no token. Each device samples B / tensor rows.

    The logits are first constrained to the sharding in which they were computed. Without that constraint, XLA would
    all-gather the output head instead of exchanging the logits.
    """
    for spec in (P(None, "tensor") if split else P(), P("tensor", None)):
        logits_BV = jax.lax.with_sharding_constraint(logits_BV, NamedSharding(mesh, spec))
    return logits_BV
