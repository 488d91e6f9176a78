#!/usr/bin/env bash
# jax 0.10.2 adds up over the CPU devices of one process in two ways. By itself it adds in memory. After
# jax.distributed.initialize, also with a single process, it adds with gloo, over TCP connections of the process to
# itself: on two cores a sum of 4 x 4,096 numbers took 1.8 ms of the processor in place of 0.27, and float32 results
# have other last bits, because gloo adds in another order. Nothing says so.
#
# It matters to programs that call initialize wherever they run, and to tests that try meshes on XLA's virtual devices:
# training a tiny model on 4 devices took a third more of the processor. But only sums by gloo equal, bit for bit, those
# of several processes with as many devices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$folder/sums.py" <<'PYTHON'
import hashlib
import os
import socket
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["NPROC"] = "4"  # as many threads as devices
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

if sys.argv[1] == "initialized":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jax.distributed.initialize(address, num_processes=1, process_id=0, coordinator_bind_address=address)
mesh = jax.make_mesh((4,), ("devices",))
numbers = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
rows = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("devices")))
add = jax.jit(lambda rows: rows.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
digests = set()
add(rows).block_until_ready()
began = time.process_time()
for _ in range(500):
    digests.add(hashlib.sha256(np.asarray(add(rows)).tobytes()).hexdigest()[:12])
print((time.process_time() - began) / 500 * 1e3, *digests)
PYTHON
for kind in alone initialized alone initialized; do
  "$folder/venv/bin/python" "$folder/sums.py" "$kind" 2>/dev/null | grep -v Gloo > "$folder/$kind.$RANDOM.txt"
done
python3 - "$folder" <<'PYTHON'
import pathlib
import sys

files = {kind: pathlib.Path(sys.argv[1]).glob(f"{kind}.*.txt") for kind in ("alone", "initialized")}
found = {kind: [path.read_text().split() for path in paths] for kind, paths in files.items()}
for kind, runs in found.items():
    for milliseconds, *digests in runs:
        print(f"{kind}: {float(milliseconds):.3f} ms of the processor a sum, results {digests}")
digests = {kind: {tuple(each[1:]) for each in runs} for kind, runs in found.items()}
alone, initialized = (min(float(each[0]) for each in found[kind]) for kind in ("alone", "initialized"))
print(f"initialized / alone: {initialized / alone:.2f}")
if len(digests["alone"]) != 1 or len(digests["initialized"]) != 1 or digests["alone"] == digests["initialized"]:
    sys.exit("the behaviour has changed: each way is to give the same bits every time, and the two other bits")
if initialized < 1.5 * alone:
    sys.exit("the behaviour has changed: a sum after initialize is no longer much slower")
PYTHON
