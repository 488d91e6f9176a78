"""The programs of a run, compiled for a slice, with the memory and FLOPs that the compiler reports for each.

The compiler's figures are kept in the user's cache directory, under ``plans``, because jax's own cache does not keep
programs that cannot run here. Delete that directory to compile anew.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax

from tpu_grpo.hosts.caching import cache_directory
from tpu_grpo.records.json_files import read_json, write_json
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.weights.transport import Compiler

Stage = Literal["rollout", "logprobs", "update", "sync"]
GRADIENTS, OPTIMIZER_STEP, SUM = "gradients of a micro-batch", "optimizer step", "sum of gradients over slices"
"""The names of the programs of an update."""
TRAIN_STEP = "Tunix's train step"
"""The name of the single program that Tunix's learner has in place of these two programs."""
TEACHER = "log-probabilities by "
"""Begins the name of a teacher's program; its name in metrics follows."""
ToLower = tuple[str, Stage, Callable[[], Any]]
"""(name, stage, lowering function) of a program."""
FAST_COMPILE_OPTIONS: Mapping[str, Any] = {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0}
"""Compiler options that cut compile time to a third; the reported temporary memory is a little larger."""


@dataclass(frozen=True)
class CompiledProgram:
    """The compiler's figures for one program, per device."""

    name: str
    stage: Stage
    argument_bytes: float = 0.0
    output_bytes: float = 0.0
    """Bytes of the results, except those written into donated arguments."""
    temporary_bytes: float = 0.0
    code_bytes: float = 0.0
    flops: float = 0.0
    """The compiler's count. Like ``accessed_bytes``, it counts the body of a loop once, and kernels not at all."""
    accessed_bytes: float = 0.0
    kernels: int = 0
    """The number of calls of Pallas kernels."""
    fits: bool = True
    """False if the compiler refused the program because of its memory; then only ``temporary_bytes`` is valid."""
    seconds: float = 0.0
    """The time that compiling took."""


def programs_to_lower(run: AbstractRun) -> Iterator[ToLower]:
    """Yield (name, stage, lowering function) for the largest programs of each stage except the weight sync."""
    shapes = run.options.shapes
    yield f"decode of {shapes.batch[-1]} rows", "rollout", lambda: run.engine.lower("decode", shapes.batch[-1])
    yield f"prefill of {shapes.prefill[-1]} tokens", "rollout", lambda: run.engine.lower("prefill", shapes.prefill[-1])
    if run.learner.forward_passes or run.config.algorithm.staleness:
        yield "log-probabilities", "logprobs", run.learner.lower_logprobs
    for number, spec in enumerate(run.config.teachers):
        stage = "rollout" if spec.mesh == "sampler" else "logprobs"
        yield f"{TEACHER}{spec.shown}", stage, partial(run.learner.lower_teacher, number)
    if run.config.algorithm.tunix is not None:
        yield TRAIN_STEP, "update", run.learner.lower_train_step
        return
    yield GRADIENTS, "update", run.learner.lower_gradients
    yield OPTIMIZER_STEP, "update", lambda: run.learner.lower_step(run.shared_leaves)


def compile_all(
    run: AbstractRun, programs: Iterable[ToLower], options: Mapping[str, Any], say: Callable[[str], None]
) -> list[CompiledProgram]:
    """Compile programs of a run, or read their figures from the cache; ``say`` gets a line per compilation."""
    compiled = []
    for name, stage, lower in programs:
        trainer = run.meshes.trainer if name != SUM else run.meshes.joined
        mesh: Any = run.engine.mesh if stage == "rollout" else trainer
        line = f"compiling {name} ({run.checkpoint.config.num_hidden_layers} layers)"
        figures = _known_figures(lower(), list(mesh.devices.flat), options, say, line)
        compiled.append(CompiledProgram(name=name, stage=stage, **figures))
    return compiled


def sync_compiler(say: Callable[[str], None]) -> Compiler:
    """Return the compiler of a weight sync that will not run, whose figures are kept as those of other programs."""

    def known(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> tuple[Callable[..., Any], int]:
        figures = _known_figures(lowered, devices, {}, say, "compiling a program of the weight sync")
        return _not_here, int(figures["temporary_bytes"])

    return known


def _not_here(*arguments: Any) -> Any:
    raise RuntimeError("a plan's programs are for devices that are not here")


def _known_figures(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any],
    say: Callable[[str], None],
    line: str,
) -> dict[str, Any]:
    """Return the figures of a program from the cache, or say the line and compile it."""
    kept = _figures_file(lowered, devices, options)
    if kept.exists():
        return read_json(kept)
    say(line)
    figures = compiled_figures(lowered, options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, figures, f".{os.getpid()}")
    return figures


def _figures_file(lowered: jax.stages.Lowered, devices: Sequence[Any], options: Mapping[str, Any]) -> Path:
    """Name the file after a digest of all that the figures depend on: program, devices, options and compiler."""
    decides = (
        lowered.as_text(),
        sorted(options.items()),
        [(device.device_kind, device.id, device.coords) for device in devices],
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        [version(name) for name in ("jax", "jaxlib", "libtpu")],
    )
    return cache_directory() / "plans" / f"{hashlib.sha256(repr(decides).encode()).hexdigest()[:24]}.json"


def compiled_figures(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a program and return the fields of `CompiledProgram` other than its name and stage.

    If the program does not fit the memory, ``temporary_bytes`` is all memory that the compiler says the program needs.
    """
    started = time.perf_counter()
    try:
        compiled: Any = lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        size = refused_bytes(str(error))
        if size is None:
            raise
        return {"temporary_bytes": size, "fits": False, "seconds": time.perf_counter() - started}
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
        "seconds": time.perf_counter() - started,
    }


def refused_bytes(message: str) -> float | None:
    """Return the bytes that, by a compiler's error, a program or a single array would use; None for other errors.

    libtpu 0.0.42 has two messages about whole programs. Both figures include the arguments, although the second
    message speaks of temporaries.
    """
    whole = re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", message) or re.search(
        r"required for HLO temporaries \(([\d.]+)([KMG])\) exceeds available HBM", message
    )
    if whole:
        return float(whole[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[whole[2]]
    single = re.search(r"RESOURCE_EXHAUSTED: Allocation \(size=(\d+)\) would exceed memory.*space=hbm", message)
    return float(single[1]) if single else None
