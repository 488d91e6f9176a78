"""Updates whose loss or gradient is not finite: nothing of them arrives, and what they were of is kept."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner.linear import linear_config, linear_run
from tests.learner.test_update import STATES, with_optimizer
from tpu_grpo.learner.checkpoints import _checksums
from tpu_grpo.learner.entropy import EntropyControl

BAD = [{"value": np.nan}, {"value": np.inf}, {"value": 1e30}, {"loss": np.nan}, {"loss": -np.inf}]
"""What a parameter's gradient or the loss is; the square of 1e30 is more than float32 holds."""


@pytest.mark.parametrize(("name", "sections"), STATES)
def test_nothing_of_such_an_update_arrives(tmp_path: Path, name: str, sections: dict[str, Any]) -> None:
    config = linear_config(tmp_path, **with_optimizer(sections, name=name))
    control = EntropyControl(first=0.25, target=2.0, step=0.5)
    run, straight = linear_run(config, control=control), linear_run(config, control=control)
    for each in (run, straight):
        assert bool(each.step().finite)
    held = _checksums(run.updater.model, run.updater)
    for bad in BAD:
        gradients = {name: jnp.ones_like(value) for name, value in run.updater.stepped().items()}
        if "value" in bad:
            gradients["bias"] = gradients["bias"].at[-1].set(bad["value"])
        record = run.step(gradients, loss=bad.get("loss", 0.5))
        assert not bool(record.finite), bad
        assert _checksums(run.updater.model, run.updater) == held, bad
    for each in (run, straight):
        assert bool(each.step().finite)
    after = _checksums(run.updater.model, run.updater)
    assert after == _checksums(straight.updater.model, straight.updater)
    assert after != held
