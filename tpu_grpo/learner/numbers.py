"""The numbers of the loss that its program takes as data: other values need no other program.

They are the weight of the KL penalty, the coefficient of the entropy bonus, and what the algorithm and its correction
list in their attribute ``numbers``: the sizes of a clip, the bounds of a ratio. Whether there is a penalty, a bonus or
a bound at all is part of the program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_grpo.learner.entropy import EntropyState
from tpu_grpo.learner.loss import LossSettings


class LossNumbers:
    """Puts the numbers of a loss on every device of a mesh, as float32."""

    def __init__(self, settings: LossSettings, mesh: Mesh):
        self._settings, self._sharding = settings, NamedSharding(mesh, PartitionSpec())
        self._placed: dict[str, Any] = {}

    def placed(self, entropy: EntropyState | tuple[()]) -> dict[str, Any]:
        """Return the numbers as arrays; the coefficient of an entropy bonus that is adapted is one already."""
        if not self._placed:
            self._placed = jax.tree.map(self._put, self._settings.numbers)
        return self._placed | ({"entropy": entropy.applied} if isinstance(entropy, EntropyState) else {})

    def described(self) -> dict[str, Any]:
        """Describe what `placed` returns."""
        described = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._sharding)
        return jax.tree.map(lambda _: described, self._settings.numbers)

    def _put(self, value: float) -> jax.Array:
        return jax.make_array_from_callback((), self._sharding, lambda _: np.float32(value))
