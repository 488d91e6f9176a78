"""A KV cache of 8 bits: what it keeps of a number, and attention over it, against float64 and numpy's own types."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from sgl_jax.srt.managers.schedule_batch import global_config

from tests.engine.building import build_engine, disagreement, requests, tokens
from tests.engine.interpreter import attend_last
from tests.engine.test_gather_attention import plain_attention
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.engine.attention import FP8, KVDtype, bits_of, decode, encode
from tpu_grpo.engine.flash_attention import check_fp8
from tpu_grpo.engine.gather_attention import Scoring, decode_attention, write_cache
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import SamplingParams

E4M3 = ml_dtypes.float8_e4m3fn


def kept(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What a cache of this type says of keys or values [..., D], in float64."""
    if dtype == FP8:
        return np.clip(numbers, -448, 448).astype(E4M3).astype(np.float64)
    return numbers.astype(dtype).astype(np.float64)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["float32", "bfloat16"])
def test_fp8_is_numpys_own_and_saturates(model: str) -> None:
    sizes = 10.0 ** np.random.default_rng(0).uniform(-4, 4, (50, 64))
    numbers = np.asarray(jnp.asarray(sizes * np.where(np.arange(64) % 2, 1, -1), model))
    found = np.asarray(decode(encode(jnp.asarray(numbers), FP8)), np.float64)
    np.testing.assert_array_equal(found, kept(numbers.astype(np.float64), FP8))
    exact = numbers.astype(np.float64)
    normal = (np.abs(exact) >= 2**-6) & (np.abs(exact) <= 448)
    assert (np.abs(found - exact) <= np.abs(exact) / 16)[normal].all()
    assert (np.abs(found - exact) <= 2**-10)[np.abs(exact) < 2**-6].all()
    assert (np.abs(found) == 448)[np.abs(exact) > 448].all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_broken_stays_broken(broken: float) -> None:
    """A NaN is found in the log-probabilities, and ends the run; 448 would not be."""
    found = np.asarray(decode(encode(jnp.asarray([1.0, broken, 2.0], jnp.float32), FP8)))
    assert np.isnan(found[1])


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.dtype("bfloat16"), FP8], ids=str)
@pytest.mark.parametrize("page", [1, 4])
def test_gather_attends_to_what_is_kept(dtype: np.dtype, page: int) -> None:
    """Tokens are written page by page, and read against a plain softmax in float64 over what numpy keeps of them."""
    rng, heads, width, lengths = np.random.default_rng(page), 2, 8, np.array([1, 31, 40, 7], np.int32)
    per_row = -(-40 // page)
    pages = 1 + rng.permutation(len(lengths) * per_row).reshape(len(lengths), per_row).astype(np.int32)
    k, v = rng.normal(size=(2, len(lengths), 40, heads, width)).astype(np.float32)
    slots = (pages[:, :, None] * page + np.arange(page)).reshape(len(lengths), -1)[:, :40].astype(np.int32)
    cache = jnp.zeros((1 + pages.size, page, heads, 2, width), bits_of(dtype))
    flat = (slots.ravel(), k.reshape(-1, heads, width), v.reshape(-1, heads, width))
    cache = jax.jit(write_cache)(cache, *flat)
    q = rng.normal(size=(len(lengths), heads, 3, width)).astype(np.float32)
    scoring = Scoring(width**-0.5)
    out = np.asarray(jax.jit(partial(decode_attention, scoring=scoring))(q, cache, pages, lengths))
    for row, length in enumerate(lengths):
        cached = np.stack([kept(each[row, :length].astype(np.float64), dtype) for each in (k, v)], axis=2)
        np.testing.assert_allclose(out[row], plain_attention(q[row], cached, scoring), atol=3e-6)


def test_the_kernel_attends_to_what_is_kept() -> None:
    """A row of 96 tokens, the last of which is new: a softmax in float64 over what numpy keeps of keys and values."""
    rng, length, page, heads = np.random.default_rng(0), 96, 16, 2
    q, k, v = (
        rng.normal(size=shape).astype(np.float32) for shape in ((1, 4, 128), (length, heads, 128), (length, heads, 128))
    )
    packed = encode(jnp.stack([jnp.asarray(k), jnp.asarray(v)], axis=2), FP8).reshape(-1, page, 1, 4, 128)
    cache = jnp.concatenate([jnp.zeros_like(packed[:1]), packed]).at[-1, -1].set(0.0)
    new_k, new_v = (encode(jnp.asarray(each[-1:]), FP8) for each in (k, v))
    out, cache = attend_last(jnp.asarray(q), new_k, new_v, cache, sm_scale=128**-0.5)
    cached = np.stack([kept(each.astype(np.float64), FP8) for each in (k, v)], axis=2)
    expected = plain_attention(q.reshape(heads, 2, 128), cached, Scoring(128**-0.5))
    np.testing.assert_allclose(out.reshape(heads, 2, 128), expected, atol=3e-6)
    np.testing.assert_array_equal(cache[1:], packed)


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_qwen3(tmp_path_factory.mktemp("kv") / "model")


SMALL: dict[str, Any] = {"batch_paddings": (8,), "prefill_tokens": 64}


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("auto", "float32"), ("fp8", "uint8")])
def test_the_cache_has_this_type(checkpoint: Path, model: nnx.Module, kv_dtype: KVDtype, dtype: Any) -> None:
    """Gather keeps the bits of float8."""
    plain = build_engine(checkpoint, model, **SMALL)
    engine = build_engine(checkpoint, model, kv_dtype=kv_dtype, **SMALL)
    for layer in (*engine.cache_specs, *engine._runner.token_to_kv_pool.kv_buffer):
        assert (layer.shape, layer.dtype) == (plain.cache_specs[0].shape, jnp.dtype(dtype))
    assert engine.options.cache_tokens == plain.options.cache_tokens


@pytest.mark.slow
def test_tokens_do_not_depend_on_prefixes_pages_or_room(checkpoint: Path, model: nnx.Module) -> None:
    """With hardly any room requests are put back, and their prompts and tokens are computed again, in chunks of 16."""
    asked = requests(sampling=SamplingParams(16), group=4)  # which may stop, else room for all tokens is kept free
    endless: dict[str, Any] = {"kv_dtype": "fp8", "stop_token_ids": frozenset()}
    engine = build_engine(checkpoint, model, **SMALL, **endless)
    completions = engine.generate(asked)
    assert any(completion.cached_tokens for completion in completions)
    assert 1e-4 < disagreement(model, asked, completions) < 0.2
    small: dict[str, Any] = {"prefix_cache": False, "page_size": 4, "kv_tokens": 120, "prefill_tokens": 16}
    with mock.patch.object(global_config, "default_init_new_token_ratio", 0.01):
        other = build_engine(checkpoint, model, **(SMALL | small), **endless)
        assert tokens(other.generate(asked)) == tokens(completions)
    assert other.use.retracted > 0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "dtype", "device", "said"),
    [
        (1, "bfloat16", "TPU v5e", "needs two key-value heads on a device, .* got 1, .* as much memory as in bfloat16"),
        (1, "float32", "TPU v5e", None),  # half of it
        (2, "bfloat16", "TPU v6 lite", None),
        (3, "bfloat16", "TPU v5", None),  # 8 rows for 6
        (8, "bfloat16", "TPU v4", "needs a TPU from v5 on, got TPU v4"),
    ],
)
def test_the_kernel_takes_fp8_where_it_saves_memory(heads: int, dtype: str, device: str, said: str | None) -> None:
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_fp8(heads, jnp.dtype(dtype), device)
