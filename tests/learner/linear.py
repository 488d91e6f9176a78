"""A linear model with an updater around it: what checkpoints hold, at the smallest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tests.learner.toy import make_config, make_mesh, settings_of
from tpu_grpo.config import RunConfig
from tpu_grpo.learner.loss import EntropySums
from tpu_grpo.learner.parameters import Values, cast_to_compute
from tpu_grpo.learner.update import PassSums, Updater, UpdateRecord


class Linear(nnx.Module):
    """A matrix and a bias, split over the mesh; nothing is computed with them."""

    def __init__(self, seed: int, shape: tuple[int, int], scale: float, mesh: Mesh):
        keys = jax.random.split(jax.random.key(seed), 2)

        def placed(value: jax.Array, *spec: str | None) -> Any:
            return nnx.Param(jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))))

        self.kernel = placed(scale * jax.random.normal(keys[0], shape), "fsdp", "tp")
        self.bias = placed(scale * jax.random.normal(keys[1], shape[1:]), "tp")


@dataclass
class Run:
    """A model and what updates it."""

    updater: Updater

    def step(
        self, gradients: Values | None = None, entropy: EntropySums | None = None, loss: float = 0.0
    ) -> UpdateRecord:
        """Step along these gradients; by default along some that depend on the parameters."""
        updater = self.updater
        made = _sines(updater.stepped()) if gradients is None else gradients
        zeros = updater._zeros()
        placed = {name: jax.device_put(value, zeros.gradients[name].sharding) for name, value in made.items()}
        measured = zeros.entropy if entropy is None else entropy
        updater._sums = PassSums(placed, jax.device_put(jnp.float32(loss), zeros.loss.sharding), measured)
        return updater.step()


@jax.jit
def _sines(values: Values) -> Values:
    return {name: jnp.sin(50.0 * value) for name, value in values.items()}


def linear_config(directory: Path, **sections: Any) -> RunConfig:
    return make_config(directory, {**sections, "optimizer": {"learning_rate": 0.1, **sections.get("optimizer", {})}})


def linear_run(
    config: RunConfig,
    *,
    seed: int = 0,
    shape: tuple[int, int] = (4, 64),
    scale: float = 1.0,
    mesh: Mesh | None = None,
) -> Run:
    mesh = mesh or make_mesh(1)
    model = Linear(seed, shape, scale, mesh)
    stepped, settings = cast_to_compute(model, config.model), settings_of(config.algorithm, mesh=mesh)
    return Run(Updater(config.optimizer, config.updates, model, stepped, settings))
