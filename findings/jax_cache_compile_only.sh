#!/usr/bin/env bash
# jax 0.10.2 with libtpu 0.0.42.1 compiles for a described TPU slice without a TPU (jax.experimental.topologies). With a
# persistent compilation cache, each such program is serialized and written there, but it can never be read: the next
# process finds the entry, fails to load it ("PjRtCompiler must be constructed with a Client"), says so in a warning,
# and compiles again. A planner of memory for pods that shares its cache directory with training runs therefore fills
# it with programs that save nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1 numpy==2.2.6
cat >"$folder/compile.py" <<'PYTHON'
import sys
import warnings

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
rows = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(slice_.devices[0]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(rows, rows).compile()
print("failed to read the cache:", [str(each.message)[-120:] for each in caught if "cache" in str(each.message)])
PYTHON
run() { JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" "$folder/compile.py" "$folder/cache" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }; }
first=$(run)
entries=$(find "$folder/cache" -type f -size +4k | wc -l)
second=$(run)
printf 'first process:  %s\nentries written: %s\nsecond process: %s\n' "$first" "$entries" "$second"
[[ $first == *"[]" && $entries -ge 1 && $second == *"constructed with a Client"* ]] || {
  echo "an entry is read, or no longer written: the behaviour changed"
  exit 1
}
