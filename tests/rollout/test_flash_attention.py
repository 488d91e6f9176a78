"""The flash kernel's numbers, interpreted on a CPU: those of the library's native attention and of the trainer."""

from pathlib import Path

import pytest

from tests.models.random_checkpoint import write_random_qwen3
from tests.rollout.building import build_engine, disagreement, policy, requests, tokens
from tests.rollout.interpreter import interpreted_kernels
from tpu_grpo.rollout import runner
from tpu_grpo.rollout.flash_attention import kernel_width
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


def test_padding_narrow_heads_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "kernel_width", lambda head_dim: head_dim)
    checkpoint = write_random_qwen3(tmp_path / "model", layers=1, head_dim=64)
    with interpreted_kernels():
        engine = build_engine(checkpoint, policy(checkpoint), attention="flash", page_size=16, **SIZES)
        with pytest.raises(ValueError, match="Expected head_dim=64 is equal to"):
            engine.generate(requests(PROMPTS, SamplingParams(2)))
