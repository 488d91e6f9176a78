"""Micro-batches that one CPU device computes at the same time: their gradients add up to the update's."""

import threading
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored, micro_batches
from tpu_grpo.learner import Learner
from tpu_grpo.learner.loss import TrainBatch


def prepared(directory: Path) -> tuple[Learner, list[TrainBatch]]:
    """A learner on one device, and several micro-batches of a prompt or two each."""
    mesh = make_mesh(1)
    config = make_config(directory, {"data": {"prompts_per_step": 5}, "algorithm": {"micro_batch_prompts": 1}})
    learner = make_learner(config, mesh)
    return learner, micro_batches(learner, make_scored(make_model(mesh), config))


def test_gradients_are_the_sum_over_micro_batches(tmp_path: Path) -> None:
    """Added in float64. What is measured of each micro-batch comes in their order, whatever ends first."""
    learner, batches = prepared(tmp_path)
    updater, threads = learner._updater, set[int]()
    alone, wanted = [], {}
    for batch in batches:
        alone += updater.accumulate([batch])
        for name, value in updater.gradients().items():
            wanted[name] = wanted.get(name, 0.0) + np.asarray(value, np.float64)
        updater.forget_gradients()
    compute = updater._accumulate

    def noted(*arguments: object) -> object:
        threads.add(threading.get_ident())
        return compute(*arguments)

    with mock.patch.object(updater, "_accumulate", noted):
        together = updater.accumulate(batches)
    assert len(batches) >= 4
    assert len(threads) >= 2
    for name, value in updater.gradients().items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6 * np.abs(wanted[name]).max(), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    assert len({float(each.loss) for each in alone}) == len(batches)


def test_a_fault_in_any_of_them_is_raised(tmp_path: Path) -> None:
    learner, batches = prepared(tmp_path)
    compute, left = learner._updater._accumulate, iter(range(5))

    def failing(*arguments: object) -> object:
        if next(left) == 2:
            raise MemoryError("no room")
        return compute(*arguments)

    with mock.patch.object(learner._updater, "_accumulate", failing), pytest.raises(MemoryError, match="no room"):
        learner._updater.accumulate(batches)
