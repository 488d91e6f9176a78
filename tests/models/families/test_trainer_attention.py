"""The trainer's flash attention: when it is taken, its blocks, and its numbers, interpreted on a CPU, against dot's."""

from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl import common

from tests.learner.toy import interpreted_flash
from tests.models.forward import trainer_mesh
from tests.models.random_checkpoint import write_random
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.families.trainer_attention import block_for, flash_block, whole_blocks
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import ConfigError

PAD, ROWS, PROMPT, NEW, BLOCK = 0, 4, 136, 120, 128
Name = Literal["auto", "flash", "dot"]


@pytest.mark.parametrize(
    ("row", "block", "padded"),
    [
        (11, 128, 128),
        (128, 128, 128),
        (129, 256, 256),
        (384, 384, 384),
        (500, 512, 512),
        (1024, 1024, 1024),
        (1088, 384, 1152),
        (1664, 896, 1792),  # 13 * 128: 128 alone divides it
        (2048, 1024, 2048),
        (2304, 768, 2304),
    ],
)
def test_blocks_pad_rows_least(row: int, block: int, padded: int) -> None:
    assert block_for(row) == block
    assert whole_blocks(row, block) == padded
    assert whole_blocks(row, None) == row


@pytest.mark.parametrize(
    ("name", "family", "platform", "block"),
    [
        ("auto", "qwen3", "tpu", 1024),
        ("auto", "qwen3_moe", "tpu", 1024),
        ("flash", "qwen2", "tpu", 1024),
        ("auto", "llama", "tpu", None),
        ("auto", "qwen3", "cpu", None),
        ("dot", "qwen3", "tpu", None),
    ],
)
def test_flash_is_taken_where_it_runs(name: Name, family: str, platform: str, block: int | None) -> None:
    assert flash_block(name, FAMILIES[family], platform, 1024) == block


@pytest.mark.parametrize(
    ("family", "platform", "said"),
    [
        ("llama", "tpu", "needs a family that has it in Tunix, got llama; use dot or auto"),
        ("qwen3", "cpu", "needs a TPU, the trainer's devices are cpu; use dot .any device. or auto"),
    ],
)
def test_flash_is_refused_where_it_does_not(family: str, platform: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"model.attention=flash {said}"):
        flash_block("flash", FAMILIES[family], platform, 1024)


@pytest.mark.parametrize(
    ("family", "head_dim", "fsdp", "tp"),
    [
        pytest.param("qwen2", 64, 1, 1, marks=pytest.mark.slow),
        ("qwen3", 128, 2, 2),
        pytest.param("qwen3", 128, 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 128, 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 64, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_flash_gives_what_dot_does(tmp_path: Path, family: str, head_dim: int, fsdp: int, tp: int) -> None:
    """Log-probabilities and gradients of rows of two blocks, padded on both sides."""
    checkpoint = read_checkpoint(write_random(family, tmp_path / "model", layers=1, head_dim=head_dim))
    mesh, (prompts, completions) = trainer_mesh(fsdp, tp), _rows()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=completions.shape) * (completions != PAD), jnp.float32)

    def found(flash_block: int | None) -> tuple[np.ndarray, Any]:
        model = load_model(checkpoint, mesh, dtype=jnp.float32, remat="decoder", flash_block=flash_block)
        definition, state = nnx.split(model)

        def weighed(state: nnx.State) -> tuple[jax.Array, jax.Array]:
            arguments = {"pad_id": PAD, "eos_id": 1, "stop_gradient": False}
            logps = common.compute_per_token_logps(definition, state, prompts, completions, **arguments)
            assert isinstance(logps, jax.Array)
            return (logps * weights).sum(), logps

        with mesh:
            (_, logps), gradients = jax.jit(jax.value_and_grad(weighed, has_aux=True))(state)
        return np.asarray(logps)[completions != PAD], jax.tree.map(np.asarray, nnx.to_pure_dict(gradients))

    with interpreted_flash():
        flash_logps, flash_gradients = found(BLOCK)
    dot_logps, dot_gradients = found(None)
    np.testing.assert_allclose(flash_logps, dot_logps, rtol=0, atol=1e-4)
    for (path, flash), dot in zip(
        jax.tree.leaves_with_path(flash_gradients), jax.tree.leaves(dot_gradients), strict=True
    ):
        np.testing.assert_allclose(flash, dot, rtol=0, atol=1e-4 * np.abs(dot).max(), err_msg=str(path))
    assert not np.array_equal(flash_logps, dot_logps)  # two ways to sum: were they equal, flash did not run


def _rows() -> tuple[np.ndarray, np.ndarray]:
    """Prompts padded on the left, completions on the right, of many lengths."""
    rng = np.random.default_rng(0)
    prompts, completions = rng.integers(2, 300, (ROWS, PROMPT)), rng.integers(2, 300, (ROWS, NEW))
    for row, (before, after) in enumerate([(0, 0), (130, 100), (7, 119), (64, 1)]):
        prompts[row, :before] = PAD
        completions[row, NEW - after :] = PAD
    return prompts.astype(np.int32), completions.astype(np.int32)
