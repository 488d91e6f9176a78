"""Made-up figures of programs and sizes, easy to add up."""

from typing import Any

from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.planning.compiled_programs import CompiledProgram, Stage
from tpu_grpo.planning.stage_memory import ResidentBytes

RESIDENT = ResidentBytes(
    parameters=100, optimizer=200, trained=80, reference=30, sampler=40, shared=5, cache=50, batch=7
)


def program(stage: Stage, **figures: Any) -> CompiledProgram:
    return CompiledProgram(**{"name": stage, "stage": stage, "seconds": 1.0, **figures})


def run_of(**sections: Any) -> RunConfig:
    return parse_config({"data": {"prompts_per_step": 8}, "algorithm": {"group_size": 2}, **sections})
