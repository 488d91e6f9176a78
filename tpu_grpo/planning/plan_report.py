"""Shows a plan as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tpu_grpo.launching.tpus import GIB
from tpu_grpo.planning.slice_plan import FEW_LAYERS, Plan, Suggestion
from tpu_grpo.planning.stage_memory import COLUMNS
from tpu_grpo.planning.step_seconds import ROLLOUT, ROLLOUT_RANGE, StepTime, assumptions


def plan_lines(plan: Plan, mean_new_tokens: float | None = None, price: float | None = None) -> list[str]:
    """Return the plan as lines for a terminal; ``mean_new_tokens`` adds a step with this mean length of completions,
    and ``price`` (of a chip-hour) adds the cost of the run."""
    config, target, chip = plan.config, plan.target, plan.target.chip
    lines = [
        f"slice      {target.name}: {target.chips} chips, {target.slices * target.slice.hosts} hosts, "
        f"{len(target.devices)} devices of {chip.memory_bytes / GIB:.2f} GiB"
        + ("; on GKE: launch.py run --on gke" if target.slice.generation.only_on_gke else ""),
        f"model      {config.model.path}: {plan.model}, {config.model.dtype}",
        f"meshes     {plan.meshes}",
        f"step       {config.step_text}, {config.data.max_prompt_tokens} + {config.rollout.max_new_tokens} tokens",
        f"kernels    {plan.attention}",
        f"sync       {plan.sync[0]}",
    ]
    if plan.fast:
        lines.append(
            f"compiled   models of {FEW_LAYERS[0]} and {FEW_LAYERS[1]} layers, extrapolated by a line in the number of "
            "layers; what lies on the devices between programs is exact"
        )
    return [*lines, "", *_memory(plan), "", *_time(plan, mean_new_tokens, price)]


def _memory(plan: Plan) -> list[str]:
    """Return a line for each stage, in GiB per device, and a line that says whether the run fits."""
    limit = plan.target.chip.memory_bytes / GIB
    lines = [f"{'GiB a device':12}" + "".join(f"{name:>12}" for name in (*COLUMNS, "total", "of chip"))]
    for stage in plan.memory:
        cells = "".join(f"{stage.parts.get(name, 0.0) / GIB:12.2f}" for name in COLUMNS)
        total = stage.total / GIB
        lines.append(f"{stage.stage:12}{cells}{total:12.2f}{total / limit:12.0%}  {stage.program}")
    worst = plan.worst
    if plan.fits:
        lines.append(f"fits: the {worst.stage} needs most and leaves {-plan.excess / GIB:.2f} GiB")
    else:
        refused = [program.name for program in plan.programs if not program.fits]
        said = f"; the compiler refused {', '.join(refused)}" if refused else ""
        lines.append(f"does not fit: the {worst.stage} exceeds the chip by {plan.excess / GIB:.2f} GiB{said}")
    return lines


def _time(plan: Plan, mean_new_tokens: float | None, price: float | None) -> list[str]:
    """Return lines for stages and for the step: for completions of the longest and, if given, of the mean length."""
    means = [None, *([] if mean_new_tokens is None else [mean_new_tokens])]
    steps = [("all longest" if mean is None else f"mean {mean:g}", plan.work.step(mean)) for mean in means]
    lines = [f"{'seconds':12}" + "".join(f"{name:>14}  {'of it':24}" for name, _ in steps).rstrip()]
    for stages in zip(*(step.stages for _, step in steps), strict=True):
        line = f"{stages[0].stage:12}"
        for stage in stages:
            cause, seconds = max(stage.by_cause.items(), key=lambda item: item[1])
            line += f"{stage.seconds:14.2f}  {f'{seconds:.2f} {cause}':24}"
        lines.append(line.rstrip())
    for name, step in steps:
        figures = _speed(plan, step, price)
        cost = f", which cost {figures['cost']:,.2f}" if "cost" in figures else ""
        low, high, least, most = *figures["step_seconds_range"], *figures["rollout_seconds_range"]
        lines.append(
            f"{name}: a step of {step.seconds:.1f} s ({low:.1f} to {high:.1f}), rollout "
            f"{figures['rollout_seconds']:.1f} ({least:.1f} to {most:.1f}) and update {figures['update_seconds']:.1f}; "
            f"{figures['completion_tokens_per_second']:,.0f} completion tokens/s, "
            f"{figures['chip_hours']:,.1f} chip-hours for {plan.config.run.max_steps} steps{cost}"
        )
    for (name, _), mean in zip(steps, means, strict=True):
        near = plan.work.efficiency(mean)
        lines.append(
            f"{name}: a decode step takes {near['decode_of_least']:.2f} times as long as a read of weights and cache; "
            f"MFU of prefill {near['prefill_mfu']:.0%}, of update {near['update_mfu']:.0%}"
        )
    return [
        *lines,
        *(f"  assumed: {assumption}" for assumption in assumptions(mean_new_tokens, plan.work.generation.rates)),
    ]


def _speed(plan: Plan, step: StepTime, price: float | None) -> dict[str, Any]:
    """Return the speed of a step and the chip-hours of a run of such steps; with a price per hour, also the cost."""
    hours = step.seconds * plan.config.run.max_steps * plan.target.chips / 3600
    return {
        "step_seconds": step.seconds,
        "step_seconds_range": list(step.seconds_range),
        "rollout_seconds": step.of(*ROLLOUT),
        "rollout_seconds_range": [factor * step.of(*ROLLOUT) for factor in ROLLOUT_RANGE],
        "update_seconds": step.of("logprobs", "update"),
        "completion_tokens_per_second": step.tokens_per_second,
        "chip_hours": hours,
        **({} if price is None else {"cost": hours * price}),
    }


def plan_as_json(plan: Plan, mean_new_tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
    """Return the whole plan, in bytes per device and seconds; "at_mean" has the seconds for the mean length."""
    return {
        "slice": plan.target.slice.name,
        "slices": plan.target.slices,
        "chips": plan.target.chips,
        "hosts": plan.target.slices * plan.target.slice.hosts,
        "chip": asdict(plan.target.chip),
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
        "planned": plan.work.planned(mean_new_tokens),
        **_step_as_json(plan, None, price),
        "at_mean": None if mean_new_tokens is None else _step_as_json(plan, mean_new_tokens, price),
        "assumptions": assumptions(mean_new_tokens, plan.work.generation.rates),
    }


def _step_as_json(plan: Plan, mean_new_tokens: float | None, price: float | None) -> dict[str, Any]:
    """Return the seconds of a step by stage, and its speed; without a mean, all completions have the longest length."""
    step = plan.work.step(mean_new_tokens)
    return {
        "mean_new_tokens": step.mean_new_tokens,
        "time": [{"stage": stage.stage, "seconds": stage.seconds, **asdict(stage)} for stage in step.stages],
        **_speed(plan, step, price),
        **plan.work.efficiency(mean_new_tokens),
    }


def alternative_lines(plan: Plan, found: Sequence[Suggestion], mean_new_tokens: float) -> list[str]:
    """Return a line for the run and for each of its alternatives, with the seconds of a step and the memory."""
    lines = [f"{f'mean {mean_new_tokens:g}':14}{'step, s':>9}{'rollout':>9}{'GiB':>8}  settings"]
    for overrides, each in ((("as configured",), plan), *((one.overrides, one.plan) for one in found)):
        step, fits = each.work.step(mean_new_tokens), "" if each.fits else "does not fit"
        seconds = f"{step.seconds:9.1f}{step.of(*ROLLOUT):9.1f}"
        lines.append(f"{fits:14}{seconds}{each.worst.total / GIB:8.2f}  {' '.join(overrides)}")
    return lines


def packed_line(plan: Plan, packed: Plan) -> str:
    """Compare a run with Tunix's learner (``plan``) to the same run with this package's packed rows (``packed``)."""
    needs = {memory.stage: memory.total / GIB for memory in plan.memory}
    stages = ", ".join(
        f"{memory.stage} {memory.total / GIB:.2f} GiB for {needs[memory.stage]:.2f}"
        for memory in packed.memory
        if memory.stage in ("logprobs", "update")
    )
    return (
        f"with this package's learner (algorithm.name=grpo): {stages}; with all completions longest, a step of "
        f"{packed.work.step().seconds:.1f} s for {plan.work.step().seconds:.1f}; it "
        f"{'fits' if packed.fits else 'does not fit'}"
    )


def suggestion_line(suggestion: Suggestion | None) -> str:
    """Return a line with overrides that make the run fit, or a line saying that none were found."""
    if suggestion is None:
        return "no change of remat, micro-batches, running rows or meshes was found to fit; take a larger slice"
    plan = suggestion.plan
    return (
        f"this fits, compiled as well: {' '.join(suggestion.overrides)} (the {plan.worst.stage} needs most and leaves "
        f"{-plan.excess / GIB:.2f} GiB; a step takes {plan.work.step().seconds:.1f} s)"
    )
