"""What lies on each device between programs, by the shardings of the run's own trees. Bytes per device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpu_grpo.learner import frozen_leaves, parameters
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.weights.plan import named_leaves


@dataclass(frozen=True)
class Sizes:
    """Of a run."""

    parameters: int
    optimizer: int
    """Its state, with accumulated gradients."""
    reference: int
    """What the initial policy does not share with the policy, once that has been updated."""
    sampler: int
    """Weights of the engines that are not the trainer's own arrays."""
    shared: int
    """Weights of the engines that are, until an update makes new ones."""
    cache: int
    batch: int
    """Micro-batches that wait, without the one under way."""


def sizes(outline: AbstractRun) -> Sizes:
    """Add everything up; nothing is compiled but the weight sync."""
    config, params = outline.config, parameters(outline.policy)
    leaves, frozen = named_leaves(params), frozen_leaves(params)
    adapters = config.model.lora.rank is not None
    trained = [leaf for name, leaf in leaves.items() if name not in frozen]
    micro = config.algorithm.micro_batch_prompts or config.data.prompts_per_step
    waiting = config.data.prompts_per_step // micro - 1
    moves = outline.sync.moves
    return Sizes(
        parameters=per_device(leaves.values()),
        optimizer=per_device(jax.tree.leaves(outline.learner.optimizer_state)),
        reference=per_device(trained) if config.algorithm.beta > 0.0 and not adapters else 0,
        sampler=per_device(move.spec for move in moves if not move.shared),
        shared=per_device(move.spec for move in moves if move.shared),
        cache=per_device(outline.engine.cache_specs),
        batch=waiting * per_device(jax.tree.leaves(outline.learner.example)),
    )


def per_device(leaves: Iterable[Any]) -> int:
    """Bytes of one device's shards."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)
