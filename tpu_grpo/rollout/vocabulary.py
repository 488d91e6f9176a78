"""The embedding and the output head split over an engine's devices by vocabulary, and the sampler's part in it.

sglang-jax keeps both whole on every device: 2.3 GiB for Qwen3-8B. Split, XLA looks a token up where its row lies and
adds the parts ([T, D], like every layer's sum), and each device computes the logits of its own part of the vocabulary.
The sampler wants whole rows: see ``deal_rows``.

Suffixes: B rows, V vocabulary.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from tpu_grpo.errors import ConfigError

VOCABULARY_LEAVES = ("embed_tokens.embedding", "lm_head.embedding")
"""How the names of parameters end that are [V, D]."""


def splits_vocabulary(asked: bool | None, vocabulary: int, tensor: int) -> bool:
    """Whether ``tensor`` devices split a vocabulary; None is yes where it divides.

    Raises:
        ConfigError: if it was asked for and does not divide.
    """
    divides = vocabulary % tensor == 0
    if asked and not divides:
        fitting = [t for t in range(1, 257) if vocabulary % t == 0]
        raise ConfigError(
            f"meshes.sampler.shard_vocab=true needs meshes.sampler.tensor to divide the model's vocabulary of "
            f"{vocabulary}, got {tensor}; use one of {fitting}, or leave shard_vocab unset for a copy on every device"
        )
    return tensor > 1 and divides and asked is not False


def deal_rows(logits_BV: Float[Array, "B V"], mesh: Mesh, *, split: bool) -> Float[Array, "B V"]:
    """Logits split over ``mesh`` by rows, whatever they were before.

    Whole rows make every maximum, sum and sort of the sampler the one that a single device does, in the same order, so
    that splitting the vocabulary changes no token; and each device samples B / tensor rows. What moves is a device's
    share of the logits, once. They are pinned as they come first: else XLA would rather bring the whole output head to
    every device than the logits.
    """
    for spec in (P(None, "tensor") if split else P(), P("tensor", None)):
        logits_BV = jax.lax.with_sharding_constraint(logits_BV, NamedSharding(mesh, spec))
    return logits_BV
