"""Lengths that Tunix's kernel for experts takes, by hand: rows per token x tokens in tiles of 128."""

from pathlib import Path

import pytest

from tests.models.random_checkpoint import write_random
from tpu_grpo.models.checkpoint import Checkpoint, check_expert_tokens, read_checkpoint
from tpu_grpo.records.errors import ConfigError


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """8 experts, 3 for a token."""
    return read_checkpoint(write_random("qwen3_moe", tmp_path_factory.mktemp("experts") / "model"))


@pytest.mark.parametrize(
    ("fsdp", "tokens"),
    [
        (1, 128),  # 3 x 128
        (2, 64),  # min(3, 4) x 2 = 6 per token: 384 rows
        (4, 16),  # min(3, 2) x 4 = 8 per token: 128 rows
        (8, 16),  # min(3, 1) x 8 = 8
    ],
)
def test_lengths_of_whole_tiles_are_taken(experts: Checkpoint, fsdp: int, tokens: int) -> None:
    check_expert_tokens(experts, fsdp, tokens)


@pytest.mark.parametrize(
    ("fsdp", "tokens", "message"),
    [
        (1, 200, r"multiple of 128 .* \(3 rows per token in tiles of 128\), got 200; make it 128 or 256$"),
        (2, 100, r"multiple of 64 .* \(6 rows per token .* got 100; make it 64 or 128$"),
        (4, 10, r"multiple of 16 .* \(8 rows per token .* got 10; make it 16$"),
    ],
)
def test_other_lengths_are_refused_with_those_that_are_taken(
    experts: Checkpoint, fsdp: int, tokens: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_expert_tokens(experts, fsdp, tokens)


def test_a_model_without_experts_takes_any_length(tmp_path: Path) -> None:
    check_expert_tokens(read_checkpoint(write_random("qwen3", tmp_path)), 2, 17)
