"""The gradient of an embedding's rows, by hand, and what devices exchange for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tpu_grpo.learner.embedding import embedded

VOCABULARY, WIDTH, ROWS, TOKENS = 6, 8, 4, 256
OF_TOKEN = np.array([700, 200, 60, 60, 4, 0])
"""How many of the 4 x 256 places each token has."""


def gradient(mesh: Mesh) -> tuple[jax.Array, str]:
    """Return the gradient of the matrix for gradients of 1 at all places, and the program that computes it."""
    split = lambda values, *axes: jax.device_put(values, NamedSharding(mesh, P(*axes)))  # noqa: E731
    tokens = np.random.default_rng(0).permutation(np.repeat(np.arange(VOCABULARY), OF_TOKEN)).reshape(ROWS, TOKENS)
    weight = jnp.ones((VOCABULARY, WIDTH), jnp.bfloat16)

    def backward(weight_VD: jax.Array, token_ids: jax.Array, gradient_RSD: jax.Array) -> jax.Array:
        return jax.vjp(lambda weight: embedded(mesh, weight, token_ids), weight_VD)[1](gradient_RSD)[0]

    ones = jnp.ones((ROWS, TOKENS, WIDTH), jnp.bfloat16)
    arguments = split(weight, "tp", "fsdp"), split(tokens, "fsdp"), split(ones, "fsdp")
    program = jax.jit(backward).lower(*arguments).compile()
    return program(*arguments), str(program.as_text())


@pytest.mark.parametrize(("fsdp", "tp"), [(1, 1), (2, 2)])
def test_a_row_gets_the_sum_over_all_places_of_its_token(fsdp: int, tp: int) -> None:
    mesh = Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))
    found, program = gradient(mesh)
    # In bfloat16 numbers up to 1,024 are multiples of 4: 700 is one of them, and 256 + 1 is 256.
    assert np.asarray(found, np.float32).tolist() == [[float(count)] * WIDTH for count in OF_TOKEN]
    assert found.dtype == jnp.bfloat16
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("tp", "fsdp")), 2)
    # A device holds its part of the width for all tokens, and never the whole gradients of all.
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"(?:bf16|f32)\[([\d,]+)\]", program)]
    assert max(sizes) == ROWS * TOKENS * WIDTH // fsdp
