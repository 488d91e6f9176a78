"""Fast plans are lines through two models of few layers. Suggestions are tried in order, and kept if they help."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models.random_checkpoint import write_random
from tests.planning.figures import RESIDENT, program, run_of, work_of
from tpu_grpo.config import RunConfig
from tpu_grpo.models.checkpoint import abstract_checkpoint
from tpu_grpo.models.families.gemma2 import Gemma2Config
from tpu_grpo.planning import slice_plan
from tpu_grpo.planning.plan_report import _memory
from tpu_grpo.planning.slice_plan import FEW_LAYERS, Plan, extrapolated, with_layers
from tpu_grpo.planning.stage_memory import StageMemory
from tpu_grpo.records.errors import ConfigError


def test_a_line_through_two_and_four_layers() -> None:
    assert FEW_LAYERS == (2, 4)
    few = program("update", argument_bytes=10.0, temporary_bytes=8.0, flops=6.0, kernels=2)
    more = program("update", argument_bytes=14.0, temporary_bytes=7.0, flops=10.0, kernels=4)
    whole = extrapolated(few, more, 36)
    assert whole.argument_bytes == 10 + 2 * 34
    assert whole.flops == 6 + 2 * 34
    assert whole.temporary_bytes == 8  # never falls
    assert extrapolated(few, more, 36, (3.0, 5.0)).temporary_bytes == 8 + 32 * 3
    assert extrapolated(few, replace(more, temporary_bytes=28.0), 36, (3.0, 5.0)).temporary_bytes == 28 + 32 * 5
    assert extrapolated(few, replace(more, temporary_bytes=16.0), 36, (3.0, 5.0)).temporary_bytes == 16 + 32 * 4
    assert whole.kernels == 36
    assert extrapolated(few, more, 2).argument_bytes == 10


def test_few_layers_are_the_first_ones_where_they_differ(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    directory = write_random("gemma2", tmp_path, layers=3, layer_types=types)
    with with_layers(abstract_checkpoint(directory), 2) as fewer:
        assert isinstance(fewer.config, Gemma2Config)
        assert fewer.config.has_window == (False, True)


def test_few_layers_are_of_every_kind_if_the_model_has_one_that_comes_later(tmp_path: Path) -> None:
    directory = write_random("gemma3_text", tmp_path, layers=7, layer_types=None)
    with with_layers(abstract_checkpoint(directory), 2) as fewer:
        assert isinstance(fewer.config, Gemma2Config)
        assert fewer.config.has_window == (True, False)


def test_a_run_of_tunix_is_compared_with_what_ours_would_do() -> None:
    options = {"num_iterations": 2, "epsilon": 0.3}
    section = {
        "name": "tunix:grpo",
        "options": options,
        "group_size": 2,
        "old_policy": "tunix",
        "micro_batch_prompts": 4,
    }
    config = run_of(algorithm=section)
    found = slice_plan.packed_algorithm(config.algorithm, config.data, config.optimizer)
    assert (found.name, found.beta, found.iterations, found.old_policy) == ("grpo", 0.04, 2, "rollout")
    assert (found.micro_batch_prompts, found.options) == (4, {})


def plan_of(config: RunConfig, needs: dict[str, float]) -> Plan:
    """A plan for 16 chips of 100 bytes, whose stages need so many."""
    target: Any = SimpleNamespace(
        devices=range(16), slice=SimpleNamespace(devices=16), chip=SimpleNamespace(memory_bytes=100)
    )
    memory = tuple(StageMemory(stage, "", {"work": need}) for stage, need in needs.items())  # pyrefly: ignore[bad-argument-type]
    resident, programs = replace(RESIDENT, cache=320), (program("rollout", name="decode of 64 rows"),)
    work: Any = None
    return Plan(config, target, "", "", "", True, resident, programs, (), memory, work)


def test_the_stage_that_needs_most_is_named_with_what_it_leaves() -> None:
    target: Any = SimpleNamespace(chip=SimpleNamespace(memory_bytes=100 * 2**30))
    plan = plan_of(run_of(), {"rollout": 50 * 2.0**30, "update": 75 * 2.0**30})
    assert _memory(replace(plan, target=target))[-1] == "fits: the update needs most and leaves 25.00 GiB"


def suggested(monkeypatch: pytest.MonkeyPatch, needs: Any, **sections: Any) -> tuple[Any, list[str]]:
    def make_plan(config: RunConfig, target: Any, *, fast: bool, say: Any) -> Plan:
        assert fast
        return plan_of(config, needs(config))

    said: list[str] = []
    monkeypatch.setattr(slice_plan, "make_plan", make_plan)
    config = run_of(**sections)
    return slice_plan.suggest(plan_of(config, needs(config)), said.append), said


def test_changes_add_up_until_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(config: RunConfig) -> dict[str, float]:
        update = 190 - 60 * (config.model.remat == "decoder") - 40 * (config.algorithm.micro_batch_prompts == 4)
        return {"rollout": 50, "update": update}  # what is released changes nothing here

    suggestion, said = suggested(monkeypatch, needs, algorithm={"micro_batch_prompts": 8})
    assert suggestion.overrides == ("model.remat=decoder", "algorithm.micro_batch_prompts=4")
    assert suggestion.plan.fits
    assert [line for line in said if line.startswith("trying")] == [
        "trying rollout.release_during_update=true",
        "trying model.remat=decoder",
        "trying algorithm.micro_batch_prompts=4",
    ]


def test_dot_attention_gives_way_to_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    suggestion, _ = suggested(
        monkeypatch,
        lambda config: {"rollout": 50, "update": 120 - 30 * (config.model.attention == "auto")},
        model={"attention": "dot"},
    )
    assert suggestion.overrides == ("model.attention=auto",)


@pytest.mark.parametrize(
    ("needed", "tokens"),
    [
        ({100_000: 340.0, 23_000: 93.6}, 23_000),  # of 320 it may take 75 with 5 to spare, which is 23,437 tokens
        ({100_000: 340.0, 23_000: 400.0, 50_000: 95.0}, 50_000),  # that brought nothing: half of them
    ],
)
def test_as_many_cache_tokens_as_fit(
    monkeypatch: pytest.MonkeyPatch, needed: dict[int | None, float], tokens: int
) -> None:
    rollout = {"kv_tokens": 100_000, "max_new_tokens": 8}
    suggestion, said = suggested(monkeypatch, lambda run: {"rollout": needed[run.rollout.kv_tokens]}, rollout=rollout)
    assert suggestion.overrides == (f"rollout.kv_tokens={tokens}",)
    assert said[0] == "trying rollout.kv_tokens=23000"


def test_a_rollout_gets_fewer_rows_or_more_devices_where_these_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(config: RunConfig) -> dict[str, float]:
        if config.meshes.sampler.tensor == 2:
            raise ConfigError("two do not divide it")
        return {"rollout": 120 - 30 * (config.meshes.sampler.tensor == 4), "update": 10}

    suggestion, said = suggested(monkeypatch, needs)
    assert suggestion.overrides == ("meshes.sampler.tensor=4",)
    assert said[0] == "trying rollout.max_running_requests=32"
    assert "  two do not divide it" in said


def test_nothing_is_suggested_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    suggestion, said = suggested(monkeypatch, lambda config: {"update": 500.0})
    assert suggestion is None
    assert len([line for line in said if line.startswith("trying")]) <= slice_plan.MOST_TRIED


def test_alternatives_that_fit_come_first_and_the_fastest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts are split 1 + 3, 2 + 2 and 3 + 1, whose engines have 4, 2 and 1 times the rows each; what waits for
    slots gets int8 weights, and an 8-bit cache of twice the rows. The split by 3 hosts does not fit, with or without
    carry."""
    said: list[str] = []

    def make_plan(config: RunConfig, target: Any, *, fast: bool, say: Any) -> Plan:
        sampling = config.meshes.sampler.hosts
        if sampling == 1:
            raise ConfigError("no")
        work = replace(work_of(), config=config)
        if sampling is not None:
            work = replace(work, hosts=((8, 8),) if sampling == 2 else ((6, 4), (6, 0)))
        found = plan_of(config, {"update": 120.0 if sampling == 3 else 60.0})
        return replace(found, work=work, target=target)

    monkeypatch.setattr(slice_plan, "make_plan", make_plan)
    target: Any = SimpleNamespace(slice=SimpleNamespace(hosts=4, devices=16), chip=SimpleNamespace(memory_bytes=100))
    config = work_of().config
    work = replace(work_of(), hosts=((8, 8), (8, 8)))
    plan = replace(plan_of(config, {"update": 60.0}), work=work, target=target)
    found = slice_plan.alternatives(plan, 20, compiled=True, say=said.append)
    split = "meshes.layout=split"
    room = "meshes.sync_temporary_mib=2048"
    layouts: list[tuple[str, ...]] = [(), *((split, f"meshes.sampler.hosts={hosts}", room) for hosts in (2, 3))]
    layouts.append(("rollout.weights_dtype=int8", "algorithm.old_policy=trainer"))
    layouts.append(("rollout.kv_dtype=fp8", "rollout.max_running_requests=8"))
    carried = {
        (*each, *more)
        for each in layouts
        for more in ((), ("rollout.partial_extra=0.5",), ("rollout.partial_extra=1",))
    }
    assert {each.overrides for each in found} == carried - {()}
    assert said[:2] == [f"planning {split} meshes.sampler.hosts=1 {room}", "  no"]
    seconds = [each.plan.work.step(20).seconds for each in found]
    assert [each.plan.fits for each in found] == [True] * 11 + [False] * 3
    assert (seconds[:11], seconds[11:]) == (sorted(seconds[:11]), sorted(seconds[11:]))
    assert [each.overrides[1] for each in found[11:]] == ["meshes.sampler.hosts=3"] * 3
    target.slice.devices = 32
    found = slice_plan.alternatives(plan, 20, compiled=True, say=said.append)
    ahead = {(*each, "algorithm.staleness=1") for each in layouts[1:3]}
    ahead = {
        (*each, *more) for each in ahead for more in ((), ("rollout.partial_extra=0.5",), ("rollout.partial_extra=1",))
    }
    assert {each.overrides for each in found} == carried - {()} | ahead


def test_memory_that_int8_weights_free_is_offered_as_rows() -> None:
    """Half of 100 bytes of weights, where each of 4 rows has 80 / 4 bytes of cache: 2 more rows, unless none waits."""
    plan = plan_of(run_of(rollout={"kv_tokens": 4000}), {})
    plan = replace(plan, resident=replace(RESIDENT, sampler=100, cache=80))
    more = ("rollout.max_running_requests=6", "rollout.kv_tokens=6000")
    assert slice_plan._more_rows(plan, 4, 8) == more
    assert slice_plan._more_rows(plan, 4, 4) == ()


def test_what_needs_no_compiling_is_not_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two carries, unless the run carries or cannot."""
    target: Any = SimpleNamespace(slice=SimpleNamespace(hosts=4, devices=16), chip=SimpleNamespace(memory_bytes=100))

    def found(**sections: Any) -> list[tuple[str, ...]]:
        plan = replace(plan_of(work_of(**sections).config, {"update": 60.0}), work=work_of(**sections), target=target)
        return [each.overrides for each in slice_plan.alternatives(plan, 20, compiled=False, say=print)]

    assert sorted(found()) == [("rollout.partial_extra=0.5",), ("rollout.partial_extra=1",)]
    assert found(environment={"name": "calculator"}) == []
