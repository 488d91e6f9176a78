"""Updates whose loss or gradient is not finite: nothing of them arrives, and they are named."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner.linear import linear_config, linear_run
from tests.learner.test_entropy import ADAPTED
from tests.learner.test_update import STATES, with_optimizer
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored
from tpu_grpo.learner import learner as learner_module
from tpu_grpo.learner.checkpoints import Held
from tpu_grpo.learner.parameters import checksums
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import ScoredRollout

BAD = [{"value": np.nan}, {"value": np.inf}, {"value": 1e30}, {"loss": np.nan}, {"loss": -np.inf}]
"""What a parameter's gradient or the loss is; the square of 1e30 is more than float32 holds."""


@pytest.mark.full
@pytest.mark.parametrize(("name", "sections"), STATES)
def test_nothing_of_such_an_update_arrives(tmp_path: Path, name: str, sections: dict[str, Any]) -> None:
    config = linear_config(tmp_path, **with_optimizer(sections, name=name), algorithm=ADAPTED)
    run, straight = linear_run(config), linear_run(config)
    for each in (run, straight):
        assert bool(each.step().finite)
    held = checksums(Held.of(run.updater).leaves())
    for bad in BAD:
        gradients = {name: jnp.ones_like(value) for name, value in run.updater.stepped().items()}
        if "value" in bad:
            gradients["bias"] = gradients["bias"].at[-1].set(bad["value"])
        record = run.step(gradients, loss=bad.get("loss", 0.5))
        assert not bool(record.finite), bad
        assert checksums(Held.of(run.updater).leaves()) == held, bad
    for each in (run, straight):
        assert bool(each.step().finite)
    after = checksums(Held.of(run.updater).leaves())
    assert after == checksums(Held.of(straight.updater).leaves())
    assert after != held


def with_tokens(scored: ScoredRollout, value: float, prompts: range) -> ScoredRollout:
    """Add a number to the advantage of every token of some prompts; 1e39 is infinite in float32."""
    size = scored.rollout.group_size
    per_token = tuple(
        np.full(len(completion.token_ids), value if row // size in prompts else 0.0)
        for row, completion in enumerate(scored.rollout.completions)
    )
    return replace(scored, scores=replace(scored.scores, per_token=per_token))


@pytest.mark.slow  # a run; the update itself is tested by default
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_so_many_in_a_row_are_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts, in two updates of two: some steps have one that is not finite, some two."""
    monkeypatch.setattr(learner_module, "MOST_SKIPPED", 3)
    section = {"on_non_finite": "skip"}
    config = make_config(tmp_path, {"algorithm": {"mini_batch_prompts": 2}, "update": section})
    learner, model = make_learner(config, make_mesh(1)), make_model(make_mesh(1))
    steps = [make_scored(model, config, step) for step in range(1, 6)]
    assert learner.update(steps[0]).metrics["update/skipped"] == 0
    digest = learner.params_digest()

    found = learner.update(with_tokens(steps[1], 1e39, range(4)))
    assert (found.metrics["update/skipped"], learner.params_digest()) == (2, digest)
    assert not np.isfinite(found.metrics["update/loss"])
    first, second = found.notes
    assert first.startswith("the loss of step 2, update 1 of 2, must be finite, got ")
    assert re.search(r"; \d+ gradients are not finite, the first that of \w+\.", first)
    assert "; the largest advantage, 1e+39, is in row 0, whose reward is " in first
    assert first.endswith("; the update was skipped, and nothing of it reached the policy")
    assert "update 2 of 2" in second

    found = learner.update(with_tokens(steps[2], 1e30, range(1, 2)))  # gradients too large for a norm
    assert found.metrics["update/skipped"] == 1
    assert "the gradient norm of step 3, update" in found.notes[0]
    size = config.algorithm.group_size
    assert f"got inf; the largest advantage, 1e+30, is in row {size}, whose reward is " in found.notes[0]
    assert np.isfinite(found.metrics["update/loss"])  # of the other
    assert learner.params_digest() != digest

    digest = learner.params_digest()
    learner.update(replace(steps[3], scores=replace(steps[3].scores, per_token=())))
    assert learner.params_digest() != digest
    digest = learner.params_digest()
    learner.update(with_tokens(steps[3], 1e39, range(4)))
    message = "update 2 of 2, must be finite, got .*; that makes 4 updates in a row, and 3 may be skipped"
    with pytest.raises(NonFiniteError, match=message):
        learner.update(with_tokens(steps[4], 1e39, range(4)))
    assert learner.params_digest() == digest
    learner.close()
