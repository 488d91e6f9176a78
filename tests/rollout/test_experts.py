"""Our layer of experts against one token at a time in NumPy, on one device and on several."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_grpo.rollout.engine import engine_mesh
from tpu_grpo.rollout.experts import AXIS, Experts

TOKENS, WIDTH, EXPERTS, PER_TOKEN, HIDDEN = 10, 6, 8, 3, 5


def reference(x: np.ndarray, logits: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    for t in range(len(x)):
        chosen = np.argsort(-logits[t])[:PER_TOKEN]
        weights = np.exp(logits[t, chosen]) / np.exp(logits[t, chosen]).sum()
        for weight, e in zip(weights, chosen, strict=True):
            gated = x[t] @ gate[e]
            out[t] += weight * ((gated / (1 + np.exp(-gated)) * (x[t] @ up[e])) @ down[e])
    return out


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_token_gets_its_experts(devices: int, crowded: bool) -> None:
    rng = np.random.default_rng(1)
    x, logits = rng.standard_normal((TOKENS, WIDTH)), rng.standard_normal((TOKENS, EXPERTS))
    if crowded:  # all tokens choose the same three, two of them on one device of four
        logits[:, [0, 1, 6]] += 10
    gate, up = rng.standard_normal((2, EXPERTS, WIDTH, HIDDEN))
    down = rng.standard_normal((EXPERTS, HIDDEN, WIDTH))
    mesh = engine_mesh(jax.devices()[:devices])
    with nnx.use_eager_sharding(False):
        layer = Experts(
            config=SimpleNamespace(hidden_size=WIDTH),
            num_experts=EXPERTS,
            num_experts_per_tok=PER_TOKEN,
            intermediate_dim=HIDDEN,
            mesh=mesh,
            weight_dtype=jnp.float32,
        )
    for param, values in ((layer.wi_0, gate), (layer.wi_1, up), (layer.wo, down)):
        param.value = jax.device_put(values.astype(np.float32), NamedSharding(mesh, P(AXIS)))
    got = nnx.jit(lambda m, *inputs: m(*inputs))(layer, x.astype(np.float32), logits.astype(np.float32))
    np.testing.assert_allclose(got, reference(x, logits, gate, up, down), atol=1e-5)
