#!/usr/bin/env bash
# sglang-jax 0.1.0rc0: quantize_tensor, with which its quantized models make int8 weights, does not round: it cuts the
# fraction off. So every weight moves towards zero: normally distributed matrices of 2,048 x 2,048 become 1.1 % too
# small (with rounding 0.0 %), and the mean error is twice that of rounding. A scale of the outputs that
# shrinks in every layer is not noise that averages out.
# It matters wherever an int8 policy is compared with the trained one: half of the difference is this, not the 8 bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --pre sglang-jax==0.1.0rc0 jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>"$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import sys

import jax.numpy as jnp
import numpy as np
from sgl_jax.srt.utils.quantization.quantization_utils import quantize_tensor

quantized, scale = quantize_tensor(jnp.int8, jnp.asarray([[1.0, 2.9, -2.9, 126.5, 127.0]]), axis=1)
print("[1.0, 2.9, -2.9, 126.5, 127.0] with the scale", np.asarray(scale).ravel(), "->", np.asarray(quantized)[0])
weights = np.random.default_rng(0).normal(0, 0.02, (2048, 2048)).astype(np.float32)
for axis in (0, 1):
    quantized, scale = quantize_tensor(jnp.int8, jnp.asarray(weights), axis=axis)
    scale = np.expand_dims(np.asarray(scale).reshape(-1), axis)
    back = np.asarray(quantized, np.float32) * scale
    rounded = np.round(weights / scale) * scale
    shrinks = [1 - float((values * weights).sum() / (weights * weights).sum()) for values in (back, rounded)]
    errors = [float(np.abs(values - weights).mean()) for values in (back, rounded)]
    print(f"axis {axis}: shrinks by {shrinks[0]:.2%} (rounded: {shrinks[1]:.2%}); error {errors[0] / errors[1]:.2f} of rounding's")
    if not 0.005 < shrinks[0] < 0.05 or abs(shrinks[1]) > 0.001:
        sys.exit("quantize_tensor shrinks weights otherwise now: the behaviour changed")
PYTHON
