"""Settings to change when a run does not fit: they are tried one after the other, each planned as the run was.

A change that does not help the stage that does not fit is taken back; the others add up until everything fits.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tpu_grpo.config import MICRO_BATCHES, RunConfig, parse_config
from tpu_grpo.planning.plan import Plan, make_plan
from tpu_grpo.records.errors import TpuGrpoError

MOST_TRIED = 8
SPARE = 0.05
"""The share of the chip's memory that a suggested number of cache tokens leaves free."""


@dataclass(frozen=True)
class Suggestion:
    """Overrides as the command line takes them, and the plan of the run with them."""

    overrides: tuple[str, ...]
    plan: Plan


def suggest(plan: Plan, say: Callable[[str], None]) -> Suggestion | None:
    """Look for changes with which the run fits, compiling each; None where none were found."""
    best, chosen, tried = plan, dict[str, object](), set[tuple[str, object]]()
    while not best.fits and len(tried) < MOST_TRIED:
        untried = (change for change in _changes(best) if change not in tried)
        if (change := next(untried, None)) is None:
            return None
        tried.add(change)
        name, value = change
        say(f"trying {name}={_shown(value)}")
        try:
            changed = make_plan(_overridden(best.config, name, value), plan.target, fast=plan.fast, say=say)
        except TpuGrpoError as error:  # the settings do not go together
            say(f"  {error}")
            continue
        stage = best.worst.stage
        if _stage_bytes(changed, stage) < _stage_bytes(best, stage):
            best, chosen[name] = changed, value
    return Suggestion(tuple(f"{name}={_shown(value)}" for name, value in chosen.items()), best) if best.fits else None


def _stage_bytes(plan: Plan, stage: str) -> float:
    return next(memory.total for memory in plan.memory if memory.stage == stage)


def _changes(plan: Plan) -> Iterator[tuple[str, object]]:
    """Yield settings that help the stage that needs most memory; those that cost the least speed come first."""
    if plan.worst.stage in ("update", "logprobs"):
        yield from _update_changes(plan.config)
    elif plan.worst.stage == "rollout":
        yield from _rollout_changes(plan)
    if (plan.config.meshes.trainer.tp or 1) > 1:
        yield "meshes.trainer.tp", 1
    if plan.worst.stage == "sync":
        yield from _update_changes(plan.config)


def _update_changes(config: RunConfig) -> Iterator[tuple[str, object]]:
    if config.meshes.layout == "shared" and not config.rollout.release_during_update:
        yield "rollout.release_during_update", True
    if config.model.attention == "dot":
        yield "model.attention", "auto"
    if config.model.remat != "decoder":
        yield "model.remat", "decoder"
    prompts = config.mini_batch_prompts
    largest = config.algorithm.micro_batch_prompts or min(prompts, -(-config.data.prompts_per_step // MICRO_BATCHES))
    yield from (("algorithm.micro_batch_prompts", size) for size in range(largest - 1, 0, -1) if prompts % size == 0)


def _rollout_changes(plan: Plan) -> Iterator[tuple[str, object]]:
    config = plan.config
    if config.meshes.sampler.shard_vocab is False:
        yield "meshes.sampler.shard_vocab", None
    yield from (("rollout.kv_tokens", tokens) for tokens in _fewer_kv_tokens(plan))
    engine = next(program.name for program in plan.programs if program.name.startswith("decode"))
    rows = int(engine.split()[2])
    if rows > 8:
        yield "rollout.max_running_requests", rows // 2
    tensor = config.meshes.sampler.tensor
    sizes = [2, 4, 8, 16, 32] if tensor is None else [tensor * 2]
    yield from (("meshes.sampler.tensor", size) for size in sizes if size <= len(plan.target.devices))


def _fewer_kv_tokens(plan: Plan) -> Iterator[int]:
    """Yield as many tokens as should fit by what a token takes, in two digits, and then half of the tokens."""
    tokens, spare = plan.config.rollout.kv_tokens, SPARE * plan.target.chip.memory_bytes
    if tokens is None:
        return
    fitting = int(tokens * (1 - (plan.excess + spare) / plan.resident.cache))
    if 0 < fitting < tokens:
        digit = 10 ** max(0, len(str(fitting)) - 2)
        yield fitting // digit * digit
    yield tokens // 2


def _overridden(config: RunConfig, name: str, value: object) -> RunConfig:
    tree = config.model_dump(mode="json")
    *sections, setting = name.split(".")
    section = tree
    for part in sections:
        section = section[part]
    section[setting] = value
    return parse_config(tree)


def _shown(value: object) -> str:
    """Write a value as YAML has it."""
    return json.dumps(value).strip('"')
