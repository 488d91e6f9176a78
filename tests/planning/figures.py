"""Made-up figures of programs and sizes, easy to add up."""

from typing import Any

from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.launching.tpus import parse_slice
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.planning.compiled_programs import GRADIENTS, OPTIMIZER_STEP, CompiledProgram, Stage
from tpu_grpo.planning.costs import EngineSizes, TrainerSizes
from tpu_grpo.planning.slice_plan import PUBLISHED
from tpu_grpo.planning.stage_memory import ResidentBytes
from tpu_grpo.planning.step_seconds import StepWork

V6E = parse_slice("v6e-8").generation

RESIDENT = ResidentBytes(
    parameters=100, optimizer=200, trained=80, reference=30, sampler=40, shared=5, cache=50, batch=7, gradients=80
)


def program(stage: Stage, **figures: Any) -> CompiledProgram:
    return CompiledProgram(**(dict[str, Any](name=stage, stage=stage, seconds=1.0) | figures))


def run_of(**sections: Any) -> RunConfig:
    return parse_config({"data": {"prompts_per_step": 8}, "algorithm": {"group_size": 2}, **sections})


def work_of(**sections: Any) -> StepWork:
    """Two hosts with two engines each; 8 prompts with 2 completions."""
    engine = EngineSizes.of(
        abstract_checkpoint(PUBLISHED / "Qwen3-0.6B"), tensor=2, itemsize=2, split_vocabulary=True, cache_bytes=50_000
    )
    return StepWork(
        config=run_of(
            data={"prompts_per_step": 8, "max_prompt_tokens": 20}, rollout={"max_new_tokens": 60}, **sections
        ),
        generation=V6E,
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
            gathered_bytes=1.5e8,
            reduced_bytes=1.5e8,
            state_bytes=2048,
            layer_passes=4,
            head_passes=4,
        ),
        accessed_bytes={GRADIENTS: 1e6, OPTIMIZER_STEP: 1e9, "log-probabilities": 1e6},
        synced_bytes=1e9,
        devices=8,
    )
