"""Our layer of experts against one token at a time in NumPy, on one device and on several."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.kernels.fused_moe.v1 import tuned_block_configs
from sgl_jax.srt.kernels.fused_moe.v1.kernel import FusedMoEBlockConfig

from tests.engine.interpreter import interpreted_kernels
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.engine.experts import AXIS, Experts, FusedExperts
from tpu_grpo.engine.options import Shapes, check_experts, check_tokens
from tpu_grpo.records.errors import ConfigError

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


# --- the fused kernel -------------------------------------------------------------------------------------------------


def test_the_fused_kernel_computes_the_same_on_one_device() -> None:
    """Interpreted; on several devices the interpreter does not come to an end. Widths are whole tiles of a TPU."""
    rng = np.random.default_rng(1)
    width, hidden, tokens = 256, 128, 8
    x, logits = rng.standard_normal((tokens, width)), rng.standard_normal((tokens, EXPERTS))
    chosen = np.argsort(-logits, axis=1)[:, :PER_TOKEN]
    weights = rng.random((tokens, PER_TOKEN))
    gate, up = 0.1 * rng.standard_normal((2, EXPERTS, width, hidden))
    down = 0.1 * rng.standard_normal((EXPERTS, hidden, width))
    mesh = engine_mesh(jax.devices()[:1])
    sizes = {"bt": 8, "btc": 8, "bts": 8, "bse": 128} | {"bf": 128, "bfc": 128}
    blocks = FusedMoEBlockConfig(**sizes, bd1=256, bd1c=256, bd2=256, bd2c=256)
    chooses = mock.patch.object(tuned_block_configs, "get_tuned_fused_moe_block_config", return_value=blocks)
    with jax.set_mesh(mesh), interpreted_kernels(), chooses:
        layer = FusedExperts(
            hidden_size=width, num_experts=EXPERTS, intermediate_dim=hidden, mesh=mesh, weight_dtype=jnp.float32
        )
        for param, values in ((layer.wi_0, gate), (layer.wi_1, up), (layer.wo, down)):
            param.set_value(jax.device_put(values.astype(np.float32), NamedSharding(mesh, P(AXIS))))
        by_token = NamedSharding(mesh, P("data", None))
        given = (x.astype(np.float32), weights.astype(np.float32), chosen.astype(np.int32))
        got = layer(*(jax.device_put(a, by_token) for a in given), out_sharding=by_token)
    np.testing.assert_allclose(got, reference(x, weights, chosen, gate, up, down), atol=1e-5)


def test_the_fused_kernel_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="rollout.experts=fused needs a TPU, the sampler's devices are cpu; use rag"):
        check_experts("fused", "cpu")
    assert [check_experts("fused", "tpu"), check_experts("ragged", "cpu")] == ["fused", "ragged"]
    check_tokens(Shapes(batch=(8, 64), prefill=(64, 2048), context=128), 8)
    with pytest.raises(ConfigError, match=r"over the 8 devices of a replica, got \[12\]; set rollout.batch_pad"):
        check_tokens(Shapes(batch=(8, 12), prefill=(64,), context=128), 8)
    with pytest.raises(ConfigError, match=r"got \[100\]; set rollout.prefill_tokens to multiples of 8, or rollout.exp"):
        check_tokens(Shapes(batch=(8,), prefill=(64, 100), context=128), 8)
