"""The flash kernel's numbers, interpreted on a CPU: those of the library's native attention and of the trainer."""

import contextlib
from pathlib import Path

import pytest

from tests.models.random_checkpoint import write_random_qwen3
from tests.rollout.building import build_engine, disagreement, policy, requests, tokens
from tests.rollout.interpreter import interpreted_kernels
from tpu_grpo.errors import ConfigError
from tpu_grpo.rollout import runner
from tpu_grpo.rollout.flash_attention import PAGES, FlashAttention, check_pages, kernel_width
from tpu_grpo.types import SamplingParams

PROMPTS = [tuple(range(5, 15)), tuple(range(20, 57))]
SIZES = {"max_running_requests": 4, "prefill_tokens": 64}


@pytest.mark.parametrize(("width", "kernels"), [(16, 128), (64, 128), (80, 128), (128, 128), (160, 256)])
def test_the_kernels_heads_are_multiples_of_128(width: int, kernels: int) -> None:
    assert kernel_width(width) == kernels


@pytest.mark.parametrize(
    ("head_dim", "page", "tensor", "cached"),
    [
        (64, 16, 1, [0, 0, 0, 32]),  # padded; only whole pages are shared
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


def test_padding_narrow_heads_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "kernel_width", lambda head_dim: head_dim)
    checkpoint = write_random_qwen3(tmp_path / "model", layers=1, head_dim=64)
    with interpreted_kernels():
        engine = build_engine(checkpoint, policy(checkpoint), attention="flash", page_size=16, **SIZES)
        with pytest.raises(ValueError, match="Expected head_dim=64 is equal to"):
            engine.generate(requests(PROMPTS, SamplingParams(2)))
