"""Products over tokens without rows, and what XLA's CPU backend makes of those over both."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.qwen3 import model as qwen3

from tests.learner.toy import make_mesh
from tpu_grpo.learner.forward import with_flat_products


class Block(nnx.Module):
    """The kinds of products of Tunix's decoders; test_packed.py compares whole models."""

    def __init__(self) -> None:
        rngs, options = nnx.Rngs(0), {"dtype": jnp.float32, "param_dtype": jnp.float32}
        self.heads: Any = qwen3.Einsum("BTD,DNH->BTNH", (8, 2, 4), rngs=rngs, sharding=(None,) * 3, **options)
        self.out: Any = qwen3.Einsum("BTNH,NHD->BTD", (2, 4, 8), rngs=rngs, sharding=(None,) * 3, **options)
        self.linear = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.linear(jnp.tanh(self.out(jnp.tanh(self.heads(x_BTD)))))


def output_and_gradient(block: Block) -> tuple[jax.Array, Any]:
    definition, state = nnx.split(block)
    x_BTD = jax.random.normal(jax.random.key(0), (3, 7, 8))

    def loss(state: Any) -> tuple[jax.Array, jax.Array]:
        output = nnx.merge(definition, state)(x_BTD)
        return jnp.sin(output).sum(), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(state)
    return output, gradient


@pytest.mark.full
def test_flat_products_are_the_products() -> None:
    """Outputs and gradients are the same within rounding, and the model itself stays as it is."""
    block = Block()
    flat = with_flat_products(block, make_mesh(1))
    assert [type(m).__name__ for m in (flat.heads, flat.out, flat.linear)] == ["FlatEinsum", "FlatEinsum", "FlatLinear"]
    assert (type(block.heads), type(block.linear)) == (qwen3.Einsum, nnx.Linear)
    assert block.heads.einsum_str == "BTD,DNH->BTNH"
    expected, found = (jax.tree.leaves(output_and_gradient(model)) for model in (block, flat))
    for left, right in zip(expected, found, strict=True):
        assert jnp.abs(left).max() > 0.1
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


def test_products_that_do_not_begin_with_rows_and_tokens_stay() -> None:
    """Gemma's queries, keys and values are one product, and come before the rows: SBTNH."""
    module = gemma.Einsum("BTD,SNDH->SBTNH", (3, 2, 8, 4), rngs=nnx.Rngs(0), sharding=(None,) * 4)
    assert type(with_flat_products(module, make_mesh(1))) is gemma.Einsum


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_meshes_keep_the_model(platform: str) -> None:
    """Two CPUs, or one TPU."""
    devices = np.array([SimpleNamespace(platform=platform)] * (2 if platform == "cpu" else 1))
    model, mesh = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), SimpleNamespace(devices=devices)
    assert with_flat_products(model, mesh) is model  # pyrefly: ignore[bad-argument-type]  # of a mesh, its devices are read


@pytest.mark.parametrize(("shape", "copied"), [((4, 8), True), ((32,), False)], ids=["rows", "flat"])
def test_the_compiler_copies_only_for_sums_over_rows_and_tokens(shape: tuple[int, ...], copied: bool) -> None:
    """The reason for flat products: once the first case fails, they are no longer needed."""

    def loss(weight: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.exp(x @ weight) * y).sum()

    shapes = ((16, 24), (*shape, 16), (*shape, 24))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()
    assert compiled is not None
    assert (" copy(" in compiled or " transpose(" in compiled) == copied
