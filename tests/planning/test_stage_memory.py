"""Stages add up what lies on a device while they run."""

import json
from dataclasses import asdict, replace

import pytest

from tests.planning.figures import RESIDENT, program, run_of
from tpu_grpo.config import RunConfig
from tpu_grpo.planning.compiled_programs import (
    GRADIENTS,
    OPTIMIZER_STEP,
    SUM,
    TEACHER,
    TRAIN_STEP,
    CompiledProgram,
    refused_bytes,
)
from tpu_grpo.planning.stage_memory import ResidentBytes, StageMemory, stage_memory

PROGRAMS = [
    program("rollout", name="decode", argument_bytes=96, temporary_bytes=9, code_bytes=1),  # 95 known, 1 of inputs
    program("rollout", name="prefill", argument_bytes=95, temporary_bytes=8, code_bytes=1),
    program("logprobs", argument_bytes=100, output_bytes=2, temporary_bytes=11, code_bytes=1),
    program("update", name=GRADIENTS, argument_bytes=143, temporary_bytes=17, code_bytes=1),  # gradients are 40
    program("update", name=OPTIMIZER_STEP, argument_bytes=320, output_bytes=5, temporary_bytes=1, code_bytes=1),
]
TRAINER, SAMPLER = 100 + 200 + 30, 40 + 50


def memory(config: RunConfig, resident: ResidentBytes, programs: list[CompiledProgram]) -> list[StageMemory]:
    return stage_memory(config.meshes, config.rollout, config.updates_per_step, resident, programs, sync_bytes=13)


def totals(**sections: object) -> dict[str, float]:
    return {stage.stage: stage.total for stage in memory(run_of(**sections), RESIDENT, PROGRAMS)}


def test_everything_is_there_in_every_stage() -> None:
    found = memory(run_of(), RESIDENT, PROGRAMS)
    assert [stage.program for stage in found] == ["decode", "logprobs", GRADIENTS, "largest group"]
    both = TRAINER + SAMPLER + 5  # five programs
    assert totals() == {
        "rollout": both + 1 + 9,
        "logprobs": both + 2 + 11 + 7,
        "update": both + 3 + 40 + 17 + 7,
        "sync": both + 13,
    }


def test_what_is_released_is_not_there_during_the_update() -> None:
    changed = totals(rollout={"release_during_update": True})
    assert changed["rollout"] == totals()["rollout"]
    assert changed["logprobs"] == totals()["logprobs"] - SAMPLER
    assert changed["update"] == totals()["update"] - SAMPLER
    assert changed["sync"] == totals()["sync"] - 50  # the cache comes after the weights


def test_shared_leaves_stay_old_while_updates_follow_each_other() -> None:
    assert totals(algorithm={"group_size": 2, "micro_batch_prompts": 4})["update"] == totals()["update"]
    assert totals(algorithm={"group_size": 2, "iterations": 2})["update"] == totals()["update"] + 5
    assert totals(algorithm={"group_size": 2, "mini_batch_prompts": 4})["update"] == totals()["update"] + 5


def test_split_meshes_have_a_side_each() -> None:
    found = totals(meshes={"layout": "split"})
    assert found["rollout"] == SAMPLER + 1 + 9 + 5
    assert found["update"] == TRAINER + 3 + 40 + 17 + 7 + 5
    assert found["sync"] == TRAINER + 13 + 5  # the fuller side


def test_teachers_of_the_sampler_are_on_its_side() -> None:
    """One of 300 bytes stays there; one of 400 comes from the hosts' memory for its program, with 2 bytes of rows."""
    resident = replace(RESIDENT, teachers=300, offloaded=(f"{TEACHER}b",))
    assert json.loads(json.dumps(asdict(resident)))["offloaded"] == [f"{TEACHER}b"]  # as plan.py --json prints it
    teachers = [
        program("rollout", name=f"{TEACHER}{name}", argument_bytes=size + 2, output_bytes=3, temporary_bytes=6)
        for name, size in (("a", 300), ("b", 400))
    ]
    found = memory(run_of(meshes={"layout": "split"}), resident, [*PROGRAMS, *teachers])
    totals = {stage.stage: (stage.program, stage.total) for stage in found}
    assert totals["rollout"] == (f"{TEACHER}b", SAMPLER + 300 + 402 + 3 + 6 + 5)
    assert totals["sync"][1] == SAMPLER + 300 + 13 + 5
    assert totals["update"][1] == TRAINER + 3 + 40 + 17 + 7 + 5
    offloaded = [program("logprobs", name=f"{TEACHER}b", argument_bytes=402, output_bytes=3, temporary_bytes=6)]
    found = memory(run_of(), resident, [*PROGRAMS, *offloaded])
    assert found[1].total == TRAINER + SAMPLER + 402 + 3 + 6 + 7 + 5


def test_the_optimizers_step_counts_where_it_needs_more() -> None:
    """Its arguments are the trained parameters, what the optimizer keeps, and the gradients."""
    large = program("update", name=OPTIMIZER_STEP, argument_bytes=80 + 200 + 40, output_bytes=5, temporary_bytes=90)
    update = memory(run_of(), RESIDENT, [*PROGRAMS[:4], large])[2]
    assert update.program == OPTIMIZER_STEP
    assert update.total == TRAINER + SAMPLER + 40 + 5 + 90 + 7 + 4


def test_tunix_train_step_has_parameters_and_the_optimizers_state() -> None:
    """New parameters come beside the old ones."""
    one = program("update", name=TRAIN_STEP, argument_bytes=100 + 200 + 3, output_bytes=80, temporary_bytes=17)
    update = memory(run_of(), replace(RESIDENT, batch=0), [*PROGRAMS[:3], one])[2]
    assert update.total == TRAINER + SAMPLER + 3 + 80 + 17 + 3


def test_all_gradients_are_there_while_some_are_added_over_slices() -> None:
    """They are float32, as the 80 bytes of trained parameters are."""
    some = program("update", name=SUM, argument_bytes=50, temporary_bytes=50)
    update = memory(run_of(), RESIDENT, [*PROGRAMS[:3], some])[2]
    assert update.total == TRAINER + SAMPLER + 80 + 50 + 7 + 3


def test_a_refused_program_counts_as_the_compiler_says() -> None:
    refused = [*PROGRAMS[:3], program("update", name=GRADIENTS, temporary_bytes=1000, fits=False)]
    update = memory(run_of(), RESIDENT, refused)[2]
    assert update.total == 1000 + 200 + 30 + SAMPLER + 7 + 3  # with what its arguments are not, and code of three


MEMORY = "RESOURCE_EXHAUSTED: Ran out of memory "
SINGLE = "RESOURCE_EXHAUSTED: Allocation (size=400) would exceed memory (size=100) :: "


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (f"{MEMORY}in memory space hbm. Used 16.50G of 15.75G hbm.", 16.5 * 2**30),
        (
            f"{MEMORY}on HBM, the total memory required for HLO temporaries (22.50G) exceeds available HBM (15.75G).",
            22.5 * 2**30,
        ),
        (f"{SINGLE}[space=hbm, size = 1]", 400),
        ("Ran out of memory in memory space smem. Used 1.01M of 1.00M smem.", None),
        (f"{SINGLE}#1 [space=smem]", None),
    ],
)
def test_only_refusals_for_the_main_memory_are_read(message: str, size: float | None) -> None:
    assert refused_bytes(message) == size
