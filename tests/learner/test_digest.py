"""Values that come to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.models.forward import trainer_mesh
from tpu_grpo.learner.parameters import whole


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp", "tp"), PartitionSpec(None, "tp"), PartitionSpec()])
def test_values_come_to_the_host_whole_and_are_not_kept_there(spec: PartitionSpec) -> None:
    """A model that is looked at leaf by leaf is not held once more; jax keeps what it brings, see `_npy_value`."""
    values = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    array = jax.device_put(jnp.asarray(values), NamedSharding(trainer_mesh(2, 2), spec))
    np.testing.assert_array_equal(whole(array), values)
    assert array._npy_value is None  # pyright: ignore[reportAttributeAccessIssue]
    np.asarray(array)
    if not array.is_fully_replicated:  # of those on a CPU there is a copy already
        assert array._npy_value is not None  # pyright: ignore[reportAttributeAccessIssue]
