"""The programs of a run, compiled for a slice: what each needs and how much it computes."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tpu_grpo.config import RunConfig
from tpu_grpo.outline import Outline

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


def lowered(outline: Outline) -> Iterator[tuple[str, Stage, Callable[[], Any]]]:
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


def compile_all(outline: Outline, options: Mapping[str, Any], say: Callable[[str], None]) -> list[Compiled]:
    """Compile every program of a run; ``say`` is told what is under way."""
    found = []
    for name, stage, lower in lowered(outline):
        say(f"compiling {name} ({outline.checkpoint.config.num_hidden_layers} layers)")
        found.append(compile_one(name, stage, lower, options))
    return found


def compile_one(name: str, stage: Stage, lower: Callable[[], Any], options: Mapping[str, Any]) -> Compiled:
    """Compile a program; one that does not fit says by how much."""
    started, program = time.perf_counter(), lower()
    try:
        compiled = program.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", str(error))
        if used is None:
            raise
        size = float(used[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[used[2]]
        return Compiled(name, stage, 0.0, 0.0, size, 0.0, 0.0, 0.0, 0, False, time.perf_counter() - started)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return Compiled(
        name=name,
        stage=stage,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
        kernels=compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        fits=True,
        seconds=time.perf_counter() - started,
    )
