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
from tpu_grpo.models.families import trainer_attention
from tpu_grpo.models.families.trainer_attention import (
    block_for,
    flash_attention,
    flash_block,
    sharing_prompts,
    whole_blocks,
)
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


@pytest.mark.parametrize(("row", "block"), [(384, 384), (512, 512), (9216, 512), (1000, 512), (1100, 384)])
def test_wide_heads_have_smaller_blocks(row: int, block: int) -> None:
    assert block_for(row, 256) == block


@pytest.mark.parametrize(
    ("name", "platform", "block"),
    [("auto", "tpu", 1024), ("flash", "tpu", 1024), ("auto", "cpu", None), ("dot", "tpu", None)],
)
def test_flash_is_taken_on_tpus(name: Name, platform: str, block: int | None) -> None:
    assert flash_block(name, platform, 1024) == block


def test_flash_is_refused_elsewhere() -> None:
    said = "model.attention=flash needs a TPU, the trainer's devices are cpu; use dot .any device. or auto"
    with pytest.raises(ConfigError, match=said):
        flash_block("flash", "cpu", 1024)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "head_dim", "fsdp", "tp"),
    [
        pytest.param("qwen2", 64, 1, 1, marks=pytest.mark.slow),
        ("qwen3", 128, 2, 2),
        pytest.param("qwen3", 128, 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 128, 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 64, 4, 1, marks=pytest.mark.slow),
        pytest.param("llama", 64, 1, 2, marks=pytest.mark.slow),
        pytest.param("gemma2", 256, 2, 1, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 128, 1, 2, marks=pytest.mark.slow),
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


SEQUENCES = (0,) * 150 + (150,) * 130 + (280,) * 60 + tuple(range(340, 384))  # 3 blocks, the end is padding


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "width", "soft_cap", "window", "fused"),
    [
        pytest.param(1, 64, None, None, False, marks=pytest.mark.slow),
        pytest.param(1, 64, None, None, True, marks=pytest.mark.slow),
        pytest.param(2, 128, None, None, False, marks=pytest.mark.slow),
        (2, 128, None, None, True),
        (1, 256, 2.0, 70, False),
        pytest.param(1, 256, 2.0, 70, True, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_attend_within_their_sequences(
    tp: int, width: int, soft_cap: float | None, window: int | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_attention, "fuses_backward", lambda *_: fused)
    of, tokens = np.asarray(SEQUENCES), np.arange(len(SEQUENCES))
    apart = tokens[:, None] - tokens
    seen = (of[:, None] == of) & (apart >= 0) & (apart < (window or len(of)))
    where: dict[str, Any] = {"mesh": trainer_mesh(1, tp), "axes": ("fsdp", None, "tp", None), "block": BLOCK}
    settings: dict[str, Any] = {"scale": width**-0.5, "soft_cap": soft_cap}

    def mixed(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, jnp.asarray([SEQUENCES]), window=window, **where, **settings)

    assert_attends(mixed, seen, real=340, width=width, **settings)


SHARING = [  # tokens, positions, and how the prompt is shared, of each segment of a row of four blocks
    (150, 0, [1] * 119 + [0] * 31),
    (231, 119, [-1] * 231),  # from the third block on, the prompt lies before a window of 70
    (50, 0, [382] * 39 + [0] * 11),
    (39, 39, [-382] * 39),
    *[(1, 0, [0])] * 42,  # padding
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "soft_cap", "window", "fused"),
    [
        pytest.param(1, None, None, False, marks=pytest.mark.slow),
        (2, None, None, True),
        (1, 2.0, 70, False),
        pytest.param(1, None, 70, True, marks=pytest.mark.slow),
    ],
)
def test_sequences_attend_to_the_prompt_that_they_share(
    tp: int, soft_cap: float | None, window: int | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_attention, "fuses_backward", lambda *_: fused)
    counts, shared, real = [count for count, *_ in SHARING], np.concatenate([each for *_, each in SHARING]), 470
    positions = np.concatenate([first + np.arange(count) for count, first, _ in SHARING])
    segments, tokens = np.repeat(np.arange(1, len(counts) + 1), counts), np.arange(len(shared))
    segments[real:] = 0
    own = (segments[:, None] == segments) & (tokens[:, None] >= tokens) & (segments > 0) | np.eye(
        len(tokens), dtype=bool
    )
    borrowed = (shared[:, None] < 0) & (shared[:, None] == -shared)
    seen = (own | borrowed) & (positions[:, None] - positions < (window or len(tokens)))
    where: dict[str, Any] = {"mesh": trainer_mesh(1, tp), "axes": ("fsdp", None, "tp", None), "block": BLOCK}
    settings: dict[str, Any] = {"scale": 128**-0.5, "soft_cap": soft_cap}

    def mixed(q: Any, k: Any, v: Any) -> Any:
        with sharing_prompts(jnp.asarray([segments]), jnp.asarray([shared])):
            return flash_attention(q, k, v, jnp.asarray([tokens - positions]), window=window, **where, **settings)

    assert_attends(mixed, seen, real=real, width=128, **settings)


def assert_attends(
    mixed: Any, seen_TT: np.ndarray, *, real: int, width: int, scale: float, soft_cap: float | None
) -> None:
    """Values and gradients for queries, keys and values, against attention that was written down in float64."""
    draw, tokens = np.random.default_rng(0), len(seen_TT)
    q, k, v, weights = (draw.normal(size=(1, tokens, heads, width)) for heads in (4, 2, 2, 4))
    weights[:, real:] = 0.0

    def weighed(function: Any) -> Any:
        def of(*arrays: Any) -> Any:
            found = function(*arrays)
            return (found * weights).sum(), found

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True)

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bthw,bshw->bhts", q, jnp.repeat(k, 2, 2)) * scale
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        shares = jax.nn.softmax(jnp.where(seen_TT, scores, -jnp.inf))
        return jnp.einsum("bhts,bshw->bthw", shares, jnp.repeat(v, 2, 2))

    with interpreted_flash():
        (_, found), gradients = weighed(mixed)(*map(jnp.float32, (q, k, v)))
    with jax.enable_x64(True):
        (_, right), right_gradients = weighed(plain)(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(found[:, :real], right[:, :real], rtol=0, atol=2e-6)
    for gradient, wanted in zip(gradients, right_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.full
def test_blocks_of_other_sequences_are_not_computed() -> None:
    """A block of NaN in an earlier sequence would reach every query that multiplies its values by 0."""
    rows = np.zeros((1, 3 * BLOCK, 2, 128), np.float32)
    keys = rows.copy()
    keys[:, :BLOCK] = np.nan
    starts = jnp.asarray([[0] * BLOCK + [BLOCK] * 2 * BLOCK])
    where: dict[str, Any] = {"mesh": trainer_mesh(1, 1), "axes": ("fsdp", None, "tp", None), "block": BLOCK}

    def mixed(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, starts, scale=1.0, **where)

    with interpreted_flash():
        out, back = jax.vjp(mixed, rows, keys, keys)
        gradients = back(jnp.asarray(np.where(np.arange(3 * BLOCK)[:, None, None] < BLOCK, 0.0, 1.0) + rows))
    assert np.isnan(out[:, :BLOCK]).all()
    for array in (out, *gradients):
        assert np.isfinite(array[:, BLOCK:]).all()


def _rows() -> tuple[np.ndarray, np.ndarray]:
    """Prompts padded on the left, completions on the right, of many lengths."""
    rng = np.random.default_rng(0)
    prompts, completions = rng.integers(2, 300, (ROWS, PROMPT)), rng.integers(2, 300, (ROWS, NEW))
    for row, (before, after) in enumerate([(0, 0), (130, 100), (7, 119), (64, 1)]):
        prompts[row, :before] = PAD
        completions[row, NEW - after :] = PAD
    return prompts.astype(np.int32), completions.astype(np.int32)
