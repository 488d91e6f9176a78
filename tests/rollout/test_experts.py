"""Our layer of experts against one token at a time in NumPy, on one device and on several."""

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


def reference(
    x: np.ndarray, weights: np.ndarray, chosen: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    out = np.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], chosen[t], strict=True):
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
    chosen = np.argsort(-logits, axis=1)[:, :PER_TOKEN]
    weights = rng.random((TOKENS, PER_TOKEN))
    gate, up = rng.standard_normal((2, EXPERTS, WIDTH, HIDDEN))
    down = rng.standard_normal((EXPERTS, HIDDEN, WIDTH))
    mesh = engine_mesh(jax.devices()[:devices])
    with jax.set_mesh(mesh):
        layer = Experts(
            hidden_size=WIDTH, num_experts=EXPERTS, intermediate_dim=HIDDEN, mesh=mesh, weight_dtype=jnp.float32
        )
        for param, values in ((layer.wi_0, gate), (layer.wi_1, up), (layer.wo, down)):
            param.set_value(jax.device_put(values.astype(np.float32), NamedSharding(mesh, P(AXIS))))
        by_token = NamedSharding(mesh, P("data", None))
        inputs = [jax.device_put(a, by_token) for a in (x.astype(np.float32), weights.astype(np.float32), chosen)]
        got = nnx.jit(lambda m, *inputs: m(*inputs, out_sharding=by_token))(layer, *inputs)
    np.testing.assert_allclose(got, reference(x, weights, chosen, gate, up, down), atol=1e-5)
