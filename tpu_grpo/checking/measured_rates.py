"""The speed rows of `tpu-grpo check`: they measure the rates that plans assume; the last plans a step with these.

Most rates are shares of a chip's nominal speeds (tpu_grpo/launching/tpus.py). A CPU's measured speeds serve as its
nominal speeds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tpu_grpo.checking.findings import Finding
from tpu_grpo.checking.numerics import Shared, scored_rollout
from tpu_grpo.engine.attention_probe import attend, head_counts
from tpu_grpo.hosts import own_slice, slices_of
from tpu_grpo.launching.tpus import Chip, Generation, Rates
from tpu_grpo.planning.costs import WIDE, EngineSizes, TokenCost, host_seconds
from tpu_grpo.planning.slice_plan import NO_STOP
from tpu_grpo.planning.stage_memory import resident_bytes
from tpu_grpo.planning.step_seconds import StepWork
from tpu_grpo.records.stages import Completion, Request, SampleKey, SamplingParams
from tpu_grpo.run.abstract import AbstractRun, open_abstract_checkpoint
from tpu_grpo.run.inputs import check_model
from tpu_grpo.run.meshes import build_meshes

SLOW = 0.7
"""A speed below this share of the expected speed counts as slow."""
REACHED = 0.9
"""The share of its nominal FLOP/s and memory bandwidth that a chip should reach when it does nothing else."""
CPU_LINKS = 50e6
"""Bytes per second that CPU devices must send each other: less than half of what a network of 1 Gbit/s carries."""
KERNEL_NUMBERS = 2**26
"""The attention kernel is timed with at most this many elements of queries."""
REPEATS = 3
CHIP_REMEDY = "restart the machine; see that nothing else runs on it"


def seconds_of(call: Callable[[], Any], times: int = 1) -> float:
    """Return the seconds of one call: after a first call, the median of REPEATS runs of ``times`` calls each."""
    jax.block_until_ready(call())
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready([call() for _ in range(times)])
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found)


def generation_of(shared: Shared) -> Generation:
    """Return the TPU generation of the devices; for a CPU, a made-up generation with its measured speeds."""
    if shared.generation is not None:
        return shared.generation
    flops, memory = (shared.rates[f"{name}_per_second"] for name in ("flops", "memory_bytes"))
    return Generation("cpu", "cpu", "", 1, 2, (), "", "", Chip(0, flops, memory, 1e9, 1e9))


def _timed(text: str, figures: dict[str, float], *, slow: bool = False, remedy: str = "") -> Finding:
    """Report what was timed, with a remedy if it is slow."""
    return Finding("works but slow" if slow else "works", text, remedy if slow else "", figures)


def _speed(shared: Shared, found: float, paper: float, unit: str) -> Finding:
    """Report the speed ``found``; on a TPU, compared with its nominal speed ``paper``."""
    text, figures = f"{found:,.4g} {unit}", {"per_second": found}
    if shared.generation is None:
        return _timed(text, figures)
    text = f"{text}, {found / paper:.0%} of the {paper:,.4g} of {shared.generation.name}"
    return _timed(text, figures, slow=found < SLOW * REACHED * paper, remedy=CHIP_REMEDY)


def products(shared: Shared) -> Finding:
    """Time matrix products on one device."""
    on_tpu = shared.generation is not None
    size, loops, dtype = (4096, 64, jnp.bfloat16) if on_tpu else (768, 4, jnp.float32)
    with jax.default_device(jax.local_devices()[0]):
        x = jnp.full((size, size), 1 / size, dtype)
        program = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, y: (x @ y).astype(dtype), x))
        found = 2 * size**3 * loops / seconds_of(lambda: program(x))
    shared.rates["flops_per_second"] = found
    paper = shared.generation.chip.flops_per_second if shared.generation else found
    return _speed(shared, found / 1e12, paper / 1e12, "TFLOP/s")


def bandwidth(shared: Shared) -> Finding:
    """Time reading and writing the memory of one device."""
    numbers, loops = (2**28, 16) if shared.generation else (2**24, 2)
    with jax.default_device(jax.local_devices()[0]):
        x = jnp.ones(numbers, jnp.float32)
        program = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda i, y: 0.5 * y + i.astype(jnp.float32), x))
        found = 2 * 4 * numbers * loops / seconds_of(lambda: program(x))
    shared.rates["memory_bytes_per_second"] = found
    paper = shared.generation.chip.memory_bytes_per_second if shared.generation else found
    shared.rates["memory"] = found / paper
    return _speed(shared, found / 1e9, paper / 1e9, "GB/s")


def all_reduce(devices: Sequence[Any], numbers: int) -> Callable[[], jax.Array]:
    """Return a function that sums arrays of ``numbers`` float32 numbers, one per device, over all devices."""
    mesh = Mesh(np.asarray(devices), ("all",))
    make = jax.jit(lambda: jnp.ones((len(devices), numbers)), out_shardings=NamedSharding(mesh, P("all")))
    add = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P(), check_vma=False)
    return partial(jax.jit(add), make())


def links(shared: Shared) -> Finding:
    """Time all-reduces over the devices of a slice: a large one for the bandwidth, and a tiny one for the latency."""
    slices = slices_of(jax.devices(), shared.config.meshes.slices)
    devices, chip = slices[own_slice(slices)], shared.generation
    if len(devices) == 1:
        return Finding("works", "one device, which has no links to others")
    numbers = 2**24 if chip else 2**18
    seconds = seconds_of(all_reduce(devices, numbers))
    least = seconds_of(all_reduce(devices, 8), times=10)
    found = 2 * (len(devices) - 1) / len(devices) * 4 * numbers / seconds
    paper = generation_of(shared).sent_bytes_per_second(len(devices))
    shared.rates |= {"links": found / paper, "allreduce_seconds": least}
    expected = Rates().links * paper if chip else CPU_LINKS / SLOW
    text = f"each of {len(devices)} devices sends {found / 1e9:.3g} GB/s, plans assume {expected / 1e9:.3g}"
    if not (slow := found < SLOW * expected):
        text += f"; an all-reduce takes at least {least * 1e6:.0f} us"
    remedy = "see that hosts are of one slice (or one network), and that no other program uses it"
    return _timed(text, {"bytes_per_second": found, "least_seconds": least}, slow=slow, remedy=remedy)


def kernel(shared: Shared) -> Finding:
    """Time the attention of a decode step with max_running_requests rows, on the devices of one engine."""
    build = shared.build(shared.config.model.dtype)
    options, (heads, kv_heads, width) = build.engine.options, head_counts(build.engine)
    rows = options.max_running_requests
    length = max(2, min(options.context_tokens, KERNEL_NUMBERS // (rows * heads * width)))
    q, k, v = (np.ones((rows, length, count, width), np.float32) for count in (heads, kv_heads, kv_heads))
    found = attend(build.engine, q, k, v, np.full(rows, length))
    seconds = seconds_of(found.decode, times=5)
    layer = build.engine.cache_specs[0]
    read = rows * length * 2 * kv_heads * width * layer.dtype.itemsize / build.meshes.tensor
    shared.rates["cache_bytes_per_second"] = speed = read / seconds
    text = f"{speed / 1e9:.3g} GB/s of keys and values for {rows} rows of {length} tokens"
    expected = min(Rates().cache_bytes_per_second, generation_of(shared).chip.memory_bytes_per_second)
    slow = shared.generation is not None and speed < SLOW * Rates().memory * expected and read > 2**26
    remedy = "try rollout.page_size=64, or rollout.attention=gather"
    return _timed(text, {"bytes_per_second": speed, "seconds": seconds}, slow=slow, remedy=remedy)


def prefill(shared: Shared) -> Finding:
    """Time the prefill of as many prompts as fit into one step of an engine."""
    build, config = shared.build(shared.config.model.dtype), shared.config
    length, vocabulary = config.data.max_prompt_tokens, build.checkpoint.config.vocab_size
    count, replicas = max(1, config.rollout.prefill_tokens // length), build.meshes.replicas
    rng, sampling = np.random.default_rng(5), SamplingParams(1)

    def fill() -> list[Completion]:
        ids = rng.integers(0, vocabulary, (count * replicas, length)).tolist()
        asked = [Request(tuple(line), sampling, SampleKey(0, 2, row, 0)) for row, line in enumerate(ids)]
        return build.engines.replicas.generate(asked)

    fill()
    started = time.perf_counter()
    for _ in range(REPEATS):
        fill()
    seconds, speed = (time.perf_counter() - started) / REPEATS, generation_of(shared).chip.flops_per_second
    flops = TokenCost.of(build.checkpoint).forward(count * length, length / 2, count) / build.meshes.tensor
    shared.rates["prefill"] = flops / seconds / speed
    text = f"{count * length / seconds:,.0f} tokens/s an engine, {flops / seconds / speed:.1%} of its products"
    return _timed(text, {"seconds": seconds, "tokens_per_second": count * length / seconds})


def host_time(shared: Shared) -> Finding:
    """Compare the host's seconds per launch, which the row "decode loop" measured, with those that plans assume."""
    build, seconds = shared.build("float32"), shared.rates["launch_seconds"]
    sizes = EngineSizes.of(
        build.checkpoint, tensor=build.meshes.tensor, itemsize=4, split_vocabulary=False, cache_bytes=1.0
    )
    expected = host_seconds(sizes, rows=2)
    shared.rates["host"] = seconds / expected
    text = f"{seconds * 1e3:.2f} ms of the host a launch, plans assume {expected * 1e3:.2f}"
    slow = seconds > expected / SLOW**2
    return _timed(text, {"seconds": seconds}, slow=slow, remedy="see what else runs on the host")


def learner(shared: Shared) -> Finding:
    """Time an update of a whole step whose completions all have (nearly) the greatest length."""
    build = shared.build(shared.config.model.dtype)
    data, rollout = build.config.data, build.config.rollout
    scored = scored_rollout(build, data.prompts_per_step, data.max_prompt_tokens, rollout.max_new_tokens)
    build.learner.update(scored)
    seconds = min(build.learner.update(scored).seconds for _ in range(2))
    run = AbstractRun(build.config, build.checkpoint, build.meshes, NO_STOP)
    at_peak = replace(generation_of(shared), rates=Rates(products=1.0))
    work = StepWork.of(run, at_peak, resident_bytes(run), ())
    [stage] = [stage for stage in work.step().stages if stage.stage == "update"]
    least = {**stage.beside, **stage.by_cause}["products"]
    shared.rates["products"] = least / seconds
    text = f"an update of {build.config.batch_rows} rows"
    text += f"; a model {WIDE:,} wide would reach {least / seconds:.1%} of the devices' products"
    return _timed(f"{seconds:.3g} s for {text}", {"seconds": seconds})


def plan(shared: Shared) -> Finding:
    """Estimate a step of the whole model with the measured rates; nothing is compiled."""
    rates = Rates(**{name: value for name, value in shared.rates.items() if name in Rates.__dataclass_fields__})
    known = shared.known
    with open_abstract_checkpoint(known.model) as whole:
        check_model(known, whole)
        meshes = build_meshes(known.meshes, known.model, known.environment, known.row_tokens, whole)
        run = AbstractRun(known, whole, meshes, NO_STOP)
        work = StepWork.of(run, replace(generation_of(shared), rates=rates), resident_bytes(run), ())
        planned = work.planned()
    text = f"a step of the whole model: decode {planned['decode_step'] * 1e3:.3g} ms a step, rollout "
    text += f"{planned['rollout']:.3g} s, update {planned['update']:.3g} s, sync {planned['sync']:.2g} s"
    return Finding("works", text, figures=planned)
