#!/usr/bin/env bash
# google-tunix 0.1.7: the loader of Gemma 3 checkpoints reads an lm_head.weight and throws it away, without a word. Two
# checkpoints that differ in nothing but this tensor (one has none, in the other every row is another one than the
# embedding's) load as the same model, which takes the embedding as its output head: their logits are equal.
# It matters because a fine-tuned or extended Gemma 3 may be saved with a head of its own (tie_word_embeddings: false in
# transformers): it then trains from another model than the one on the disk, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 flax==0.12.4 qwix==0.1.8 \
  orbax-checkpoint==0.12.8 grain==0.2.18
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder" 2>"$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tunix.models.gemma3 import model, params_safetensors

ROWS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 64, 16, 32, 2, 1, 8
draw = np.random.default_rng(0)


def random(*shape):
    return draw.normal(0, 0.3, shape).astype(np.float32)


layer = "model.layers.0"
tensors = {
    "model.embed_tokens.weight": random(ROWS, WIDTH),
    "model.norm.weight": random(WIDTH),
    f"{layer}.self_attn.q_proj.weight": random(HEADS * HEAD, WIDTH),
    f"{layer}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, WIDTH),
    f"{layer}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, WIDTH),
    f"{layer}.self_attn.o_proj.weight": random(WIDTH, HEADS * HEAD),
    f"{layer}.self_attn.q_norm.weight": random(HEAD),
    f"{layer}.self_attn.k_norm.weight": random(HEAD),
    f"{layer}.mlp.gate_proj.weight": random(HIDDEN, WIDTH),
    f"{layer}.mlp.up_proj.weight": random(HIDDEN, WIDTH),
    f"{layer}.mlp.down_proj.weight": random(WIDTH, HIDDEN),
}
names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
tensors |= {f"{layer}.{name}_layernorm.weight": random(WIDTH) for name in names}
head = random(ROWS, WIDTH)
config = model.ModelConfig(
    num_layers=1, num_embed=ROWS, embed_dim=WIDTH, hidden_dim=HIDDEN, num_heads=HEADS, head_dim=HEAD,
    num_kv_heads=KV_HEADS, sliding_window_size=8, param_dtype=jnp.float32,
)
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
tokens = jnp.arange(1, 6)[None]
positions, mask = jnp.arange(5)[None], jnp.tril(jnp.ones((5, 5), bool))[None]
found = []
for name, extra in (("tied", {}), ("untied", {"lm_head.weight": head})):
    directory = Path(sys.argv[1], name)
    directory.mkdir()
    save_file(tensors | extra, directory / "model.safetensors")
    with mesh:
        loaded = params_safetensors.create_model_from_safe_tensors(str(directory), config, mesh, dtype=jnp.float32)
        logits, _ = loaded(tokens, positions, None, mask)
    found.append(np.asarray(logits))
difference = float(np.abs(found[0] - found[1]).max())
print("largest difference of the logits with and without a head of its own:", difference)
if difference != 0.0:
    sys.exit("Tunix reads an untied head of Gemma 3 now: the behaviour changed")
PYTHON
