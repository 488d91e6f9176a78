"""Updates whose loss or gradient is not finite: nothing of them arrives, and what they were of is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner.linear import linear_config, linear_run
from tests.learner.test_entropy import ADAPTED
from tests.learner.test_update import STATES, with_optimizer
from tests.learner.toy import make_config, make_learner, make_mesh, make_model, make_scored
from tpu_grpo.config import parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import learner as learner_module
from tpu_grpo.learner.batches import pass_arrays, placed_pass
from tpu_grpo.learner.checkpoints import Held
from tpu_grpo.learner.learner import FailedUpdate
from tpu_grpo.learner.parameters import checksums
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import ScoredRollout
from tpu_grpo.run.non_finite import FailureFiles, read_update

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
def test_so_many_in_a_row_are_skipped_and_the_first_of_them_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts, in two updates of two: some steps have one that is not finite, some two."""
    monkeypatch.setattr(learner_module, "MOST_SKIPPED", 3)
    section = {"on_non_finite": "skip"}
    config = make_config(tmp_path, {"algorithm": {"mini_batch_prompts": 2}, "update": section})
    learner, model = make_learner(config, make_mesh(1)), make_model(make_mesh(1))
    files, kept = FailureFiles(config, Hosts(), learner.save_apart), list[FailedUpdate]()

    def keep(failed: FailedUpdate) -> Path:
        kept.append(failed)
        return files(failed)

    learner.keep_failed(keep)
    steps = [make_scored(model, config, step) for step in range(1, 6)]
    assert learner.update(steps[0]).metrics["update/skipped"] == 0
    digest = learner.params_digest()

    found = learner.update(with_tokens(steps[1], 1e39, range(4)))
    assert (found.metrics["update/skipped"], len(kept), learner.params_digest()) == (2, 1, digest)
    assert not np.isfinite(found.metrics["update/loss"])
    first, second = found.notes
    path = tmp_path / "non_finite" / "2.npz"
    assert first.startswith("the loss of step 2, update 1 of 2, must be finite, got ")
    assert first.endswith(
        "; the update was skipped, and nothing of it reached the policy; it is kept: look at it with `python "
        f"scripts/run.py --replay {path}`"
    )
    assert "update 2 of 2" in second
    assert "; the first of them is kept" in second

    found = learner.update(with_tokens(steps[2], 1e30, range(1)))  # gradients too large for a norm
    assert found.metrics["update/skipped"] == 1
    assert "the gradient norm of step 3, update" in found.notes[0]
    assert np.isfinite(found.metrics["update/loss"])  # of the other
    assert learner.params_digest() != digest
    assert len(kept) == (1 if "update 1" in found.notes[0] else 2)  # a new row of them begins after one that was made

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

    failed, file = kept[-1], read_update(tmp_path / "non_finite" / "4.npz")
    assert sorted(p.name for p in path.parent.iterdir()) == ["4.jsonl", "4.npz", "checkpoints"]
    assert (file.step, file.update, file.updates) == (4, 1, 2)
    assert (file.loss, file.grad_norm) == pytest.approx((failed.loss, failed.grad_norm), nan_ok=True)
    assert parse_config(file.settings) == config
    for arrays, batch in zip(file.passes, failed.passes, strict=True):
        again = placed_pass(arrays, make_mesh(2))  # on other devices
        for name, value in pass_arrays(batch).items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(pass_arrays(again)[name]), err_msg=name)
        assert jax.tree.structure(again) == jax.tree.structure(batch)
    samples = [json.loads(line) for line in (path.parent / "4.jsonl").read_text().splitlines()]
    assert [sample["per_token"] for sample in samples] == [[1e39] * sample["tokens"] for sample in samples]
    other = make_learner(
        config.model_copy(update={"run": config.run.model_copy(update={"dir": path.parent})}), make_mesh(1), 5
    )
    assert other.restored_step == 4
    assert other.params_digest() == digest
    other.close()


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    for name in ("x.npz", "y.npz"):
        with pytest.raises(DataError, match=r"--replay needs a file that a run has written, <run.dir>/non_finite/"):
            read_update(tmp_path / name)
    with pytest.raises(DataError, match="a pass of 3 rows must be split over meshes.trainer.fsdp=2 devices"):
        placed_pass({"weights": np.zeros((3, 4))}, make_mesh(2))
