"""A mixture-of-experts layer for the sampler's model. It replaces sglang-jax's ``EPMoE``, whose constructor and weight
names it has.

Experts are sharded over the mesh. No token is ever dropped. There are two ways:

    Experts         every device has all tokens: it computes what its own experts contribute, and an all-reduce adds up
                    the contributions
    FusedExperts    tokens are spread over the devices, and sglang-jax's kernel for TPUs sends each to its experts while
                    it loads their weights

Both take the same weights in the same layout.

Arrays: T tokens, D width, E experts (e on this device), K experts per token, F hidden width of an expert.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tpu_grpo.engine.shapes import Shapes
from tpu_grpo.records.errors import ConfigError

AXIS = "tensor"
"""The axis of the sampler's mesh over which experts are sharded."""


class Experts(nnx.Module):
    """The gated MLPs of one layer, of which each token passes those that its router chose."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        intermediate_dim: int,
        mesh: Mesh,
        weight_dtype: jnp.dtype,
        **_: Any,
    ):
        def param(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, weight_dtype, out_sharding=NamedSharding(mesh, P(AXIS, None, None))))

        self.mesh = mesh
        self.wi_0 = param(num_experts, hidden_size, intermediate_dim)  # gate
        self.wi_1 = param(num_experts, hidden_size, intermediate_dim)  # up
        self.wo = param(num_experts, intermediate_dim, hidden_size)  # down

    def __call__(
        self,
        inputs: Float[Array, "T D"],
        weights_TK: Float[Array, "T K"],
        experts_TK: Int[Array, "T K"],
        *,
        out_sharding: NamedSharding,
    ) -> Float[Array, "T D"]:
        """Add up the outputs of each token's experts, weighted by ``weights_TK``."""
        weights_TK = weights_TK.astype(inputs.dtype)
        by_token, by_expert = P("data", None), P(AXIS, None, None)
        mixed: Any = jax.shard_map(
            _mix_own_experts,
            mesh=self.mesh,
            in_specs=(by_token, by_token, by_token, by_expert, by_expert, by_expert),
            out_specs=by_token,
        )
        weights = (param.get_value() for param in (self.wi_0, self.wi_1, self.wo))
        return jax.sharding.reshard(mixed(inputs, weights_TK, experts_TK, *weights), out_sharding)


class FusedExperts(Experts):
    """The same through one Pallas kernel. The number of tokens of a step must divide over the devices."""

    def __call__(
        self,
        inputs: Float[Array, "T D"],
        weights_TK: Float[Array, "T K"],
        experts_TK: Int[Array, "T K"],
        *,
        out_sharding: NamedSharding,
    ) -> Float[Array, "T D"]:
        """Add up the outputs of each token's experts, weighted by ``weights_TK``."""
        from sgl_jax.srt.kernels.fused_moe.v1.kernel import fused_ep_moe

        spread = ("data", AXIS)
        token, expert = (NamedSharding(self.mesh, P(spread, *more)) for more in ((None,), (None, None)))
        gate, up, down = (jax.sharding.reshard(param.get_value(), expert) for param in (self.wi_0, self.wi_1, self.wo))
        x, weights, experts = (jax.sharding.reshard(value, token) for value in (inputs, weights_TK, experts_TK))
        mixed = fused_ep_moe(self.mesh, x, gate, down, up, weights, experts, experts_TK.shape[1])
        return jax.sharding.reshard(mixed, out_sharding)


ExpertsName = Literal["ragged", "fused"]
EXPERTS: dict[ExpertsName, type[Experts]] = {"ragged": Experts, "fused": FusedExperts}


def check_tokens(shapes: Shapes, devices: int) -> None:
    """Check that the kernel of `FusedExperts` can spread the tokens of every step.

    Raises:
        ConfigError: for a number of rows or of prompt tokens that does not divide over the devices.
    """
    for setting, sizes in (("rollout.batch_paddings", shapes.batch), ("rollout.prefill_tokens", shapes.prefill)):
        if odd := [size for size in sizes if size % devices]:
            raise ConfigError(
                f"with rollout.experts=fused every step must divide over the {devices} devices of a replica, got "
                f"{odd}; set {setting} to multiples of {devices}, or rollout.experts=ragged"
            )


def _mix_own_experts(
    x_TD: Float[Array, "T D"],
    weights_TK: Float[Array, "T K"],
    experts_TK: Int[Array, "T K"],
    gate_eDF: Float[Array, "e D F"],
    up_eDF: Float[Array, "e D F"],
    down_eFD: Float[Array, "e F D"],
) -> Float[Array, "T D"]:
    """Compute the contribution of this device's experts, and add it up over the devices.

    There is a row for every pair of token and expert. Rows are sorted by expert; those of other devices come last.
    """
    own, per_token = gate_eDF.shape[0], experts_TK.shape[1]
    local = experts_TK.reshape(-1) - jax.lax.axis_index(AXIS) * own
    local = jnp.where((local >= 0) & (local < own), local, own)
    order = jnp.argsort(local)
    tokens, sizes = order // per_token, jnp.bincount(local, length=own)
    x = x_TD[tokens]
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, gate_eDF, sizes)) * jax.lax.ragged_dot(x, up_eDF, sizes)
    out = jax.lax.ragged_dot(hidden, down_eFD, sizes)
    is_own = (local[order] < own)[:, None]  # ragged_dot leaves the other rows undefined
    weighted = jnp.where(is_own, out.astype(jnp.float32) * weights_TK.reshape(-1)[order][:, None], 0.0)
    sum_TD = jnp.zeros(x_TD.shape, jnp.float32).at[tokens].add(weighted)
    return jax.lax.psum(sum_TD.astype(x_TD.dtype), AXIS)
