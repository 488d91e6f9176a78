"""Checkpoints of a small linear model: saving, keeping, resuming, and every kind of damage."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tpu_grpo.learner.repairs import WholeArrayCheckpointManager

from tpu_grpo.errors import CheckpointError
from tpu_grpo.learner.checkpoints import Checkpoints, read_policy
from tpu_grpo.learner.digest import checksums, params_digest

# When one of its reads fails, Orbax closes an event loop that others still report to.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Pair = tuple[nnx.Linear, nnx.Optimizer]


def make_pair(seed: int = 0, width: int = 64) -> Pair:
    model = nnx.Linear(4, width, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def take_step(model: nnx.Linear, optimizer: nnx.Optimizer) -> None:
    optimizer.update(model, nnx.grad(lambda m: (m(jnp.arange(4.0)) ** 2).sum())(model))


def saved_run(directory: Path, *steps: int, keep: int = 2, width: int = 64) -> Pair:
    model, optimizer = make_pair(width=width)
    checkpoints = Checkpoints(directory, keep=keep)
    assert checkpoints.restore(model, optimizer, resume="auto") == 0
    for step in steps:
        take_step(model, optimizer)
        checkpoints.save(step, model, optimizer)
    checkpoints.close()
    return model, optimizer


def restored(directory: Path, pair: Pair, resume: str = "auto") -> int:
    checkpoints = Checkpoints(directory, keep=2)
    try:
        return checkpoints.restore(*pair, resume=resume)  # type: ignore[arg-type]
    finally:
        checkpoints.close()


def assert_same(left: Pair, right: Pair) -> None:
    for a, b in zip(left, right, strict=True):
        assert checksums(nnx.state(a)) == checksums(nnx.state(b))


def test_model_and_optimizer_come_back_exactly(tmp_path: Path) -> None:
    before = saved_run(tmp_path, 5)
    after = make_pair(seed=1)
    assert restored(tmp_path, after, "require") == 5
    assert_same(before, after)
    take_step(*before)
    take_step(*after)
    assert_same(before, after)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    saved_run(tmp_path, 1, 2, 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_saved_step_is_left_alone(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, 3)
    first_step = make_pair()
    take_step(*first_step)
    after = make_pair(seed=1)
    assert restored(tmp_path, after) == 3
    assert_same(first_step, after)


def test_what_a_killed_save_left_is_ignored(tmp_path: Path) -> None:
    before = saved_run(tmp_path, 1)
    unfinished = tmp_path / "2.orbax-checkpoint-tmp-1"
    shutil.copytree(tmp_path / "1" / "model_params", unfinished / "model_params")
    after = make_pair(seed=1)
    assert restored(tmp_path, after) == 1
    assert_same(before, after)
    assert not unfinished.exists()


def test_resume_never_and_require(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume=require needs a checkpoint in .*, found none"):
        restored(tmp_path, make_pair(), "require")
    assert restored(tmp_path, make_pair(), "never") == 0
    saved_run(tmp_path, 4)
    with pytest.raises(CheckpointError, match="resume=never needs an empty .*, found step 4; move it away"):
        restored(tmp_path, make_pair(), "never")


def truncate(pattern: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        for path in checkpoint.glob(pattern):
            path.write_bytes(path.read_bytes()[:10])

    return damage


def flip_bits(pattern: str) -> Callable[[Path], None]:
    """Of eight bytes in the middle of the largest file, which holds the arrays."""

    def damage(checkpoint: Path) -> None:
        path = max(checkpoint.glob(pattern), key=lambda p: p.stat().st_size)
        content = np.frombuffer(path.read_bytes(), np.uint8).copy()
        content[len(content) // 2 :][:8] ^= 0x10
        path.write_bytes(content.tobytes())

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda checkpoint: shutil.rmtree(checkpoint / "model_params"),
        lambda checkpoint: shutil.rmtree(checkpoint / "optimizer_state"),
        lambda checkpoint: (checkpoint / "_CHECKPOINT_METADATA").unlink(),
        truncate("_CHECKPOINT_METADATA"),
        truncate("model_params/_METADATA"),
        truncate("model_params/manifest.ocdbt"),
        truncate("optimizer_state/d/*"),
        truncate("optimizer_state/**/d/*"),
        flip_bits("model_params/**/d/*"),
    ],
    ids=[
        "params gone",
        "optimizer gone",
        "no metadata",
        "metadata cut",
        "tree cut",
        "index cut",
        "data cut",
        "all data cut",
        "flipped",
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saved_run(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with pytest.raises(CheckpointError, match=r"checkpoint .*/2 must hold .*remove that directory to continue from"):
        restored(tmp_path, make_pair())
    shutil.rmtree(tmp_path / "2")  # the remedy
    assert restored(tmp_path, make_pair()) == 1


def test_damage_that_orbax_does_not_see_is_found(tmp_path: Path) -> None:
    """Arrays of some size are stored as they are: changed bytes are read back as other numbers."""
    saved_run(tmp_path, 1, width=4096)
    flip_bits("model_params/**/d/*")(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"1 arrays are not what was saved, the first model\.kernel"):
        restored(tmp_path, make_pair(width=4096))


def test_values_that_are_not_those_saved_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, 1)
    honest = WholeArrayCheckpointManager.maybe_restore

    def one_bit_off(manager: WholeArrayCheckpointManager, model: nnx.Linear, *args: Any) -> object:
        result = honest(manager, model, *args)
        model.kernel[...] = model.kernel[...].at[0, 0].multiply(1 + 2**-23)
        return result

    monkeypatch.setattr(WholeArrayCheckpointManager, "maybe_restore", one_bit_off)
    with pytest.raises(CheckpointError, match=r"1 arrays are not what was saved, the first model\.kernel"):
        restored(tmp_path, make_pair())


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    with pytest.raises(CheckpointError, match="undo a change of model"):
        restored(tmp_path, make_pair(width=5))


def test_digest_sees_values_names_and_shapes() -> None:
    def digest(**leaves: np.ndarray) -> str:
        return params_digest(nnx.State({name: nnx.Param(jnp.asarray(value)) for name, value in leaves.items()}))

    one = digest(a=np.zeros(4, np.float32), b=np.ones(2, np.float32))
    assert one == digest(b=np.ones(2, np.float32), a=np.zeros(4, np.float32))
    others = [
        digest(a=np.zeros(4, np.float32), c=np.ones(2, np.float32)),
        digest(a=np.zeros((2, 2), np.float32), b=np.ones(2, np.float32)),
        digest(a=np.zeros(4, np.int32), b=np.ones(2, np.float32)),
        digest(a=np.array([0, 0, 0, -0.0], np.float32), b=np.ones(2, np.float32)),
    ]
    assert len({one, *others}) == 5
    assert len(one) == 64


# --- the best one ----------------------------------------------------------------------------------------------------


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    model, optimizer = make_pair()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.restore(model, optimizer, resume="auto")
    left = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, None)):
        checkpoints.save(step, model, optimizer, best=best)
        checkpoints._manager._checkpoint_manager.wait_until_finished()  # type: ignore[union-attr]
        left.append(sorted(int(path.name) for path in tmp_path.iterdir()))
    checkpoints.close()
    assert left == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [5, 6], [6, 7]]


def test_a_policy_is_read_without_its_optimizer_and_nothing_is_touched(tmp_path: Path) -> None:
    saved_run(tmp_path, 1, 2)
    at_one, _ = make_pair()
    take_step(at_one, _)
    unfinished = tmp_path / "3.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    model, _ = make_pair(seed=1)
    read_policy(tmp_path, 1, model)
    assert checksums(nnx.state(model)) == checksums(nnx.state(at_one))
    assert unfinished.exists()


def test_a_policy_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none; there are steps none"):
        read_policy(tmp_path / "nosuch", 1, make_pair()[0])
    saved_run(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"a checkpoint must be in .*/9, found none; there are steps \[1, 2\]"):
        read_policy(tmp_path, 9, make_pair()[0])
    with pytest.raises(CheckpointError, match="must hold this model, whole"):
        read_policy(tmp_path, 1, make_pair(width=32)[0])
    flip_bits("model_params/**/d/*")(tmp_path / "2")
    with pytest.raises(CheckpointError, match="must hold"):
        read_policy(tmp_path, 2, make_pair()[0])
