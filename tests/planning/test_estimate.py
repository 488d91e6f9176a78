"""Seconds of stages, by hand."""

from typing import Any

import pytest

from tests.planning.figures import run_of
from tpu_grpo.launching.tpus import GENERATIONS, parse_slice
from tpu_grpo.models import Checkpoint
from tpu_grpo.models.abstract import abstract_checkpoint
from tpu_grpo.planning.engine_steps import decode_step, host_seconds, prefill_step, round_seconds
from tpu_grpo.planning.estimate import StepWork
from tpu_grpo.planning.plan import PUBLISHED
from tpu_grpo.planning.programs import GRADIENTS, OPTIMIZER_STEP
from tpu_grpo.planning.rates import ALLREDUCE_SECONDS, CACHE_BYTES_PER_SECOND, LINKS, MEMORY, PREFILL, STEP_INPUTS
from tpu_grpo.planning.sizes import EngineSizes, TokenCost
from tpu_grpo.planning.training import TrainerSizes, pass_seconds

GENERATION = parse_slice("v6e-8").generation


def checkpoint(name: str) -> Checkpoint:
    return abstract_checkpoint(PUBLISHED / name)


def test_what_a_token_meets_in_a_dense_model() -> None:
    found = TokenCost.of(checkpoint("Qwen3-0.6B"))
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    assert found == TokenCost(28 * layer, 151936 * 1024, 4 * 28 * 16 * 128)
    assert found.forward(10, 6, 3) == 10 * (2 * 28 * layer + 6 * 4 * 28 * 16 * 128) + 3 * 2 * 151936 * 1024


def test_what_a_token_meets_among_experts() -> None:
    """About 3 of the 30 billion parameters, as the model's name says."""
    found = TokenCost.of(checkpoint("Qwen3-30B-A3B"))
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


def test_a_decode_step_reads_weights_but_no_embedding_and_adds_up_its_causes() -> None:
    """Qwen3-0.6B has one matrix for embedding and head, which is read; Llama's embedding is not."""
    tied = EngineSizes.of(checkpoint("Qwen3-0.6B"), tensor=2, itemsize=2, split_vocabulary=True, cache_bytes=7)
    assert tied.weight_bytes == 596_049_920 * 2 / 2
    assert tied.arrays == 1 + 28 * 11 + 1 + 28 + STEP_INPUTS
    untied = EngineSizes.of(
        checkpoint("Llama-3.1-8B-Instruct"), tensor=4, itemsize=2, split_vocabulary=False, cache_bytes=7
    )
    head = 128_256 * 4096
    assert untied.weight_bytes == ((8_030_261_248 - 2 * head) / 4 + head) * 2
    found = decode_step(tied, GENERATION, rows=8, cached_tokens=100)
    sent = 8 * 1024 * 2  # two devices: half of it, there and back
    assert found == pytest.approx(
        {
            "weights": 596_049_920 / (MEMORY * 1640e9),
            "cache": 100 * 7 / CACHE_BYTES_PER_SECOND,
            "links": 57 * (ALLREDUCE_SECONDS + sent / (LINKS * 448e9 / 4)),
        }
    )


def test_a_step_of_many_tokens_takes_as_long_as_its_products() -> None:
    sizes = EngineSizes.of(checkpoint("Qwen3-0.6B"), tensor=1, itemsize=2, split_vocabulary=False, cache_bytes=7)
    found = prefill_step(sizes, GENERATION, 2048, 100)
    assert found == pytest.approx({"products": sizes.token.forward(2048, 100, 1) / (PREFILL * 918e12), "links": 0.0})


def test_few_tokens_read_few_experts() -> None:
    sizes = EngineSizes.of(checkpoint("Qwen3-30B-A3B"), tensor=4, itemsize=2, split_vocabulary=True, cache_bytes=7)
    experts = 48 * 128 * 3 * 2048 * 768 * 2 / 4
    assert sizes.expert_bytes == experts
    assert sizes.read_bytes(1) == pytest.approx(sizes.weight_bytes + experts * 8 / 128)
    assert sizes.read_bytes(256) == pytest.approx(sizes.weight_bytes + experts, rel=1e-3)
    assert sizes.arrays == 3 + 48 * (2 + 4 + 2 + 1 + 3) + 48 + STEP_INPUTS  # of all experts together three


@pytest.mark.parametrize(
    ("slice_name", "itemsize", "seconds"),
    [
        ("v6e-8", 2, 1000 * 4096 / 0.74e12),  # the kernel's instructions
        ("v6e-8", 1, 1000 * 4096 / 0.74e12),  # as many numbers
        ("v6e-8", 4, 1000 * 8192 / 0.74e12),
        ("v5e-8", 2, 1000 * 4096 / (0.8 * 819e9)),  # the memory
        ("v5e-8", 1, 1000 * 4096 / 0.74e12),
    ],
)
def test_a_cache_of_8_bits_is_read_in_half_the_time_and_computed_with_as_long(
    slice_name: str, itemsize: int, seconds: float
) -> None:
    """1,000 tokens of context with 2,048 numbers each."""
    sizes = EngineSizes.of(
        checkpoint("Qwen3-0.6B"),
        tensor=1,
        itemsize=2,
        split_vocabulary=False,
        cache_bytes=2048 * itemsize,
        cache_itemsize=itemsize,
    )
    step = decode_step(sizes, parse_slice(slice_name).generation, 10, 1000)
    assert step["cache"] == pytest.approx(seconds, rel=1e-3)


def work_of(**sections: Any) -> StepWork:
    """Two hosts with two engines each; 8 prompts with 2 completions."""
    engine = EngineSizes.of(checkpoint("Qwen3-0.6B"), tensor=2, itemsize=2, split_vocabulary=True, cache_bytes=50_000)
    return StepWork(
        config=run_of(
            data={"prompts_per_step": 8, "max_prompt_tokens": 20}, rollout={"max_new_tokens": 60}, **sections
        ),
        generation=GENERATION,
        engine=engine,
        hosts=((4, 4), (4, 4)),
        rungs=(2, 4),
        trainer=TrainerSizes(
            fsdp=8,
            tp=1,
            layers=28,
            token=engine.token,
            context=40,
            row_tokens=80,
            pass_tokens=4 * 80,
            parameter_bytes=1.5e8,
            trained_bytes=1.5e8,
            outer_share=0.25,
            state_bytes=2048,
            layer_passes=4,
            head_passes=4,
        ),
        accessed_bytes={GRADIENTS: 1e6, OPTIMIZER_STEP: 1e9, "log-probabilities": 1e6},
        synced_bytes=1e9,
        devices=8,
    )


def test_a_step_of_the_longest_completions() -> None:
    """Each host has two engines with 4 rows each, all at once; 16 rows of 80 tokens are 4 micro-batches."""
    work, step = work_of(), work_of().step()
    assert [stage.stage for stage in step.stages] == ["prefill", "decode", "update", "sync"]
    assert step.completion_tokens == 16 * 60
    assert step.seconds == pytest.approx(sum(stage.seconds for stage in step.stages))
    device = decode_step(work.engine, GENERATION, 4, 4 * (20 + 30.5))
    round_ = round_seconds([(device, host_seconds(work.engine, 4))] * 2)
    entering = decode_step(work.engine, GENERATION, 4, 4 * 20)
    first = round_seconds([(entering, host_seconds(work.engine, 4))] * 2)
    assert step.of("decode") == pytest.approx(60 * sum(round_.values()) + sum(first.values()))
    one = pass_seconds(work.trainer, GENERATION, head_tokens=4 * 60, accessed_bytes=1e6, updates=True)
    assert step.of("update") == pytest.approx(4 * sum(one.parts.values()) + 1e9 / (MEMORY * 1640e9))
    assert step.stages[-1].by_cause == {"links": 1e9 / (LINKS * 448e9 / 2)}


def test_shorter_completions_take_less_update_and_leave_a_tail() -> None:
    """16 x 40 tokens packed to 95 % are 3 of 4 micro-batches; the rollout lasts as long as its longest completion."""
    longest, mean = work_of().step(), work_of().step(20)
    assert mean.completion_tokens == pytest.approx(16 * 20, abs=8)
    assert mean.of("update") == pytest.approx(longest.of("update") * 3 / 4, rel=0.1)  # 16 x 40 / 0.95 of 320
    assert mean.of("decode") > longest.of("decode") * 0.8
    assert mean.tokens_per_second < longest.tokens_per_second
    assert work_of().step(60).seconds == pytest.approx(longest.seconds)


def test_forward_passes_and_iterations_repeat() -> None:
    once = work_of().step()
    step = work_of(algorithm={"group_size": 2, "beta": 0.1, "old_policy": "trainer", "iterations": 2}).step()
    assert step.of("update") == pytest.approx(2 * once.of("update"))
    one = pass_seconds(work_of().trainer, GENERATION, head_tokens=4 * 60, accessed_bytes=1e6, updates=False)
    assert step.of("logprobs") == pytest.approx(2 * 4 * sum(one.parts.values()))


def test_mini_batches_take_passes_and_steps_of_their_own() -> None:
    """2 prompts with 2 completions are 4 rows of 80 tokens: one pass, and one step of the optimizer."""
    work, once = work_of(), work_of().step()
    sizes = {"group_size": 2, "iterations": 2}
    step = work_of(algorithm={**sizes, "mini_batch_prompts": 2, "old_policy": "trainer"}).step()
    stepping = 1e9 / (MEMORY * 1640e9)
    one = pass_seconds(work.trainer, GENERATION, head_tokens=4 * 60, accessed_bytes=1e6, updates=True)
    assert step.of("update") == pytest.approx(8 * (sum(one.parts.values()) + stepping))
    assert step.of("update") == pytest.approx(2 * once.of("update") + 6 * stepping)
    forward = pass_seconds(work.trainer, GENERATION, head_tokens=4 * 60, accessed_bytes=1e6, updates=False)
    assert step.of("logprobs") == pytest.approx(4 * sum(forward.parts.values()))  # once a step
    halves = work_of(algorithm={**sizes, "mini_batch_prompts": 1}).step()  # half a pass is computed whole
    half = pass_seconds(work.trainer, GENERATION, head_tokens=2 * 60, accessed_bytes=1e6, updates=True)
    assert halves.of("update") == pytest.approx(16 * (sum(half.parts.values()) + stepping))


def test_chips_have_the_memory_that_the_compiler_allows() -> None:
    assert {known.name: known.chip.memory_bytes / 2**30 for known in GENERATIONS} == pytest.approx(
        {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
    )
