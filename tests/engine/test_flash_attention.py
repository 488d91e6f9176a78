"""The flash kernel's numbers, interpreted on a CPU: those of the library's native attention and of the trainer."""

import contextlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3 import ragged_paged_attention

from tests.engine.building import build_engine, disagreement, policy, requests, tokens
from tests.engine.interpreter import interpreted_kernels
from tests.models.random_checkpoint import write_random, write_random_qwen3
from tpu_grpo.engine.flash_attention import PAGES, FlashAttention, check_pages, choose_blocks
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import SamplingParams

PROMPTS = [tuple(range(5, 15)), tuple(range(20, 57))]
SIZES = {"max_running_requests": 4, "prefill_tokens": 64}


@pytest.mark.parametrize(
    ("head_dim", "page", "tensor", "cached"),
    [
        pytest.param(64, 16, 1, [0, 0, 0, 32], marks=pytest.mark.slow),  # padded; only whole pages are shared
        pytest.param(128, 16, 1, [0, 0, 0, 32], marks=pytest.mark.slow),
        pytest.param(128, 1, 1, [0, 9, 0, 36], marks=pytest.mark.slow),
        pytest.param(64, 1, 2, [0, 9, 0, 36], marks=pytest.mark.slow),
        pytest.param(128, 16, 2, [0, 0, 0, 32], marks=pytest.mark.slow),
    ],
)
def test_flash_samples_what_native_does(
    tmp_path: Path, head_dim: int, page: int, tensor: int, cached: list[int]
) -> None:
    """The second of each group continues after a prefix that it finds in the cache."""
    checkpoint = write_random_qwen3(tmp_path / "model", layers=1, head_dim=head_dim)
    model = policy(checkpoint)
    asked = requests(PROMPTS, SamplingParams(5, ignore_stop=True), group=2)
    native = tokens(build_engine(checkpoint, model, attention="native", **SIZES).generate(asked))
    with interpreted_kernels():
        engine = build_engine(checkpoint, model, tensor=tensor, attention="flash", page_size=page, **SIZES)
        completions = engine.generate(asked)
    assert [completion.cached_tokens for completion in completions] == cached
    assert tokens(completions) == native
    assert disagreement(model, asked, completions) <= 1e-4  # measured 1e-6


@pytest.mark.parametrize(
    ("window", "page", "tensor", "kv_heads"),
    [
        pytest.param(13, 16, 1, 2, marks=pytest.mark.slow),  # shorter than a block
        pytest.param(20, 4, 1, 2, marks=pytest.mark.slow),
        pytest.param(1, 16, 1, 2, marks=pytest.mark.slow),
        pytest.param(13, 16, 2, 1, marks=pytest.mark.slow),  # the key-value head is repeated
    ],
)
def test_flash_honours_windows_and_soft_caps(
    tmp_path: Path, window: int, page: int, tensor: int, kv_heads: int
) -> None:
    """The second of each group continues after a cached prefix, and the prompt is prefilled in two chunks."""
    checkpoint = write_random(
        "gemma2", tmp_path / "model", layers=1, head_dim=64, kv_heads=kv_heads, sliding_window=window
    )
    model, sizes = policy(checkpoint), {"max_running_requests": 2, "prefill_tokens": 32}
    asked = requests([tuple(range(100, 142))], SamplingParams(3, ignore_stop=True), group=2)
    gather = tokens(build_engine(checkpoint, model, **sizes).generate(asked))
    with interpreted_kernels():
        engine = build_engine(checkpoint, model, tensor=tensor, attention="flash", page_size=page, **sizes)
        completions = engine.generate(asked)
    assert any(completion.cached_tokens for completion in completions)
    assert tokens(completions) == gather
    assert disagreement(model, asked, completions) <= 1e-4


@pytest.mark.slow  # an engine of its own for a refusal
def test_native_attention_refuses_soft_caps(tmp_path: Path) -> None:
    checkpoint = write_random("gemma2", tmp_path / "model")
    with pytest.raises(ConfigError, match="native needs a model without attn_logit_softcapping, got 3; use gather"):
        build_engine(checkpoint, attention="native")
    checkpoint = write_random("gemma2", tmp_path / "other", attn_logit_softcapping=None)
    model, asked = policy(checkpoint), requests(PROMPTS)
    completions = build_engine(checkpoint, model, attention="native").generate(asked)
    assert disagreement(model, asked, completions) <= 1e-4  # windows it has


@pytest.mark.parametrize(
    ("rows", "context", "page", "said"),
    [
        (64, 2048, 1, None),  # 131,072 pages: all that fit
        (65, 2048, 1, "got 65 x 2048 .*; raise rollout.page_size to 2, or lower rollout.max_running_requests to 64"),
        (256, 4100, 8, "got 256 x 513 .*; raise rollout.page_size to 16, or lower .* to 255"),
        (131073, 512, 512, "got 131073 x 1 .*512 tokens.; lower rollout.max_running_requests to 131072"),
        (1, 64, 1024, "rollout.page_size must be at most 512 with rollout.attention=flash.*, got 1024; use 64 or 128"),
    ],
)
def test_pages_that_the_kernel_cannot_take_are_refused(rows: int, context: int, page: int, said: str | None) -> None:
    refused = contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said)
    with refused:
        check_pages(rows=rows, context_tokens=context, page_size=page)


def test_the_limit_is_the_librarys() -> None:
    """It lowers the rows that run at once to this, silently."""
    for page in PAGES:
        rows = FlashAttention.get_max_running_reqests(4096, page)
        check_pages(rows=rows, context_tokens=4096, page_size=page)
        with pytest.raises(ConfigError, match="scalar memory"):
            check_pages(rows=rows + 1, context_tokens=4096, page_size=page)


def test_an_engine_checks_its_pages(tmp_path: Path) -> None:
    checkpoint = write_random_qwen3(tmp_path / "model", layers=1)
    with pytest.raises(ConfigError, match="rollout.page_size must be at most 512"):
        build_engine(checkpoint, policy(checkpoint), attention="flash", page_size=1024)


@pytest.mark.slow  # tells when a repair can go
def test_queries_in_float32_are_still_needed() -> None:
    """With bfloat16 queries the kernel rounds its running maximum, sum and output at every block of keys."""
    length, page, heads = 96, 16, 2
    rng = np.random.default_rng(0)
    q, k, v = (
        np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16))
        for shape in ((1, heads, 128), (length, heads, 128), (length, heads, 128))
    )
    cache = np.zeros((1 + length // page, page, heads, 2, 128), k.dtype)  # the first page is nobody's
    cache[1:] = np.stack([k, v], axis=2).reshape(-1, page, heads, 2, 128)
    scores = np.einsum("qhd,khd->qhk", q.astype(float), k.astype(float))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("qhk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.astype(float))

    def error(dtype: jnp.dtype) -> float:
        lengths, pages = np.array([length], np.int32), np.arange(1, len(cache), dtype=np.int32)
        starts = np.array([0, length], np.int32)
        with interpreted_kernels():
            out, _ = ragged_paged_attention(
                *(jnp.asarray(q, dtype), jnp.asarray(k[-1:]), jnp.asarray(v[-1:]), jnp.asarray(cache)),
                *(lengths, pages, np.array([0, 1], np.int32), starts, np.ones(3, np.int32), None),
                d_block_sizes=(1, page, 1, page),
                m_block_sizes=(1, page, 1, page),
                vmem_limit_bytes=2**25,
            )
        return float(np.sqrt(np.mean((np.asarray(out, float) - exact) ** 2)))

    rounding = float(np.sqrt(np.mean((np.asarray(jnp.asarray(exact, jnp.bfloat16), float) - exact) ** 2)))
    assert error(jnp.dtype("bfloat16")) > 1.5 * rounding  # measured 2.6 to 4.6 times
    assert error(jnp.dtype("float32")) < 1e-5


@pytest.mark.parametrize(
    ("kind", "kv_heads", "page", "context", "decode", "prefill"),
    [
        ("TPU v5 lite", 2, 64, 2048, (1, 1024, 1, 256), (32, 512, 32, 256)),
        ("TPU v5 lite", 2, 64, 700, (1, 768, 1, 256), (32, 512, 32, 256)),  # no longer than a row
        ("TPU v5 lite", 8, 64, 2048, (1, 512, 1, 256), (32, 512, 32, 256)),  # 568 keys would fit 5 MiB
        ("TPU v4", 8, 64, 2048, (1, 256, 1, 256), (32, 256, 32, 256)),  # 455 keys would fit 4 MiB
        ("TPU v6e", 1, 512, 4096, (1, 1024, 1, 512), (32, 512, 32, 512)),  # a part holds a page
        ("TPU v5p", 2, 24, 2048, (1, 960, 1, 240), (32, 480, 32, 240)),  # whole pages
    ],
)
def test_blocks_fit_the_chip_and_the_row(
    kind: str, kv_heads: int, page: int, context: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    dtype = jnp.dtype("bfloat16")
    found = choose_blocks(kind, kv_heads=kv_heads, head_dim=128, page_size=page, context_tokens=context, dtype=dtype)
    assert (found.decode, found.prefill) == (decode, prefill)


def test_devices_without_blocks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs a TPU out of \['TPU v4', .* got TPU v3; use gather on others"):
        choose_blocks("TPU v3", kv_heads=1, head_dim=128, page_size=1, context_tokens=64, dtype=jnp.dtype("float32"))
