"""The experts of a layer over several devices against every expert on every token in float64: values and gradients."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array

from tests.models.forward import trainer_mesh
from tests.models.random_checkpoint import GEMMA4_EXPERTS, write_random
from tpu_grpo.models import expert_parallel, tunix_repairs
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.expert_parallel import Copies, Weights, mixture, tiles_of
from tpu_grpo.models.tunix_model import load_model

TOKENS, EXPERTS, PER_TOKEN, WIDTH, HIDDEN = 16, 8, 2, 6, 5
RNG = np.random.default_rng(3)
EVEN = RNG.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :PER_TOKEN]
TO_ONE_DEVICE = np.tile([0, 1], (TOKENS, 1))
TO_TWO = np.where(RNG.random((TOKENS, 1)) < 0.9, [[7, 6]], [[3, 7]])
ROUTINGS = {"even": EVEN, "all to one device": TO_ONE_DEVICE, "nearly all to one expert": TO_TWO}


def exchanged(
    operand: Array, output: Array, begins: Array, sizes: Array, places: Array, arriving: Array, *, axis_name: str
) -> Array:
    """jax's ragged_all_to_all, which XLA lacks on CPUs, by gathering everything; NaN if sizes do not match."""
    device = lax.axis_index(axis_name)
    operands, begins_NN, sizes_NN, places_NN = (
        lax.all_gather(array, axis_name) for array in (operand, begins, sizes, places)
    )
    rows = jnp.arange(len(operand))
    for sender in range(len(operands)):
        size, place = sizes_NN[sender, device], places_NN[sender, device]
        to = jnp.where(rows < size, place + rows, len(output))
        sent = operands[sender][jnp.clip(begins_NN[sender, device] + rows, 0, len(operand) - 1)]
        output = output.at[to].set(sent, mode="drop")
    inside = (places_NN[:, device] + sizes_NN[:, device] <= len(output)) & (arriving == sizes_NN[:, device])
    return jnp.where(inside.all(), output, jnp.nan)


def drawn() -> tuple[np.ndarray, np.ndarray, Weights, np.ndarray]:
    """Tokens, the shares of their experts, the experts, and the gradients of the outputs."""
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, EXPERTS, WIDTH, HIDDEN))
    down: Any = rng.standard_normal((EXPERTS, HIDDEN, WIDTH))
    x, gradients = rng.standard_normal((2, TOKENS, WIDTH))
    return x, rng.random((TOKENS, PER_TOKEN)), Weights(gate, up, down), gradients


def every_expert_on_every_token(x: Array, shares: Array, weights: Weights, chosen: np.ndarray) -> Array:
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, weights.gate)) * jnp.einsum("td,edf->tef", x, weights.up)
    outputs = jnp.take_along_axis(jnp.einsum("tef,efd->ted", hidden, weights.down), chosen[:, :, None], axis=1)
    return jnp.einsum("tkd,tk->td", outputs, shares)


def with_gradients(function: Any, *given: Any) -> list[Array]:
    """Outputs, and the gradients for tokens, shares and weights."""
    *inputs, gradients = given
    outputs, pull = jax.vjp(function, *inputs)
    return jax.tree.leaves((outputs, pull(gradients)))


def over_devices(devices: int, chosen: np.ndarray, *given: Any) -> list[Array]:
    mesh, axis = Mesh(np.array(jax.devices()[:devices]), ("fsdp",)), "fsdp" if devices > 1 else None
    split: Any = P("fsdp")
    spread: Any = jax.shard_map(
        lambda x, shares, chosen, weights: mixture(x, shares, chosen, weights, axis),
        mesh=mesh,
        in_specs=(split, split, split, Weights(split, split, split)),
        out_specs=split,
        check_vma=False,
    )

    def call(*given: Any) -> list[Array]:
        return with_gradients(lambda x, shares, weights: spread(x, shares, chosen, weights), *given)

    with (
        mock.patch.object(lax, "ragged_all_to_all", exchanged),
        mock.patch.object(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)),  # must not be read
        pltpu.force_tpu_interpret_mode(),
    ):
        return jax.jit(call)(*jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), given))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of two tiles for the 8 copies of each of four devices, which send 32 altogether."""
    monkeypatch.setattr(expert_parallel, "TILE_ROWS", 8)


@pytest.mark.full
@pytest.mark.parametrize(
    ("routing", "devices"),
    [
        ("all to one device", 4),
        pytest.param("even", 1, marks=pytest.mark.slow),
        pytest.param("even", 4, marks=pytest.mark.slow),
        pytest.param("nearly all to one expert", 4, marks=pytest.mark.slow),
        pytest.param("all to one device", 2, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_are_those_of_every_expert_on_every_token(routing: str, devices: int) -> None:
    """No token is lost, also where a device gets four times the mean, in two rounds."""
    given, chosen = drawn(), ROUTINGS[routing]
    with jax.enable_x64(True):
        exact = with_gradients(
            lambda x, shares, weights: every_expert_on_every_token(x, shares, weights, chosen),
            *jax.tree.map(jnp.asarray, given),
        )
    for ours, true in zip(over_devices(devices, chosen, *given), exact, strict=True):
        np.testing.assert_allclose(ours, np.asarray(true), atol=1e-6 * np.abs(true).max(), rtol=0)


@pytest.mark.slow  # the layer over four devices is above
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
def test_tunixs_layer_on_a_mesh_gives_what_it_gives_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Experts split over two devices, and their widths over two others; on CPUs Tunix computes every expert.

    Compared are outputs and the gradients for tokens, router and experts.
    """
    experts: dict[str, Any] = GEMMA4_EXPERTS if family == "gemma4_text" else {}
    checkpoint, mesh = (
        read_checkpoint(write_random(family, tmp_path / "model", layers=1, **experts)),
        trainer_mesh(2, 2),
    )
    model: Any = load_model(checkpoint, mesh, dtype=jnp.float32, remat="none")
    rng = np.random.default_rng(0)
    x, gradients = jnp.asarray(rng.standard_normal((2, 2, 4, checkpoint.config.hidden_size)), jnp.float32)

    def loss(layer: Any, x: Array) -> tuple[Array, Array]:
        outputs = tunix_repairs._gemma4_experts(layer, 2 * x + 1, x) if experts else layer(x)
        return jnp.sum(outputs * gradients), outputs

    def computed() -> list[Array]:
        layer = model.layers[0].moe if experts else model.layers[0].mlp
        return jax.tree.leaves(nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(layer, x))

    with mesh:
        expected = computed()
        monkeypatch.setattr(tunix_repairs, "has_ragged_exchange", lambda mesh: True)
        with mock.patch.object(lax, "ragged_all_to_all", exchanged), pltpu.force_tpu_interpret_mode():
            found = computed()
    # loss and outputs; router and three matrices of experts, or router, two matrices and two scales; tokens
    assert len(found) == 2 + (5 if experts else 4) + 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=4e-6 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize(("counts", "rounds"), [([[4, 4], [4, 4]], 1), ([[8, 0], [8, 0]], 1), ([[8, 0], [9, 0]], 2)])
def test_as_many_rounds_as_the_fullest_device_needs(counts: list[list[int]], rounds: int) -> None:
    """Each of two devices sends 8 copies, so that their buffers have 16 rows."""
    copies = Copies("fsdp", 2, jnp.arange(8), jnp.asarray(counts)[..., None])
    assert (copies.buffer_rows, int(copies.rounds)) == (16, rounds)


@pytest.mark.parametrize(
    ("sides", "dtype", "tiles"),
    [
        ((16384, 2048, 768), jnp.bfloat16, (512, 1024, 768)),  # Qwen3-30B-A3B
        ((16384, 768, 2048), jnp.bfloat16, (512, 768, 1024)),
        ((16384, 2048, 768), jnp.float32, (512, 512, 384)),
        ((24, 6, 5), jnp.float32, (24, 6, 5)),
    ],
)
def test_tiles_divide_the_matrices(sides: tuple[int, int, int], dtype: Any, tiles: tuple[int, int, int]) -> None:
    assert tiles_of(dtype)(*sides) == (min(8, tiles[0]), *tiles[1:])  # rows by the small tiles of these tests
