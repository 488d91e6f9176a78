"""The intermediate sharding of replicated targets, worked out by hand, and the memory that it saves."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tests.weights.test_meshes import RULES, sampler_specs, trainer_leaves
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.hosts.sharded_arrays import Spec
from tpu_grpo.models.families.leaves import InputsFirst, Transform, flatten, flatten_kv, same, transpose
from tpu_grpo.weights.sync import WeightSync
from tpu_grpo.weights.transport import intermediate_sharding, result_dimension


def sharding(names: tuple[str, ...], sizes: tuple[int, ...], spec: P) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names), spec)


def spec(shape: tuple[int, ...], sharding: NamedSharding) -> Spec:
    return Spec(shape, np.float32, sharding=sharding)


@pytest.mark.parametrize(
    ("transform", "source_shape", "split", "shape", "to", "expected"),
    [
        (same, (8, 8), P("fsdp", None), (8, 8), P(None, "tensor"), P("data", "tensor")),
        (same, (8, 8), P(None, "fsdp"), (8, 8), P("tensor", None), P("tensor", "data")),
        (same, (8, 8), P("fsdp", None), (8, 8), P("tensor", None), P(("tensor", "data"), None)),
        (transpose, (8, 6), P("fsdp", None), (6, 8), P("tensor", None), P("tensor", "data")),
        (flatten, (8, 2, 6), P("fsdp", None, None), (8, 12), P(None, "tensor"), P("data", "tensor")),
        (flatten, (2, 6, 8), P(None, None, "fsdp"), (12, 8), P("tensor", None), P("tensor", "data")),
        (InputsFirst(), (2, 8, 6), P(None, "fsdp", None), (8, 12), P(None, "tensor"), P("data", "tensor")),
        (InputsFirst(1), (2, 1, 8, 6), P(None, None, "fsdp"), (8, 12), P(None, "tensor"), P("data", "tensor")),
        (flatten_kv, (8, 1, 6), P("fsdp", None, None), (8, 12), P(None, "tensor"), P("data", "tensor")),
        (same, (3, 8), P(None, None), (3, 8), P(None, "tensor"), P(None, ("tensor", "data"))),  # 3 rows: no halves
        (same, (8,), P(None), (8,), P(), P("data")),
        (same, (3,), P(None), (3,), P(), None),  # nothing divides
    ],
)
def test_no_two_devices_hold_the_same_on_the_way(
    transform: Transform, source_shape: tuple[int, ...], split: P, shape: tuple[int, ...], to: P, expected: P | None
) -> None:
    source = sharding(("fsdp", "tp"), (4, 1), split)
    target = NamedSharding(engine_mesh(jax.devices(), 4 if expected == P("data") else 2), to)
    found = intermediate_sharding(transform, spec(source_shape, source), spec(shape, target))
    assert (found and found.spec) == expected
    assert found is None or set(found.mesh.axis_types) == {AxisType.Auto}  # whatever the target's are


def test_a_layout_without_copies_needs_none() -> None:
    source = sharding(("fsdp", "tp"), (4, 1), P("fsdp", None))
    target = NamedSharding(engine_mesh(jax.devices()), P(None, "tensor"))
    assert intermediate_sharding(same, spec((8, 8), source), spec((8, 8), target)) is None


@pytest.mark.parametrize(
    ("transform", "source", "result", "places"),
    [
        (flatten, (8, 2, 6), (8, 12), [0, 1, 1]),
        (flatten, (2, 6, 8), (12, 8), [0, 0, 1]),
        (transpose, (8, 6), (6, 8), [1, 0]),
        (InputsFirst(), (2, 8, 6), (8, 12), [1, 0, 1]),
        (InputsFirst(0), (3, 2, 8, 6), (8, 12), [1, 1, 0, 1]),
        (same, (8, 6), (8, 6), [0, 1]),
        (same, (5,), (5,), [0]),
    ],
)
def test_where_dimensions_go(
    transform: Transform, source: tuple[int, ...], result: tuple[int, ...], places: list[int]
) -> None:
    assert [result_dimension(transform, source, result, n) for n in range(len(source))] == places


def test_no_device_assembles_a_leaf_of_which_it_keeps_a_part() -> None:
    """From quarters by rows to two copies of halves by columns, a half is enough, as the compiler counts."""
    source, target = trainer_leaves(jax.devices(), 4, 1, 4), sampler_specs(jax.devices(), 2, 4)
    sync = WeightSync(RULES, {"layers.0.q": source["layers.0.q"]}, {"layers.0.q": target["layers.0.q"]})
    assert 0 < sync.temporary_bytes < source["layers.0.q"].nbytes * 3 / 4
