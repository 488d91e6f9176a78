#!/usr/bin/env bash
# google-tunix 0.1.7 with jax 0.10.2: in a bfloat16 model the gradient of an embedding's row is added up in bfloat16, place
# by place, because the derivative of an index is a scatter-add in the type of the matrix. Matrix products accumulate in
# float32, so one expects the same here. Where a token stands at 700 places with a gradient of 1 each, its row gets 256
# instead of 700 on a CPU. Frequent tokens (new lines, digits) stand at so many places of one micro-batch. In float32 the
# sum is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 flax==0.12.4 qwix==0.1.8 \
  orbax-checkpoint==0.12.8 grain==0.2.18
cat >"$folder/gradient.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3

tokens = jnp.zeros((1, 700), jnp.int32)
for kind in (jnp.bfloat16, jnp.float32):
    embedder = qwen3.Embedder(4, 8, rngs=nnx.Rngs(0), dtype=kind, param_dtype=kind)
    rows = lambda each: each.encode(tokens).astype(jnp.float32).sum()
    gradient = nnx.grad(rows)(embedder)
    (leaf,) = jax.tree.leaves(gradient)
    print(kind.__name__, leaf.dtype, float(leaf[0, 0]), end="; ")
PYTHON
found=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/gradient.py" 2>"$folder/errors") || { cat "$folder/errors"; exit 1; }
echo "the row's gradient: $found"
[[ $found == "bfloat16 bfloat16 256.0; float32 float32 700.0; " ]] || {
  echo "the behaviour changed"
  exit 1
}
