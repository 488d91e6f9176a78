"""Sharding of embedding and output head by vocabulary, and token sampling over logits that are sharded that way.

sglang-jax shards the embedding over the devices of an engine, and we shard the output head, too. A token is looked up
on the device that has its row, and the results are added with one all-reduce of [T, D], as after every layer. Each
device computes the logits of its own part of the vocabulary. Token sampling needs the whole vocabulary of a row on one
device: see ``sample_rows``.

Suffixes: B rows, V vocabulary, D width.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from sgl_jax.srt.layers.embeddings import Embed
from sgl_jax.srt.layers.logits_processor import LogitsProcessor

from tpu_grpo.engine.sampling import Drawn, SamplingColumns, sample_tokens
from tpu_grpo.records.errors import ConfigError

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


class WholeVocabularyLogits(LogitsProcessor):
    """The library's LogitsProcessor for an output head that every device holds whole."""

    def _get_logits(self, hidden_states: Float[Array, "B D"], lm_head: Embed) -> Float[Array, "B V"]:
        """Compute the logits of all rows on every device."""
        head_VD = lm_head.embedding.get_value()
        states_BD, head_VD = lm_head.promote_dtype((hidden_states, head_VD), dtype=lm_head.dtype)
        logits_BV = jnp.dot(states_BD, head_VD.T, out_sharding=NamedSharding(self.mesh, P("data", None)))
        return jnp.tanh(logits_BV / self.soft_cap) * self.soft_cap if self.soft_cap else logits_BV


def sample_rows(
    logits_BV: Float[Array, "B V"], columns: SamplingColumns, mesh: Mesh, *, filtered: bool = False
) -> Drawn:
    """Draw one token per row: each device of ``mesh`` draws for B / tensor rows. Returns what ``sample_tokens`` does.

    Logits that are sharded by vocabulary are exchanged with one all-to-all. With whole rows, every maximum and sum over
    the vocabulary is computed by one device in the same order as without sharding, so that sharding the vocabulary
    changes no token.
    """
    rows, by_rows = len(logits_BV), P("tensor")
    padding = -rows % mesh.shape["tensor"]
    logits_BV, columns = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding), *(((0, 0),) * (x.ndim - 1)))), (logits_BV, columns)
    )
    by_device = jax.tree.map(lambda x: jax.sharding.reshard(x, by_rows), (logits_BV, columns))
    draw = functools.partial(sample_tokens, filtered=filtered)
    drawn = jax.shard_map(draw, in_specs=by_rows, out_specs=by_rows, check_vma=False)(*by_device)
    return jax.tree.map(lambda column: column[:rows], jax.sharding.reshard(drawn, P()))
