"""Measures which operations take the time of an update on a CPU: python -m benchmarks.products [--rounds N]

Model, full rows and learner are those of ``benchmarks.update``, on one core. The profiler measures each operation of
the compiled program. Shown are sums over an update of undisturbed times: the 10 % quantile over an operation's
executions, which hardly depends on the load of the machine.

Matrix products, by shape (rows x summed x columns, in batches where attention has them), forward and backward:

    GFLOP         of an update
    plain         GFLOP/s of a program that makes nothing but such products
    update        GFLOP/s inside the update, where a product finds other inputs in the caches
    at plain      CPU seconds of an update, if its products ran like plain ones

A second table has the seconds of all other operations by part of the model. The rest of the CPU seconds of the update
is spent between operations: in the operating system's kernel, in dispatch and in Python.
"""

import argparse
import glob
import os
import re
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from benchmarks.update import SIZES, VOCABULARY, make_config, workloads
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.learner.building import build_parts
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model

PROMPT_TOKENS, NEW_TOKENS, COPIES = 32, 64, 2
PARTS = {"feed_forward": "SwiGLU", "attention": "attention", "rms_norm": "norms", "while": "output head"}
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A matrix product of the compiled program: the shapes of its factors, and dimensions for lax.dot_general."""

    left: Dims
    right: Dims
    dims: tuple[tuple[Dims, Dims], tuple[Dims, Dims]]

    @property
    def sizes(self) -> Dims:
        """The numbers of batches, rows, summed elements and columns."""
        (summed, _), (batch, _) = self.dims
        batches, inner = prod(self.left[i] for i in batch), prod(self.left[i] for i in summed)
        return batches, prod(self.left) // batches // inner, inner, prod(self.right) // batches // inner

    @property
    def flops(self) -> int:
        """The number of FLOPs, two for each multiplication."""
        return 2 * prod(self.sizes)


@dataclass(frozen=True)
class Operation:
    """An operation of the compiled program."""

    part: str
    backward: bool
    product: Product | None


def operations(text: str) -> dict[str, Operation]:
    """Parse the text of a compiled program; returns its operations by name, without those inside of fusions."""
    bodies, body = dict[str, list[str]](), list[str]()
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            body = bodies.setdefault(head[1], [])
        elif re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line):
            body.append(line)
    products = {name: _product(body) for name, body in bodies.items()}
    found = {}
    for line in (line for body in bodies.values() for line in body):
        name, source = re.search(r"%?([\w.\-]+) = ", line), re.search(r'op_name="([^"]*)"', line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        own = next((body for body in bodies.values() if line in body), [])
        product = products.get(called[1]) if called else _product([*own[: own.index(line)], line], line)
        path = source[1] if source else ""
        part = next((label for key, label in PARTS.items() if key in path), "sums, embedding, layouts")
        if name:
            found[name[1]] = Operation(part, "transpose(jvp" in path, product)
    return found


def _product(body: list[str], line: str | None = None) -> Product | None:
    """Parse the matrix product in a fusion's body, or in one line of a body; None if there is none."""
    line = line or next((line for line in body if " dot(" in line), "")
    match = re.search(r" dot\(([^)]*)\)", line)
    if match is None:
        return None
    shapes = {m[1]: _dims(m[2]) for other in body if (m := re.search(r"%?([\w.\-]+) = \w+\[([\d,]*)\]", other))}
    left, right = (shapes[name.strip().split(" ")[-1].lstrip("%")] for name in match[1].split(", "))
    named = {key: _dims(value) for key, value in re.findall(r"([lr]hs_\w+_dims)=\{([\d,]*)\}", line)}
    sides = [
        (named.get(f"lhs_{kind}_dims", ()), named.get(f"rhs_{kind}_dims", ())) for kind in ("contracting", "batch")
    ]
    return Product(left, right, (sides[0], sides[1]))


def _dims(text: str) -> Dims:
    return tuple(map(int, filter(None, text.split(","))))


def plain_rate(product: Product, rounds: int) -> float:
    """Measure the GFLOP/s of a program that consists of COPIES such products."""
    rng = np.random.default_rng(0)
    lefts = [jnp.asarray(rng.normal(size=product.left), jnp.float32) for _ in range(COPIES)]
    right = jnp.asarray(rng.normal(size=product.right), jnp.float32)
    program = jax.jit(lambda lefts, right: [lax.dot_general(left, right, product.dims) for left in lefts])
    taken = []
    for _ in range(20 * rounds):
        began = time.perf_counter()
        jax.block_until_ready(program(lefts, right))
        taken.append(time.perf_counter() - began)
    return COPIES * product.flops / undisturbed(taken) / 1e9


def undisturbed(taken: list[float]) -> float:
    """Return the 10 % quantile of the times."""
    return quantiles(taken, n=10, method="inclusive")[0] if len(taken) > 1 else taken[0]


def traced(run: Any, rounds: int) -> dict[str, list[float]]:
    """Run under the profiler; returns the seconds of every execution of each operation of the gradients' program."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(rounds):
                run()
        (path,) = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for event in (event for line in plane.lines for event in line.events):
                if dict(event.stats).get("hlo_module") == "jit_accumulated":
                    found[event.name].append(event.duration_ns / 1e9)
    return found


def report(ops: dict[str, Operation], times: dict[str, list[float]], rounds: int) -> None:
    """Print the tables of matrix products and of all other operations."""
    columns = ("GFLOP", "plain GFLOP/s", "update GFLOP/s", "seconds", "at plain")
    products = Table("products: rows x summed x columns", *columns)
    groups: dict[Any, list[tuple[Product, float, float]]] = defaultdict(list)
    parts: dict[tuple[str, bool], float] = defaultdict(float)
    for name, taken in times.items():
        operation, runs = ops.get(name), len(taken) / rounds
        if operation is None or name.startswith(("while", "call")):
            continue
        if operation.product is None:
            parts[operation.part, operation.backward] += undisturbed(taken) * runs
        else:
            found = (operation.product, runs, undisturbed(taken) * runs)
            groups[operation.product.sizes, operation.backward].append(found)
    totals = [0.0, 0.0, 0.0]
    for (sizes, backward), members in sorted(groups.items(), key=lambda item: -sum(m[2] for m in item[1])):
        gflop, seconds = sum(p.flops * n for p, n, _ in members) / 1e9, sum(m[2] for m in members)
        rate = plain_rate(members[0][0], rounds)
        batches = f"{sizes[0]} of " if sizes[0] > 1 else ""
        label = f"{'backward' if backward else 'forward'} {batches}{' x '.join(map(str, sizes[1:]))}"
        cells = (gflop, rate, gflop / seconds, seconds, gflop / rate)
        products.add_row(label, *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (1, 0, 0, 3, 3), strict=True)))
        totals = [total + new for total, new in zip(totals, (gflop, seconds, gflop / rate), strict=True)]
    products.add_row("all", f"{totals[0]:.1f}", "", "", f"{totals[1]:.3f}", f"{totals[2]:.3f}")
    others = Table("beside the products", "forward s", "backward s")
    for part in sorted({part for part, _ in parts}):
        others.add_row(part, f"{parts[part, False]:.3f}", f"{parts[part, True]:.3f}")
    others.add_row("all", *(f"{sum(s for (_, back), s in parts.items() if back == way):.3f}" for way in (False, True)))
    for table in (products, others):
        Console(width=120).print(table)


def main() -> None:
    """Measure an update of full rows, and its matrix products alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before jax counts the cores
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = read_checkpoint(write_random_qwen3(Path(directory) / "model", vocab=VOCABULARY, **SIZES))
        model = load_model(checkpoint, mesh, dtype=jnp.dtype("float32"), remat="none")
        config = make_config(Path(directory) / "run", PROMPT_TOKENS, NEW_TOKENS)
        inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
        learner, scored = Learner(config, inputs), workloads(config)["full"]
        learner.share(())
        ops = operations(build_parts(config, inputs).lower_gradients().compile().as_text() or "")
        spent = []
        for _ in range(rounds + 1):
            began = time.process_time()
            learner.update(scored)
            spent.append(time.process_time() - began)
        report(ops, traced(lambda: learner.update(scored), rounds), rounds)
        print(f"CPU seconds of an update: {median(spent[1:]):.2f}")
        learner.close()


if __name__ == "__main__":
    main()
