"""Frozen models: those that no gradient changes. The reference of the KL penalty is one, and so is every teacher.

teacher = FrozenModel(model, offload=True)
with teacher.on_devices():
    logps_RS = teacher.logprobs(rows, temperature=1.0, mesh=mesh)
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from tpu_grpo.learner.forward import ModelRows, PerToken, likeliest, logprobs
from tpu_grpo.learner.parameters import parameters
from tpu_grpo.models.tunix_model import cast, dotted, is_abstract

HOST_MEMORY = "pinned_host"


class FrozenModel:
    """A model of arrays, or of their descriptions, which is run forwards only.

    With ``offload`` the arrays of ``model``, which nobody else may use, move to the memory of the hosts. They must be
    copied to the devices (`on_devices`) before the model is run.
    """

    def __init__(self, model: nnx.Module, *, offload: bool = False):
        self.model = model
        self.is_offloaded = offload and not is_abstract(nnx.state(model))
        self._run: nnx.Module | None = None if self.is_offloaded else model
        if self.is_offloaded:
            nnx.update(model, jax.tree.map(partial(_moved, kind=HOST_MEMORY), nnx.state(model)))

    @contextmanager
    def on_devices(self) -> Iterator[None]:
        """Hold the model's arrays on its devices during the block."""
        if not self.is_offloaded:
            yield
            return
        definition, state = nnx.split(self.model)
        self._run = nnx.merge(definition, jax.tree.map(_moved, state))
        try:
            yield
        finally:
            self._run = None

    def logprobs(self, rows: ModelRows, *, temperature: float, mesh: Mesh) -> PerToken:
        """Compute the model's log-probability of every sampled token; it chooses the experts of tokens itself."""
        with mesh:
            return logprobs(*self._split, rows._replace(experts=None), temperature=temperature, mesh=mesh)

    def likeliest(self, rows: ModelRows, *, count: int, below: int, temperature: float, mesh: Mesh) -> dict[str, Array]:
        """Compute what `forward.likeliest` returns."""
        with mesh:
            return likeliest(*self._split, rows, count=count, below=below, temperature=temperature, mesh=mesh)

    @property
    def _split(self) -> tuple[Any, Any]:
        assert self._run is not None, "an offloaded model is run within on_devices"
        return nnx.split(self._run)

    def follow(self, values: Mapping[str, Array], rate: float) -> None:
        """Move the named parameters by ``rate`` of the way to ``values``, one by one to save memory."""
        for path, leaf in nnx.to_flat_state(parameters(self.model)):
            if (name := dotted(path)) in values:
                moved = _towards(leaf.get_raw_value(), values[name], rate)
                nnx.update(self.model, nnx.from_flat_state([(path, leaf.replace(moved))]))


def in_float32(model: nnx.Module, names: Collection[str]) -> nnx.Module:
    """Cast the named parameters of a model to float32, in place, and return the model."""
    flat = [(path, leaf) for path, leaf in nnx.to_flat_state(parameters(model)) if dotted(path) in names]
    wide = [(path, leaf.replace(cast(leaf.get_raw_value(), jnp.float32))) for path, leaf in flat]
    nnx.update(model, nnx.from_flat_state(wide))
    return model


@partial(jax.jit, donate_argnums=0)
def _towards(value: Array, other: Array, rate: float) -> Array:
    return value + jnp.float32(rate) * (other.astype(jnp.float32) - value)


def _moved(leaf: jax.Array, kind: str | None = None) -> jax.Array:
    """Copy an array to the memory of this kind; to that of its devices, if it is None."""
    [device, *_] = leaf.sharding.addressable_devices
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind or device.default_memory().kind))
