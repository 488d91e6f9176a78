"""The plan of a sync and its numbers, leaf by leaf; the engine's use of them is tested in tests/engine."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.models.families.family import DecoderConfig
from tpu_grpo.models.families.leaves import InputsFirst, WeightRule
from tpu_grpo.models.families.qwen import QWEN3
from tpu_grpo.observe.process_metrics import CompilationCounter
from tpu_grpo.records.errors import WeightsError
from tpu_grpo.weights.plan import Spec, plan_sync
from tpu_grpo.weights.sync import WeightSync

HEADS, KV_HEADS, WIDTH, HIDDEN, FFN, VOCAB = 4, 2, 3, 8, 6, 10
RULES = QWEN3.weight_rules(DecoderConfig(VOCAB, HIDDEN, FFN, 2, HEADS, KV_HEADS, WIDTH, 1e-6, 1e6, False))
LAYER = {
    "input_layernorm.w": (HIDDEN,),
    "post_attention_layernorm.w": (HIDDEN,),
    "attn.q_norm.w": (WIDTH,),
    "attn.k_norm.w": (WIDTH,),
    "attn.q_proj.w": (HIDDEN, HEADS, WIDTH),
    "attn.k_proj.w": (HIDDEN, KV_HEADS, WIDTH),
    "attn.v_proj.w": (HIDDEN, KV_HEADS, WIDTH),
    "attn.o_proj.w": (HEADS, WIDTH, HIDDEN),
    "mlp.gate_proj.kernel": (HIDDEN, FFN),
    "mlp.up_proj.kernel": (HIDDEN, FFN),
    "mlp.down_proj.kernel": (FFN, HIDDEN),
}
SAMPLER_LAYER = {
    "input_layernorm.scale": ((HIDDEN,), P()),
    "post_attention_layernorm.scale": ((HIDDEN,), P()),
    "self_attn.q_norm.scale": ((WIDTH,), P()),
    "self_attn.k_norm.scale": ((WIDTH,), P()),
    "self_attn.q_proj.weight": ((HIDDEN, HEADS * WIDTH), P(None, "tensor")),
    "self_attn.k_proj.weight": ((HIDDEN, KV_HEADS * WIDTH), P(None, "tensor")),
    "self_attn.v_proj.weight": ((HIDDEN, KV_HEADS * WIDTH), P(None, "tensor")),
    "self_attn.o_proj.weight": ((HEADS * WIDTH, HIDDEN), P("tensor", None)),
    "mlp.gate_proj.weight": ((HIDDEN, FFN), P(None, "tensor")),
    "mlp.up_proj.weight": ((HIDDEN, FFN), P(None, "tensor")),
    "mlp.down_proj.weight": ((FFN, HIDDEN), P("tensor", None)),
}


def trainer(fsdp: int = 1, *, tied: bool = False, layers: int = 2) -> dict[str, jax.Array]:
    """Distinct numbers in every leaf, split by rows over ``fsdp`` devices where that divides."""
    mesh = Mesh(np.asarray(jax.devices()[:fsdp]).reshape(fsdp, 1), ("fsdp", "tp"))
    shapes = {"embedder.input_embedding": (VOCAB, HIDDEN), "final_norm.w": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head.w": (HIDDEN, VOCAB)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    leaves = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
        spec = P("fsdp") if shape[0] % fsdp == 0 else P()
        leaves[name] = jax.device_put(values, NamedSharding(mesh, spec))
    return leaves


def sampler(tensor: int = 1, *, tied: bool = False, layers: int = 2, kv_heads: int = KV_HEADS) -> dict[str, Spec]:
    mesh = engine_mesh(jax.devices()[:tensor])

    def spec(shape: tuple[int, ...], parts: P) -> Spec:
        return Spec(shape, jnp.dtype("float32"), sharding=NamedSharding(mesh, parts))

    specs = {"model.embed_tokens.embedding": spec((VOCAB, HIDDEN), P()), "model.norm.scale": spec((HIDDEN,), P())}
    specs |= {} if tied else {"lm_head.embedding": spec((VOCAB, HIDDEN), P())}
    for i in range(layers):
        for name, (shape, parts) in SAMPLER_LAYER.items():
            if name.split(".")[1] in ("k_proj", "v_proj"):
                shape = (HIDDEN, kv_heads * WIDTH)
            specs[f"model.layers.{i}.{name}"] = spec(shape, parts)
    return specs


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 2), (4, 4)])
def test_every_value_lands_where_it_belongs(fsdp: int, tensor: int) -> None:
    kv_heads = max(KV_HEADS, tensor)
    source, target = trainer(fsdp), sampler(tensor, kv_heads=kv_heads)
    if tensor == 4:  # the test's hidden widths do not divide by 4 everywhere
        mesh = cast(NamedSharding, target["model.norm.scale"].sharding).mesh
        target = {k: Spec(v.shape, v.dtype, sharding=NamedSharding(mesh, P())) for k, v in target.items()}
    weights, _ = WeightSync(RULES, source, target)(source)
    assert list(weights) == list(target)
    for name, spec in target.items():
        assert weights[name].sharding.is_equivalent_to(cast(NamedSharding, spec.sharding), len(spec.shape))
    values = {name: np.asarray(leaf) for name, leaf in source.items()}
    got = {name: np.asarray(leaf) for name, leaf in weights.items()}
    np.testing.assert_array_equal(got["lm_head.embedding"], values["lm_head.w"].T)
    q, o, k = (values[f"layers.1.attn.{n}_proj.w"] for n in "qok")
    for head in range(HEADS):
        columns = slice(head * WIDTH, (head + 1) * WIDTH)
        np.testing.assert_array_equal(got["model.layers.1.self_attn.q_proj.weight"][:, columns], q[:, head])
        np.testing.assert_array_equal(got["model.layers.1.self_attn.o_proj.weight"][columns], o[head])
    for head in range(kv_heads):
        columns = slice(head * WIDTH, (head + 1) * WIDTH)
        original = head * KV_HEADS // kv_heads  # repeated heads stand side by side
        np.testing.assert_array_equal(got["model.layers.1.self_attn.k_proj.weight"][:, columns], k[:, original])
    np.testing.assert_array_equal(got["model.layers.0.mlp.down_proj.weight"], values["layers.0.mlp.down_proj.kernel"])


def pointer(array: jax.Array) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def test_equal_layouts_are_aliased_and_the_rest_is_counted() -> None:
    source = trainer()
    sync = WeightSync(RULES, source, sampler())
    weights, result = sync(source)
    assert pointer(weights["model.norm.scale"]) == pointer(source["final_norm.w"])
    up = weights["model.layers.0.mlp.up_proj.weight"]
    assert pointer(up) == pointer(source["layers.0.mlp.up_proj.kernel"])
    attention = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS)  # q, o, k, v are reshaped
    assert result.bytes_moved == sync.bytes_moved == 4 * (2 * attention + VOCAB * HIDDEN)


def test_one_compilation_for_all_syncs() -> None:
    source = trainer()
    sync = WeightSync(RULES, source, sampler())
    scale = jax.jit(lambda leaves, factor: {name: leaf * factor for name, leaf in leaves.items()})
    before = {}
    for factor in (1.0, 2.0, 3.0):
        scaled = scale(source, factor)
        with CompilationCounter() as compilations:
            weights, _ = sync(scaled)
        assert compilations.count == 0
        np.testing.assert_array_equal(
            np.asarray(weights["lm_head.embedding"]), factor * np.asarray(source["lm_head.w"]).T
        )
        assert all(array.is_deleted() for array in before.values())  # what a sync wrote is freed by the next
        before = {move.target: weights[move.target] for move in sync.moves if not move.aliased}
    sync.release()
    assert all(array.is_deleted() for array in before.values())
    assert not any(weights[move.target].is_deleted() for move in sync.moves if move.aliased)


def test_names_that_match_on_one_side_only_are_listed() -> None:
    source, target = trainer(tied=True), sampler()
    source["layers.0.attn.q_bias"] = jnp.zeros(3)
    with pytest.raises(WeightsError, match="lm_head.embedding") as caught:
        plan_sync(RULES, source, target)
    assert "trainer leaves without a rule ['layers.0.attn.q_bias']" in str(caught.value)
    assert "sampler leaves that nothing fills ['lm_head.embedding']" in str(caught.value)
    with pytest.raises(WeightsError, match=r"rules whose target the sampler lacks \['lm_head.embedding'\]"):
        plan_sync(RULES, trainer(), sampler(tied=True))
    with pytest.raises(WeightsError, match="model.layers.2.mlp.up_proj.weight"):
        plan_sync(RULES, trainer(layers=2), sampler(layers=3))


def test_shapes_that_do_not_correspond_are_named() -> None:
    source = trainer()
    source["layers.1.mlp.up_proj.kernel"] = jnp.zeros((FFN, HIDDEN))
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.kernel \[6, 8\] becomes \[6, 8\], .* wants \[8, 6\]"):
        plan_sync(RULES, source, sampler())
    source["layers.1.mlp.up_proj.kernel"] = jnp.zeros((HIDDEN, FFN))
    source["layers.1.attn.q_proj.w"] = jnp.zeros((HIDDEN, HEADS, WIDTH + 1))
    with pytest.raises(WeightsError, match=r"layers.1.attn.q_proj.w \[8, 4, 4\] cannot become \[8, 12\]"):
        plan_sync(RULES, source, sampler())


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (4, 2), (2, 2)])
def test_a_leaf_may_become_several(fsdp: int, tensor: int) -> None:
    """Keys and values that are one leaf, on the same devices and on others, with and without an adapter."""
    rules = [
        WeightRule("layers.*.kv", f"layers.*.{name}", InputsFirst(part), input_axis=-2)
        for part, name in enumerate("kv")
    ]
    rng, layers, rank = np.random.default_rng(0), 2, 3
    mesh = Mesh(np.asarray(jax.devices()[:fsdp]).reshape(fsdp, 1), ("fsdp", "tp"))
    shapes = {"": (2, KV_HEADS, HIDDEN, WIDTH), "_lora_a": (HIDDEN, rank), "_lora_b": (rank, 2, KV_HEADS, WIDTH)}
    specs = {"": P(None, None, "fsdp"), "_lora_a": P("fsdp"), "_lora_b": P()}
    values = {
        f"layers.{i}.kv{part}": rng.normal(size=shape).astype(np.float32)
        for i in range(layers)
        for part, shape in shapes.items()
        if i == 1 or not part  # the second layer has an adapter
    }
    source = {
        name: jax.device_put(value, NamedSharding(mesh, specs[name.partition("kv")[2]]))
        for name, value in values.items()
    }
    devices = jax.devices()[:fsdp] if fsdp != 2 else jax.devices()[2:]
    split = NamedSharding(engine_mesh(devices, len(devices) // tensor), P(None, "tensor"))
    names = [f"layers.{i}.{name}" for i in range(layers) for name in "kv"]
    target = {name: Spec((HIDDEN, KV_HEADS * WIDTH), jnp.dtype("float32"), sharding=split) for name in names}
    sync = WeightSync(rules, source, target, lora_alpha=6.0)
    weights, result = sync(source)
    assert result.bytes_moved == 4 * 2 * layers * HIDDEN * KV_HEADS * WIDTH
    for name in names:
        part, layer = "kv".index(name[-1]), name[:-1]
        expected = values[f"{layer}kv"][part].astype(np.float64)
        if layer == "layers.1.":
            a, b = (values[f"{layer}kv_lora_{x}"] for x in "ab")
            expected = expected + 6.0 / rank * np.einsum("dr,rkh->kdh", a, b[:, part])
        found = np.asarray(weights[name]).reshape(HIDDEN, KV_HEADS, WIDTH).transpose(1, 0, 2)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for move, leaf in sync.expected(source):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(weights[move.target]))
