"""The bytes that stay on each device between programs, computed from the shardings of the run's own trees."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from tpu_grpo.learner import frozen_leaves, parameters
from tpu_grpo.run.abstract import AbstractRun
from tpu_grpo.weights.plan import bytes_per_device, named_leaves


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes per device, by what they hold."""

    parameters: int
    optimizer: int
    """The optimizer's state, and what the trained parameters have beyond ``model.dtype``."""
    trained: int
    """The part of ``parameters`` that is trained."""
    reference: int
    """The part of the reference that the policy no longer shares once it has been updated."""
    sampler: int
    """Those weights of the engines that are arrays of their own."""
    shared: int
    """Those weights of the engines that are the trainer's own arrays, until an update makes new ones."""
    cache: int
    """The KV cache of an engine."""
    batch: int
    """The micro-batches of a step that wait while one of them is worked on."""


def resident_bytes(run: AbstractRun) -> ResidentBytes:
    """Add up what a run keeps on a device; of its programs only those of the weight sync are compiled for it."""
    config, params = run.config, parameters(run.policy)
    leaves, frozen = named_leaves(params), frozen_leaves(params)
    adapters = config.model.lora.rank is not None
    own_adapters = config.algorithm.reference_reset_every is not None
    trained = [leaf for name, leaf in leaves.items() if name not in frozen]
    moves, micro_batches = run.sync.moves, config.micro_batches(run.meshes.trainer.shape["fsdp"])
    return ResidentBytes(
        parameters=per_device(leaves.values()),
        optimizer=per_device(jax.tree.leaves(run.learner.state)),
        trained=per_device(trained),
        reference=per_device(trained) if config.algorithm.beta > 0.0 and (own_adapters or not adapters) else 0,
        sampler=per_device(move.spec for move in moves if not move.aliased),
        shared=per_device(move.spec for move in moves if move.aliased),
        cache=per_device(run.engine.cache_specs),
        batch=(micro_batches - 1) * per_device(jax.tree.leaves(run.learner.batch)),
    )


def per_device(leaves: Iterable[Any]) -> int:
    """Sum the bytes of the shards that one device holds."""
    return sum(bytes_per_device(leaf) for leaf in leaves)
