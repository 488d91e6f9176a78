"""The programs of a run, compiled for a slice: what each needs and how much it computes."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tpu_grpo.config import RunConfig
from tpu_grpo.planning.memory import remember, remembered
from tpu_grpo.run.abstract import AbstractRun

Stage = Literal["rollout", "logprobs", "update", "sync"]
QUICK: Mapping[str, Any] = {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0}
"""Compiler options that take a third of the time; temporary memory comes out a little larger."""


@dataclass(frozen=True)
class Compiled:
    """One program, per device."""

    name: str
    stage: Stage
    argument_bytes: float
    output_bytes: float
    """Without what is written into arguments."""
    temporary_bytes: float
    code_bytes: float
    flops: float
    """As the compiler counts them: a loop once, and no kernels."""
    accessed_bytes: float
    """Likewise."""
    kernels: int
    """Calls of Pallas kernels."""
    fits: bool
    """False when the compiler refused it for its memory; then only the temporary memory says anything."""
    seconds: float
    """Of compiling."""


def lowered(outline: AbstractRun) -> Iterator[tuple[str, Stage, Callable[[], Any]]]:
    """(name, stage, how to lower it) of the programs that need most, but for those of the weight sync."""
    shapes, config = outline.options.shapes, outline.config
    yield f"decode of {shapes.batch[-1]} rows", "rollout", lambda: outline.engine.lower("decode", shapes.batch[-1])
    yield (
        f"prefill of {shapes.prefill[-1]} tokens",
        "rollout",
        lambda: outline.engine.lower("prefill", shapes.prefill[-1]),
    )
    if takes_logprobs(config):
        yield "log-probabilities", "logprobs", outline.learner.lower_logprobs
    yield "update", "update", outline.learner.lower_update


def takes_logprobs(config: RunConfig) -> bool:
    """Whether a step has a forward pass of its own: of the reference, of the old policy, or both."""
    return config.algorithm.beta > 0.0 or config.algorithm.old_policy == "trainer"


def compile_all(outline: AbstractRun, options: Mapping[str, Any], say: Callable[[str], None]) -> list[Compiled]:
    """Compile every program of a run; ``say`` is told what is under way."""
    found = []
    for name, stage, lower in lowered(outline):
        mesh = outline.engine.mesh if stage == "rollout" else outline.meshes.trainer
        program = lower(), list(mesh.devices.flat)
        figures = remembered(program, options)
        if figures is None:
            say(f"compiling {name} ({outline.checkpoint.config.num_hidden_layers} layers)")
            figures = measured(program[0], options)
            remember(program, options, figures)
        found.append(Compiled(name=name, stage=stage, **figures))
    return found


def measured(program: jax.stages.Lowered, options: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a program: what `Compiled` says but for name and stage. One that does not fit says what it would use."""
    started = time.perf_counter()
    try:
        compiled: Any = program.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        size = refused_bytes(str(error))
        if size is None:
            raise
        nothing = dict.fromkeys(("argument_bytes", "output_bytes", "code_bytes", "flops", "accessed_bytes"), 0.0)
        return nothing | {"temporary_bytes": size, "kernels": 0, "fits": False, "seconds": _since(started)}
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "accessed_bytes": cost.get("bytes accessed", 0.0),
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "fits": True,
        "seconds": _since(started),
    }


def refused_bytes(message: str) -> float | None:
    """What a program would use, or one of its arrays if that alone is too large; None of other errors."""
    if used := re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", message):
        return float(used[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[used[2]]
    single = re.search(r"RESOURCE_EXHAUSTED: Allocation \(size=(\d+)\) would exceed memory.*space=hbm", message)
    return float(single[1]) if single else None


def _since(started: float) -> float:
    return time.perf_counter() - started
