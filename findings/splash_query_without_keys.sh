#!/usr/bin/env bash
# jax 0.10.2, splash attention (jax.experimental.pallas.ops.tpu.splash_attention): a query whose segment has no key gets
# neither zeros nor NaN. Its output is the mean of the values in the blocks that the mask makes the kernel visit, here of
# v[0:128] for the query at position 10 of a causal mask: positions after it, and all of them of another segment.
# The gradient of this output is not that of the mean either: every one of these values gets 1, not 1 / 128.
# It matters where sequences are packed: a row of padding, or a completion whose prompt lies in another segment, has
# such queries, and as soon as one of them reaches a loss, it moves the values of other people's tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - 2>"$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

TOKENS, BLOCK, WIDTH = 256, 128, 128
blocks = splash.BlockSizes(
    block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK, block_q_dkv=BLOCK, block_kv_dkv=BLOCK,
    block_kv_dkv_compute=BLOCK, block_q_dq=BLOCK, block_kv_dq=BLOCK,
)
causal = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))])
attend = splash.make_splash_mha(causal, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=True)
draw = np.random.default_rng(0)
q, k, v = (jnp.asarray(draw.normal(size=(1, TOKENS, WIDTH)), jnp.float32) for _ in range(3))

# segment ids of queries and of keys: the query at 10 is of a segment in which there is no key
of_queries = jnp.ones(TOKENS, jnp.int32).at[10].set(7)
of_keys = jnp.ones(TOKENS, jnp.int32)
segments = splash.SegmentIds(of_queries, of_keys)
out = attend(q, k, v, segment_ids=segments)[0, 10]
mean = v[0, :BLOCK].mean(axis=0)
print("query 10, which may see no key: largest |output - mean of v[0:128]| =", float(jnp.abs(out - mean).max()))
print("                                largest |output| =", float(jnp.abs(out).max()))


def read(v):
    return attend(q, k, v, segment_ids=segments)[0, 10].sum()


gradient = np.asarray(jax.grad(read)(v))[0, :, 0]
print("gradient of its output by v at positions 0, 10, 11, 127, 128:", gradient[[0, 10, 11, 127, 128]])
if float(jnp.abs(out - mean).max()) > 1e-5 or list(gradient[[0, 10, 11, 127, 128]]) != [1, 1, 1, 1, 0]:
    sys.exit("a query without a key is answered otherwise now: the behaviour changed")
PYTHON
