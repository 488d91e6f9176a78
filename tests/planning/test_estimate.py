"""Rooflines, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.planning.figures import RESIDENT, program, run_of
from tpu_grpo.launching.tpus import GENERATIONS, Chip
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.planning.estimate import COMPUTE, HOST_SECONDS, LINKS, MEMORY, StageCost, TokenCost, _decode
from tpu_grpo.planning.plan import PUBLISHED


def token_cost_of(name: str) -> TokenCost:
    run: Any = SimpleNamespace(checkpoint=abstract_checkpoint(PUBLISHED / name))
    return TokenCost.of(run)


def test_what_a_token_meets_in_a_dense_model() -> None:
    found = token_cost_of("Qwen3-0.6B")
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    assert found == TokenCost(28 * layer, 151936 * 1024, 4 * 28 * 16 * 128)
    assert found.forward(10, 6, 3) == 10 * (2 * 28 * layer + 6 * 4 * 28 * 16 * 128) + 3 * 2 * 151936 * 1024


def test_what_a_token_meets_among_experts() -> None:
    """About 3 of the 30 billion parameters, as the model's name says."""
    found = token_cost_of("Qwen3-30B-A3B")
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768
    assert found.layers == 48 * layer
    assert found.layers + found.head == pytest.approx(3.04e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_published_models_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    """The publishers' counts of the tensors in the checkpoints."""
    assert abstract_checkpoint(PUBLISHED / name).parameter_count == parameters


def test_decoding_reads_the_weights_and_half_of_the_longest_cache() -> None:
    """Two replicas of two devices: 16 of 32 rows each, 8 at a time, so twice 10 steps; half a byte of cache a token."""
    config = run_of(
        data={"prompts_per_step": 16, "max_prompt_tokens": 20},
        rollout={"max_new_tokens": 10, "max_running_requests": 8},
    )
    run: Any = SimpleNamespace(
        config=config,
        checkpoint=abstract_checkpoint(PUBLISHED / "Qwen3-0.6B"),
        meshes=SimpleNamespace(replicas=2, tensor=2),
        options=SimpleNamespace(shapes=SimpleNamespace(max_rows=8), cache_tokens=100),
    )
    cost = _decode(run, RESIDENT, [program("rollout", name="decode of 8 rows", accessed_bytes=1e9)])
    steps = 2 * 10
    assert cost.memory_bytes == steps * (RESIDENT.sampler + RESIDENT.shared + 50 / 100 * 8 * (20 + 10 / 2))
    assert cost.flops == steps * TokenCost.of(run).forward(8, 25, 8) / 2
    assert cost.host_seconds == steps * HOST_SECONDS


def test_the_slowest_of_three_limits() -> None:
    chip = Chip(
        1,
        flops_per_second=100 / COMPUTE,
        memory_bytes_per_second=10 / MEMORY,
        link_bytes_per_second=1 / LINKS,
    )
    assert StageCost("a", 300.0, 20.0, 1.0, 0.5).seconds(chip) == pytest.approx(3.5)
    assert StageCost("a", 300.0, 50.0, 1.0).parts(chip) == pytest.approx({"products": 3.0, "memory": 5.0, "links": 1.0})
    assert StageCost("a", 300.0, 50.0, 7.0).seconds(chip) == pytest.approx(7.0)


def test_chips_have_the_memory_that_the_compiler_allows() -> None:
    assert {known.name: known.chip.memory_bytes / 2**30 for known in GENERATIONS} == pytest.approx(
        {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
    )
