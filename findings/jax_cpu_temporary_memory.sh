#!/usr/bin/env bash
# jax 0.10.2 on CPUs allocates the temporary memory of a compiled program with malloc at every run, as one block, and
# frees it at the end. glibc (2.36) maps blocks of more than 32 MiB anew each time, and also blocks that do not fit the
# 64 MiB heaps of threads, so that the kernel clears every page again at its first use: a program with 48 MiB takes
# about 17,000 page faults at every run, one with 27 MiB about 1,000. In a training step of a small model, whose
# passes took about 29,000 each, that was a fifth of the time. glibc's tunables keep the memory; the mmap threshold
# alone cannot, because 32 MiB is its limit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$folder/faults.py" <<'PYTHON'
import resource
import sys

import jax
import jax.numpy as jnp


def loss(x):
    y = x
    for _ in range(6):
        y = jnp.tanh(y @ y) + jnp.flip(y)
    return y.sum()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


size, least, most = map(int, sys.argv[1:])
given = jnp.full((size, size), 1e-3)
program = jax.jit(jax.grad(loss)).lower(given).compile()
for _ in range(5):
    program(given).block_until_ready()
before = faults()
for _ in range(10):
    program(given).block_until_ready()
found = (faults() - before) / 10
memory = program.memory_analysis().temp_size_in_bytes / 2**20
print(f"{memory:.0f} MiB of temporary memory: {found:,.0f} page faults a run")
if not least <= found <= most:
    sys.exit(f"the behaviour has changed: {least:,} to {most:,} page faults were seen with jax 0.10.2")
PYTHON
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/faults.py" 768 0 3000
"$folder/venv/bin/python" "$folder/faults.py" 1024 10000 30000
echo "with memory that glibc keeps:"
tunables=mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=1073741824:glibc.malloc.top_pad=67108864
GLIBC_TUNABLES=glibc.malloc.$tunables "$folder/venv/bin/python" "$folder/faults.py" 1024 0 6000
