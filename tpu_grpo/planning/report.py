"""Shows a plan as text and as JSON."""

from dataclasses import asdict
from typing import Any

from tpu_grpo.launching.tpus import GIB
from tpu_grpo.planning.budget import COLUMNS
from tpu_grpo.planning.estimate import ASSUMPTIONS
from tpu_grpo.planning.plan import FEW_LAYERS, Plan
from tpu_grpo.planning.suggestions import Suggestion


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan as lines for a terminal."""
    config, chip = plan.config, plan.target.chip
    lines = [
        f"slice      {plan.target.name}: {len(plan.target.devices)} chips, {plan.target.slice.hosts} hosts, "
        f"{chip.memory_bytes / GIB:.2f} GiB a chip",
        f"model      {config.model.path}: {plan.model}, {config.model.dtype}",
        f"meshes     {plan.meshes}",
        f"step       {config.data.prompts_per_step} prompts x {config.algorithm.group_size} completions, "
        f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens} tokens",
        f"kernels    {plan.attention}",
        f"sync       {plan.sync[0]}",
    ]
    if plan.fast:
        lines.append(
            f"compiled   models of {FEW_LAYERS[0]} and {FEW_LAYERS[1]} layers, extrapolated by a line in the number of "
            "layers; what lies on the devices between programs is exact"
        )
    return [*lines, "", *_memory(plan), "", *_time(plan)]


def _memory(plan: Plan) -> list[str]:
    """Return a line for each stage, in GiB per device."""
    limit, lines = plan.target.chip.memory_bytes / GIB, []
    lines.append(f"{'GiB a device':12}" + "".join(f"{name:>12}" for name in (*COLUMNS, "total", "of chip")))
    for stage in plan.memory:
        values = [stage.parts.get(name, 0.0) / GIB for name in COLUMNS]
        total = stage.total / GIB
        cells = "".join(f"{value:12.2f}" for value in (*values, total))
        lines.append(f"{stage.stage:12}{cells}{total / limit:12.0%}  {stage.program}")
    worst = plan.worst
    if plan.fits:
        lines.append(f"fits: the {worst.stage} needs most and leaves {-plan.excess / GIB:.2f} GiB")
    else:
        refused = [program.name for program in plan.programs if not program.fits]
        said = f"; the compiler refused {', '.join(refused)}" if refused else ""
        lines.append(f"does not fit: the {worst.stage} exceeds the chip by {plan.excess / GIB:.2f} GiB{said}")
    return lines


def _time(plan: Plan) -> list[str]:
    chip, lines = plan.target.chip, [f"{'seconds':12}{'':>12}  limited by"]
    for cost in plan.costs:
        parts = cost.parts(chip)
        lines.append(f"{cost.stage:12}{cost.seconds(chip):12.2f}  {max(parts, key=lambda name: parts[name])}")
    figures = speed(plan)
    lines.append(
        f"a step of {plan.seconds:.1f} s: {figures['completion_tokens_per_second']:,.0f} completion tokens/s, "
        f"{figures['chip_hours']:,.1f} chip-hours for {plan.config.run.max_steps} steps"
    )
    return [*lines, *(f"  assumed: {assumption}" for assumption in ASSUMPTIONS)]


def speed(plan: Plan) -> dict[str, float]:
    """Return the speed of a step and the chip-hours of the whole run."""
    tokens = plan.config.batch_rows * plan.config.rollout.max_new_tokens
    return {
        "step_seconds": plan.seconds,
        "completion_tokens_per_second": tokens / plan.seconds,
        "chip_hours": plan.seconds * plan.config.run.max_steps * len(plan.target.devices) / 3600,
    }


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return everything in the plan, as bytes per device and as seconds."""
    chip = plan.target.chip
    return {
        "slice": plan.target.name,
        "chips": len(plan.target.devices),
        "hosts": plan.target.slice.hosts,
        "chip": asdict(chip),
        "model": plan.model,
        "meshes": plan.meshes,
        "fast": plan.fast,
        "compiled_layers": list(FEW_LAYERS) if plan.fast else None,
        "fits": plan.fits,
        "excess_bytes": plan.excess,
        "largest_stage": plan.worst.stage,
        "held": asdict(plan.resident),
        "stages": [
            {"stage": memory.stage, "program": memory.program, "total": memory.total, **memory.parts}
            for memory in plan.memory
        ],
        "programs": [asdict(program) for program in plan.programs],
        "sync": list(plan.sync),
        "time": [{**asdict(cost), "seconds": cost.seconds(chip), "by_limit": cost.parts(chip)} for cost in plan.costs],
        **speed(plan),
        "assumptions": list(ASSUMPTIONS),
    }


def suggestion_line(suggestion: Suggestion | None) -> str:
    """Say with which overrides the run fits, or that none were found."""
    if suggestion is None:
        return "no change of remat, micro-batches, running rows or meshes was found to fit; take a larger slice"
    plan = suggestion.plan
    return (
        f"this fits, compiled as well: {' '.join(suggestion.overrides)} (the {plan.worst.stage} needs most and leaves "
        f"{-plan.excess / GIB:.2f} GiB; a step takes {plan.seconds:.1f} s)"
    )
