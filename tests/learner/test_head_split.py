"""How the output head's work is divided: axes, chunks, and how many of them are needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.learner.output_head import chunk_tokens, chunks_needed, vocab_axes


@pytest.mark.parametrize(
    ("vocab", "fsdp", "tp", "axes"),
    [
        (12, 4, 1, ("fsdp",)),
        (12, 2, 2, ("tp", "fsdp")),
        (12, 1, 4, ("tp",)),
        (10, 2, 2, ("tp",)),
        (10, 1, 2, ("tp",)),
        (9, 3, 2, ("fsdp",)),
        (9, 2, 2, ()),
        (151936, 16, 1, ("fsdp",)),
    ],
)
def test_the_vocabulary_is_split_over_the_most_devices(vocab: int, fsdp: int, tp: int, axes: tuple[str, ...]) -> None:
    assert vocab_axes(vocab, jax.sharding.AbstractMesh((fsdp, tp), ("fsdp", "tp"))) == axes  # type: ignore[arg-type]


def test_chunks_end_with_the_group_that_wants_most() -> None:
    wanted = np.zeros((4, 7), bool)
    for row, tokens in enumerate((5, 0, 1, 7)):
        wanted[row, 7 - tokens :] = True
    for groups, chunk, needed in ((1, 3, 5), (1, 13, 1), (1, 12, 2), (2, 3, 3), (4, 3, 3), (4, 7, 1)):
        assert chunks_needed(jnp.asarray(wanted), groups, chunk) == needed
    assert chunks_needed(jnp.zeros((4, 7), bool), 2, 3) == 0


@pytest.mark.parametrize(
    ("tokens", "logits_per_token", "budget", "chunk"),
    [
        (1000, 512, 4 * 512 * 900, 512),  # of at most 896: two
        (1000, 512, 4 * 512 * 1000, 1000),
        (1000, 512, 4 * 512 * 999, 512),
        (28, 12, 4 * 12 * 3, 3),  # 10 chunks, the last of 1
        (28, 12, 4 * 12 * 27, 16),
        (28, 12, 4, 1),  # a token is the least
        (4096, 151936, 256 * 2**20, 416),  # 441 would fit, 432 are whole tiles: 10 chunks of 410, rounded up
    ],
)
def test_chunks_are_as_equal_as_fits(tokens: int, logits_per_token: int, budget: int, chunk: int) -> None:
    assert chunk_tokens(tokens, logits_per_token, budget) == chunk
