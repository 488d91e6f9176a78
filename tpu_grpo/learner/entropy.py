"""The coefficient of the entropy bonus, fixed or adapted to a target (He et al. 2025, "Skywork-OR1", arXiv 2505.22312).

With H_k the mean entropy over the tokens of update k, and c_1 = ``algorithm.entropy_bonus``, the paper has

    c_(k+1) = c_k + step where H_k <= target, else c_k - step
    bonus of update k: c_k H where H_k <= target, else none

What departs from the paper: H_k is only known once all forward passes of update k are over, so that the bonus of an
update is decided by the update before, from the second on; and the coefficient does not fall below 0, where a bonus
would lower the entropy.

The coefficient is an array in the update's state: the programs are the same for all its values, and a checkpoint
holds it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float


class EntropyState(NamedTuple):
    """The coefficient between two updates, float32 scalars."""

    coefficient: Float[Array, ""]
    applied: Float[Array, ""]
    """That of the next update: the coefficient, or 0."""


class EntropySums(NamedTuple):
    """What the forward passes of an update have measured so far, float32 scalars."""

    entropy: Float[Array, ""]
    tokens: Float[Array, ""]


def add_entropy(sums: EntropySums | tuple[()], entropy: Any, tokens: Any) -> EntropySums | tuple[()]:
    """Add what a forward pass has measured, if it is wanted."""
    return EntropySums(sums.entropy + entropy, sums.tokens + tokens) if isinstance(sums, EntropySums) else ()


def described_sums(control: "EntropyControl | None", mesh: Mesh) -> EntropySums | tuple[()]:
    """Describe what an update adds up, if the coefficient is adapted."""
    number: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return () if control is None else EntropySums(number, number)


@dataclass(frozen=True)
class EntropyControl:
    """Adapts the coefficient after every update."""

    first: float
    target: float
    """Nats."""
    step: float

    def initial(self) -> EntropyState:
        """Return the state before the first update."""
        first = jnp.asarray(self.first, jnp.float32)
        return EntropyState(first, first)

    def following(self, state: EntropyState, measured: EntropySums) -> EntropyState:
        """Return the state after an update that measured this."""
        low = measured.entropy <= self.target * measured.tokens
        coefficient = jnp.maximum(state.coefficient + jnp.where(low, self.step, -self.step), 0.0)
        return EntropyState(coefficient, jnp.where(low, coefficient, 0.0))
