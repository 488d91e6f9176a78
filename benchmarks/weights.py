"""Measures a weight sync: python -m benchmarks.weights [--rounds N]

Parameters of about 0.5 GB (Qwen3, 8 layers of width 1,024, float32) move on four CPU devices, from the trainer's meshes
to the sampler's. For each pair of meshes, the contenders take turns, round after round in one process; shown are
medians, and medians of each round's ratios. Each call gets new arrays, as after an update: jax keeps the host's copy of
an array, and would not copy it again.

    ours      WeightSync: compiled programs, groups within 512 MiB of temporary memory
    copy      a plain copy of the bytes that ours writes, in the sampler's layout: one program, no communication
    put       jax.device_put into the sampler's layout of leaves that have its shapes already
    tunix     transfer_state_with_mappings with its reshard, as shipped (it collects garbage every time)
    tunix -gc the same without the collection

Two further columns: the temporary memory per device that the compiled programs report, and the largest rise of resident
memory while ours ran.
"""

import argparse
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from rich.table import Table
from tunix.generate import utils as tunix_transfer
from tunix.models.qwen3.mapping_sglang_jax import _to_sglang_jax_mappings
from tunix.rl import reshard as tunix_reshard

from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.families.family import DecoderConfig
from tpu_grpo.models.families.qwen import QWEN3
from tpu_grpo.weights.sync import WeightSync

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, VOCAB = 8, 1024, 16, 8, 64, 3072, 16384
PAIRS = [
    ("shared", 4, 1, 4),
    ("shared", 4, 1, 2),
    ("shared", 4, 1, 1),
    ("shared", 2, 2, 4),
    ("shared", 2, 2, 2),
    ("shared", 1, 4, 4),
    ("split", 2, 1, 2),
    ("split", 2, 1, 1),
]
"""Pairs of meshes: (layout, the trainer's fsdp and tp, the sampler's tensor)."""
Leaves = dict[str, jax.Array]
Specs = dict[str, jax.ShapeDtypeStruct]
Contender = Callable[[Leaves], Any]
"""Moves the trainer's parameters to the sampler's devices, and waits until they have arrived."""


def trainer_leaves(devices: list[Any], fsdp: int, tp: int) -> Leaves:
    """Make Qwen3's parameters with Tunix's shardings."""
    mesh = Mesh(np.asarray(devices).reshape(fsdp, tp), ("fsdp", "tp"))
    layer = {
        "input_layernorm.w": ((HIDDEN,), P()),
        "post_attention_layernorm.w": ((HIDDEN,), P()),
        "attn.q_norm.w": ((WIDTH,), P()),
        "attn.k_norm.w": ((WIDTH,), P()),
        "attn.q_proj.w": ((HIDDEN, HEADS, WIDTH), P("fsdp", "tp", None)),
        "attn.k_proj.w": ((HIDDEN, KV_HEADS, WIDTH), P("fsdp", "tp", None)),
        "attn.v_proj.w": ((HIDDEN, KV_HEADS, WIDTH), P("fsdp", "tp", None)),
        "attn.o_proj.w": ((HEADS, WIDTH, HIDDEN), P("tp", None, "fsdp")),
        "mlp.gate_proj.kernel": ((HIDDEN, FFN), P("fsdp", "tp")),
        "mlp.up_proj.kernel": ((HIDDEN, FFN), P("fsdp", "tp")),
        "mlp.down_proj.kernel": ((FFN, HIDDEN), P("tp", "fsdp")),
    }
    shapes = {"embedder.input_embedding": ((VOCAB, HIDDEN), P("tp", "fsdp")), "final_norm.w": ((HIDDEN,), P())}
    shapes |= {f"layers.{n}.{name}": leaf for n in range(LAYERS) for name, leaf in layer.items()}
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.device_put(make(key, shape), NamedSharding(mesh, spec))
        for key, (name, (shape, spec)) in zip(keys, shapes.items(), strict=True)
    }


def sampler_specs(devices: list[Any], tensor: int) -> Specs:
    """Return specs of the same parameters with sglang-jax's shardings; the vocabulary is sharded."""
    mesh = engine_mesh(devices, len(devices) // tensor)
    queries, keys = HEADS * WIDTH, KV_HEADS * WIDTH
    layer = {
        "input_layernorm.scale": ((HIDDEN,), P()),
        "post_attention_layernorm.scale": ((HIDDEN,), P()),
        "self_attn.q_norm.scale": ((WIDTH,), P()),
        "self_attn.k_norm.scale": ((WIDTH,), P()),
        "self_attn.q_proj.weight": ((HIDDEN, queries), P(None, "tensor")),
        "self_attn.k_proj.weight": ((HIDDEN, keys), P(None, "tensor")),
        "self_attn.v_proj.weight": ((HIDDEN, keys), P(None, "tensor")),
        "self_attn.o_proj.weight": ((queries, HIDDEN), P("tensor", None)),
        "mlp.gate_proj.weight": ((HIDDEN, FFN), P(None, "tensor")),
        "mlp.up_proj.weight": ((HIDDEN, FFN), P(None, "tensor")),
        "mlp.down_proj.weight": ((FFN, HIDDEN), P("tensor", None)),
    }
    shapes = {
        "model.embed_tokens.embedding": ((VOCAB, HIDDEN), P("tensor", None)),
        "model.norm.scale": ((HIDDEN,), P()),
    }
    shapes |= {f"model.layers.{n}.{name}": leaf for n in range(LAYERS) for name, leaf in layer.items()}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype("float32"), sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }


def nested(leaves: dict[str, Any]) -> nnx.State:
    """Return a state whose paths are the dotted names."""
    paths = {tuple(int(p) if p.isdigit() else p for p in name.split(".")): leaf for name, leaf in leaves.items()}
    return nnx.State.from_flat_path({path: nnx.Param(leaf) for path, leaf in paths.items()})


def tunix_sync(target: Specs) -> Contender:
    """Return Tunix's transfer into existing arrays; its map is for another root name than this sglang-jax has."""
    mappings = {
        name: (to.replace("model.", "transformer.", 1), spec) for name, (to, spec) in _to_sglang_jax_mappings().items()
    }
    there = nested({n: jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding) for n, s in target.items()})

    def run(source: Leaves) -> Any:
        moved = tunix_transfer.transfer_state_with_mappings(
            nested(source), there, mappings, transpose_keys={}, reshard_fn=tunix_reshard.reshard_pytree
        )
        return jax.block_until_ready(jax.tree.leaves(moved))

    return run


@contextmanager
def resident_peak() -> Iterator[list[int]]:
    """Yield a list that holds the largest rise of resident memory during the block, in bytes."""
    process, stop, rise = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.001):
            rise[0] = max(rise[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield rise
    finally:
        stop.set()
        thread.join()


def measure(layout: str, fsdp: int, tp: int, tensor: int, rounds: int) -> tuple[dict[str, list[float]], int, int]:
    """Return each contender's seconds per round, the programs' temporary bytes, and the rise of resident memory."""
    devices = jax.devices()
    own, theirs = (devices, devices) if layout == "shared" else (devices[:2], devices[2:])
    source, target = trainer_leaves(own, fsdp, tp), sampler_specs(theirs, tensor)
    config = DecoderConfig(VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, WIDTH, 1e-6, 1e6, tie_word_embeddings=False)
    sync = WeightSync(Checkpoint(Path(), {}, QWEN3, config, {}).weight_rules, source, target)
    moved = [move.target for move in sync.moves if not move.aliased]
    weights, _ = sync(source)
    plain = {name: jnp.copy(weights[name]) for name in moved}
    copy = jax.jit(lambda leaves: {name: jnp.copy(leaf) for name, leaf in leaves.items()})
    there = {name: target[name].sharding for name in moved}
    shaped = jax.jit(lambda leaves: {m.target: m.result([leaves[m.source]]) for m in sync.moves if not m.aliased})
    contenders: dict[str, Contender] = {
        "ours": sync,
        "copy": lambda _: jax.block_until_ready(copy(plain)),
        "put": lambda leaves: jax.block_until_ready(jax.device_put(leaves, there)),
    }
    if layout == "shared":  # Tunix's reshard is device_put, which on several hosts refuses other devices
        contenders |= {"tunix": tunix_sync(target), "tunix -gc": without_gc(tunix_sync(target))}
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            leaves = jax.block_until_ready((shaped if name == "put" else copy)(source))
            began = time.perf_counter()
            run(leaves)
            if number:
                spent[name].append(time.perf_counter() - began)
    gc.collect()
    with resident_peak() as rise:
        sync(source)
    return spent, sync.temporary_bytes, rise[0]


def without_gc(run: Contender) -> Contender:
    """Return the same contender with ``gc.collect`` doing nothing."""

    def quiet(source: Leaves) -> Any:
        with mock.patch.object(gc, "collect", return_value=0):
            return run(source)

    return quiet


def main() -> None:
    """Measure every pair of meshes, and print a table with a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    ratios = [("ours", "copy"), ("ours", "put"), ("tunix", "ours"), ("tunix -gc", "ours")]
    columns = ("meshes", "ours, ms", *map(" / ".join, ratios), "temporary MiB", "resident MiB")
    table = Table(*columns, title="weight sync, 0.5 GB, 4 devices")
    for pair in PAIRS:
        spent, temporary, rise = measure(*pair, rounds)
        layout, fsdp, tp, tensor = pair
        cells = [f"{layout} fsdp {fsdp} tp {tp} -> tensor {tensor}", f"{1e3 * median(spent['ours']):.0f}"]
        cells += [ratio(spent, *pair) for pair in ratios]
        table.add_row(*cells, f"{temporary / 2**20:.0f}", f"{rise / 2**20:.0f}")
    Console(width=130).print(table)


def ratio(spent: dict[str, list[float]], this: str, that: str) -> str:
    """Return the median over rounds of ``this`` divided by ``that``, as text; "-" if ``this`` was not measured."""
    if this not in spent:
        return "-"
    return f"{median(a / b for a, b in zip(spent[this], spent[that], strict=True)):.2f}"


if __name__ == "__main__":
    main()
