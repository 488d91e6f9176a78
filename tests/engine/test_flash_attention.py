"""The flash kernel's numbers, interpreted on a CPU: those of gather attention and of the trainer."""

import contextlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.building import assert_alike, build_engine, disagreement, policy, requests
from tests.engine.interpreter import attend_last, interpreted_kernels
from tests.models.random_checkpoint import write_random
from tpu_grpo.engine.flash_attention import PAGES, FlashAttention, check_pages, choose_blocks
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import SamplingParams

PROMPTS = [tuple(range(5, 15)), tuple(range(20, 57))]
SIZES = {"max_running_requests": 4, "prefill_tokens": 64}
GEMMA: dict[str, Any] = {"model_type": "gemma2", "head_dim": 64}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "head_dim": 64, "layers": 2}
FP8 = {"kv_dtype": "fp8"}
BF16, E4M3 = jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "cached"),
    [
        ({"head_dim": 64}, {"page_size": 16}, [0, 0, 0, 32]),  # padded; only whole pages are shared
        ({"head_dim": 128}, {"page_size": 16}, [0, 0, 0, 32]),
        ({"head_dim": 128}, {"page_size": 1}, [0, 9, 0, 36]),
        ({"head_dim": 64}, {"page_size": 1, "tensor": 2}, [0, 9, 0, 36]),
        ({"head_dim": 128}, {"page_size": 16, "tensor": 2}, [0, 0, 0, 32]),
        (GEMMA | {"sliding_window": 13}, {"page_size": 16}, None),  # shorter than a block
        (GEMMA | {"sliding_window": 20}, {"page_size": 4}, None),
        (GEMMA | {"sliding_window": 1}, {"page_size": 16}, None),
        (GEMMA | {"sliding_window": 13, "kv_heads": 1}, {"page_size": 16, "tensor": 2}, None),  # a repeated head
        (GEMMA3 | {"sliding_window": 13, "kv_heads": 1}, {"page_size": 16}, None),
        ({"head_dim": 64, "heads": 4, "kv_heads": 2}, {"page_size": 16} | FP8, None),
        ({"head_dim": 128, "heads": 6, "kv_heads": 3}, {"page_size": 1} | FP8, None),  # the last word is half empty
        ({"head_dim": 128, "heads": 8, "kv_heads": 4}, {"page_size": 16, "tensor": 2} | FP8, None),
        ({"head_dim": 128, "heads": 4, "kv_heads": 2}, {"page_size": 16, "tensor": 2} | FP8, None),  # a head a device
    ],
    ids=str,
)
def test_flash_samples_what_gather_does(
    tmp_path: Path, model: dict[str, Any], options: dict[str, Any], cached: list[int] | None
) -> None:
    """The second of each group continues after a prefix that it finds in the cache.

    Gemma has windows and soft caps, and its prompt is prefilled in two chunks.
    """
    windowed, eight_bits = "sliding_window" in model, options.get("kv_dtype") == "fp8"
    settings: dict[str, Any] = {"model_type": "qwen3", "layers": 1} | model
    checkpoint = write_random(directory=tmp_path / "model", **settings)
    prompts, new = ([tuple(range(100, 142))], 3) if windowed else (PROMPTS, 5)
    sizes = {"max_running_requests": 2, "prefill_tokens": 32} if windowed else SIZES
    trained, asked = policy(checkpoint), requests(prompts, SamplingParams(new, ignore_stop=True), group=2)
    other: dict[str, Any] = FP8 if eight_bits else {}
    expected = build_engine(checkpoint, trained, **other, **sizes).generate(asked)
    with interpreted_kernels():
        engine = build_engine(checkpoint, trained, attention="flash", **options, **sizes)
        completions = engine.generate(asked)
    assert any(completion.cached_tokens for completion in completions)
    assert cached is None or [completion.cached_tokens for completion in completions] == cached
    assert_alike(completions, expected, atol=1e-4)
    assert not eight_bits or engine.cache_specs[0].dtype == E4M3
    assert eight_bits or disagreement(trained, asked, completions) <= 1e-4  # measured 1e-6


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
    with contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_pages(rows=rows, context_tokens=context, page_size=page)


def test_the_limit_is_the_librarys() -> None:
    """It lowers the rows that run at once to this, silently."""
    for page in PAGES:
        rows = FlashAttention.get_max_running_reqests(4096, page)
        check_pages(rows=rows, context_tokens=4096, page_size=page)
        with pytest.raises(ConfigError, match="scalar memory"):
            check_pages(rows=rows + 1, context_tokens=4096, page_size=page)


def test_an_engine_checks_its_pages(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="rollout.page_size must be at most 512"):
        build_engine(checkpoint, attention="flash", page_size=1024)


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
        out, _ = attend_last(jnp.asarray(q, dtype), jnp.asarray(k[-1:]), jnp.asarray(v[-1:]), jnp.asarray(cache))
        return float(np.sqrt(np.mean((np.asarray(out, float) - exact) ** 2)))

    rounding = float(np.sqrt(np.mean((np.asarray(jnp.asarray(exact, jnp.bfloat16), float) - exact) ** 2)))
    assert error(jnp.dtype("bfloat16")) > 1.5 * rounding  # measured 2.6 to 4.6 times
    assert error(jnp.dtype("float32")) < 1e-5


@pytest.mark.parametrize(
    ("kind", "kv_heads", "page", "context", "dtype", "decode", "prefill"),
    [
        ("TPU v5 lite", 2, 64, 4096, BF16, (1, 2048, 1, 512), (32, 512, 32, 256)),
        ("TPU v5 lite", 2, 64, 700, BF16, (1, 1024, 1, 512), (32, 512, 32, 256)),  # no longer than a row
        ("TPU v5 lite", 8, 64, 4096, BF16, (1, 2048, 1, 512), (32, 512, 32, 256)),  # 3,640 keys would fit 32 MiB
        ("TPU v5e", 8, 64, 4096, E4M3, (1, 2048, 1, 512), (32, 512, 32, 256)),  # 2,048 keys of 20 rows of 128 bytes
        ("TPU v4", 8, 64, 2048, BF16, (1, 256, 1, 256), (32, 256, 32, 256)),  # 455 keys would fit 4 MiB
        ("TPU v6e", 1, 512, 4096, BF16, (1, 2048, 1, 512), (32, 512, 32, 512)),  # a part holds a page
        ("TPU v6e", 1, 16, 4096, BF16, (1, 1024, 1, 512), (32, 512, 32, 256)),  # 64 pages
        ("TPU7x", 1, 64, 1024, BF16, (1, 1024, 1, 512), (32, 512, 32, 256)),
        ("TPU7x", 8, 64, 2048, BF16, (1, 1536, 1, 512), (32, 512, 32, 256)),  # 1,820 keys would fit 16 MiB
        ("TPU v5p", 2, 24, 2048, BF16, (1, 1008, 1, 504), (32, 480, 32, 240)),  # whole pages
    ],
)
def test_blocks_fit_the_chip_and_the_row(
    kind: str, kv_heads: int, page: int, context: int, dtype: Any, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    found = choose_blocks(kind, kv_heads=kv_heads, head_dim=128, page_size=page, context_tokens=context, dtype=dtype)
    assert (found.decode, found.prefill) == (decode, prefill)


def test_devices_without_blocks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs a TPU out of \['TPU v4', .* got TPU v3; use gather on others"):
        choose_blocks("TPU v3", kv_heads=1, head_dim=128, page_size=1, context_tokens=64, dtype=jnp.dtype("float32"))
