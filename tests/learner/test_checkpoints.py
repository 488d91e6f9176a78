"""Checkpoints of a small linear model: saving, keeping, resuming, and every kind of damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.learner.linear import Run, linear_config, linear_run
from tests.learner.toy import counted_compilations, make_mesh
from tests.models.forward import trainer_mesh
from tpu_grpo.learner import checkpoints as checkpoints_module
from tpu_grpo.learner.checkpoints import METADATA, Checkpoints, Held, model_leaves, read_policy, signed
from tpu_grpo.learner.parameters import checksums, params_digest, whole
from tpu_grpo.records.errors import CheckpointError

# When one of its reads fails, Orbax closes an event loop that others still report to.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_run(seed: int = 0, width: int = 64) -> Run:
    return linear_run(linear_config(Path("nowhere")), seed=seed, shape=(4, width))


def saved_run(directory: Path, *steps: int, keep: int = 2, width: int = 64) -> Run:
    run = make_run(width=width)
    checkpoints = Checkpoints(directory, keep=keep)
    assert checkpoints.restore(run.updater, resume="auto") == 0
    for step in steps:
        run.step()
        checkpoints.save(step, run.updater)
    checkpoints.close()
    return run


def resumed(directory: Path, step: int, **settings: Any) -> tuple[Run, Checkpoints]:
    """A run that goes on after this step, with its checkpoints, which are still open."""
    run, checkpoints = make_run(seed=1), Checkpoints(directory, **(dict[str, Any](keep=2) | settings))
    assert checkpoints.restore(run.updater, resume="auto") == step
    return run, checkpoints


def restored(directory: Path, run: Run, resume: Any = "auto") -> int:
    checkpoints = Checkpoints(directory, keep=2)
    try:
        return checkpoints.restore(run.updater, resume=resume)
    finally:
        checkpoints.close()


def sums(run: Run) -> dict[str, Any]:
    return checksums(Held.of(run.updater).leaves())


def assert_same(left: Run, right: Run) -> None:
    assert sums(left) == sums(right)


@pytest.mark.full
def test_a_saved_step_is_left_alone(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, 3)
    first_step = make_run()
    first_step.step()
    after = make_run(seed=1)
    assert restored(tmp_path, after) == 3
    assert_same(first_step, after)


def test_resume_never_and_require(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume=require needs a checkpoint in .*, found none"):
        restored(tmp_path, make_run(), "require")
    assert restored(tmp_path, make_run(), "never") == 0
    saved_run(tmp_path, 4)
    run, checkpoints = make_run(), Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(run.updater, resume="never") == 0


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by one run."""
    directory = tmp_path_factory.mktemp("saved")
    saved_run(directory, 1, 2)
    return directory


@pytest.fixture(scope="module")
def sums_after() -> dict[int, dict[str, Any]]:
    """By step the sums of a run that did so many."""
    run, found = make_run(), {}
    for step in (1, 2):
        run.step()
        found[step] = sums(run)
    return found


def copied(saved: Path, to: Path) -> Path:
    return shutil.copytree(saved, to / "run" / "checkpoints")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return copied(saved, tmp_path)


def test_what_a_killed_save_left_is_ignored(directory: Path, sums_after: dict[int, dict[str, Any]]) -> None:
    after = make_run(seed=1)
    unfinished = directory / "3.orbax-checkpoint-tmp-1"
    shutil.copytree(directory / "1" / "model_params", unfinished / "model_params")
    assert restored(directory, after) == 2
    assert sums(after) == sums_after[2]
    assert not unfinished.exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.old"))


def overwrite(path: Path) -> None:
    """With bytes of another file, as many as there were."""
    path.write_bytes((b"not what was here " * path.stat().st_size)[: path.stat().st_size])


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


DAMAGES = (cut, empty, delete, rename, overwrite, flip)
NEEDED = (METADATA, "model_params/_METADATA", "model_params/manifest.ocdbt", "optimizer_state/d/*")
"""Files of each kind without which a checkpoint cannot be read."""


def flip_arrays(checkpoint: Path) -> None:
    """Change one bit in the middle of the largest file, which holds the model's arrays."""
    flip(max(checkpoint.glob("model_params/**/d/*"), key=lambda path: path.stat().st_size))


def assert_continued_after(step: int, directory: Path, after: dict[int, dict[str, Any]]) -> list[str]:
    """Restore; every array must be that of the step, and a newer step must be kept aside. Returns what is told."""
    run, checkpoints = resumed(directory, step)
    assert sums(run) == after[step]
    aside = directory.with_name("damaged_checkpoints")
    assert [path.name for path in aside.glob("*")] == (["2"] if step == 1 else [])
    run.step()
    checkpoints.save(step + 1, run.updater)  # and it goes on
    checkpoints.close()
    assert sorted(path.name for path in directory.iterdir()) == [str(step), str(step + 1)]
    return checkpoints.notes


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", NEEDED)
def test_a_run_continues_after_the_newest_sound_checkpoint(
    directory: Path, sums_after: dict[int, dict[str, Any]], file: str, damage: Callable[[Path], None]
) -> None:
    [path] = (directory / "2").glob(file)
    damage(path)
    [note] = assert_continued_after(1, directory, sums_after)
    assert note.startswith("checkpoint 2 is damaged (")
    assert note.endswith(
        f") and was moved to {directory.parent}/damaged_checkpoints/2; the run continues after step 1, its newest "
        "sound checkpoint"
    )


def of_step_1(name: str) -> Callable[[Path], None]:
    """Put the file or directory of this name in the place of the checkpoint's own."""

    def damage(checkpoint: Path) -> None:
        other = checkpoint.parent / "1" / name
        if other.is_file():
            shutil.copy(other, checkpoint)
        else:
            shutil.rmtree(checkpoint / name)
            shutil.copytree(other, checkpoint / name)

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda checkpoint: shutil.rmtree(checkpoint / "model_params"), "model_params is missing"),
        (lambda checkpoint: shutil.rmtree(checkpoint / "optimizer_state"), "optimizer_state is missing"),
        (lambda checkpoint: [path.unlink() for path in checkpoint.rglob("d/*")], "NOT_FOUND"),
        (lambda checkpoint: edit_metadata(checkpoint, lambda data: data.pop("checksums")), "its checksums are missing"),
        (of_step_1(METADATA), "it is named 2 and holds step 1"),
        (of_step_1("model_params"), "arrays are not what was saved, the first model."),
    ],
    ids=["params gone", "optimizer gone", "data gone", "no sums", "metadata of another step", "params of another step"],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    directory: Path, sums_after: dict[int, dict[str, Any]], damage: Callable[[Path], object], reason: str
) -> None:
    damage(directory / "2")
    [note] = assert_continued_after(1, directory, sums_after)
    assert reason in note


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_no_damage_of_any_file_loads_anything_else(
    saved: Path, sums_after: dict[int, dict[str, Any]], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Some files are not read, such as what says how arrays lay; then the newest step comes back as it was."""
    files = [path.relative_to(saved) for path in sorted((saved / "2").rglob("*")) if path.is_file()]
    assert len(files) > 15
    for number, file in enumerate(files):
        directory = copied(saved, tmp_path / str(number))
        damage(directory / file)
        checkpoints, run = Checkpoints(directory, keep=2), make_run(seed=1)
        step = checkpoints.restore(run.updater, resume="auto")
        checkpoints.close()
        assert sums(run) == sums_after[step], file
        assert bool(checkpoints.notes) == (step == 1), file


def test_other_names_are_left_alone(directory: Path, sums_after: dict[int, dict[str, Any]]) -> None:
    for name in ("2.bak", "02", "notes", "-5"):
        shutil.copytree(directory / "2", directory / name)
    (directory / "9").write_text("a file")
    run, checkpoints = resumed(directory, 2, keep=1)
    run.step()
    checkpoints.save(3, run.updater)
    checkpoints.close()
    assert not checkpoints.notes
    assert sorted(path.name for path in directory.iterdir()) == ["-5", "02", "2.bak", "3", "9", "notes"]


def test_without_a_sound_checkpoint_nothing_is_moved(directory: Path) -> None:
    for step in "12":
        empty(directory / step / METADATA)
    with pytest.raises(
        CheckpointError, match=r"checkpoint .*/2 must hold .* restored \(.*\); nor could 1; undo a change of model"
    ):
        restored(directory, make_run())
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_a_second_damaged_checkpoint_of_a_step_is_kept_beside_the_first(saved: Path, tmp_path: Path) -> None:
    for _ in range(2):
        directory = shutil.copytree(saved, tmp_path / "run" / "checkpoints", dirs_exist_ok=True)
        empty(directory / "2" / METADATA)
        restored(directory, make_run())
    assert sorted(path.name for path in (tmp_path / "run" / "damaged_checkpoints").iterdir()) == ["2", "2.1"]


def test_a_host_without_memory_does_not_blame_the_checkpoint(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ocp.Checkpointer, "restore", out_of_memory)
    with pytest.raises(MemoryError):
        restored(directory, make_run())
    assert (directory / "2").is_dir()


@pytest.mark.full
def test_damage_that_orbax_does_not_see_is_found(tmp_path: Path) -> None:
    """Arrays of some size are stored as they are: changed bytes are read back as other numbers."""
    saved_run(tmp_path, 1, width=4096)
    flip_arrays(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"1 arrays are not what was saved, the first model\.kernel"):
        restored(tmp_path, make_run(width=4096))


def test_values_that_are_not_those_saved_are_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checkpoints_module.nnx.update

    def one_bit_off(model: Any, *states: Any) -> None:
        honest(model, *states)
        model.kernel[...] = model.kernel[...].at[0, 0].multiply(1 + 2**-23)

    monkeypatch.setattr(checkpoints_module.nnx, "update", one_bit_off)
    with pytest.raises(CheckpointError, match=r"1 arrays are not what was saved, the first model\.kernel"):
        restored(saved, make_run())


@pytest.mark.parametrize(
    ("optimizer", "width", "differs"),
    [
        ({"name": "lion"}, 64, "2 others: optimizer.optimizer[0].nu['bias'] is [64] float32, now none; "),
        ({"name": "sgd"}, 64, "5 others: optimizer.optimizer[0].count is [] int32, now none; "),
        ({"state": "compact"}, 64, "12 others: optimizer.optimizer[0].mu['bias'].codes is none, now "),
        ({}, 5, "6 others: model.bias is [64] float32, now [5] float32; "),
    ],
    ids=str,
)
def test_another_optimizer_or_model_is_refused(
    saved: Path, optimizer: dict[str, Any], width: int, differs: str, capfd: pytest.CaptureFixture[str]
) -> None:
    other = linear_run(linear_config(saved, optimizer=optimizer), shape=(4, width))
    with pytest.raises(CheckpointError) as caught:
        restored(saved, other)
    assert f"checkpoint {saved}/2 must hold the arrays of this run, got {differs}" in str(caught.value)
    assert str(caught.value).endswith("for a run with model.path=DIR in another run.dir")
    assert "Traceback" not in capfd.readouterr().err


def test_of_a_step_that_was_moved_elsewhere_only_the_link_is_deleted(tmp_path: Path) -> None:
    """As one whose older steps were moved to a larger disk, while it goes on."""
    directory, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    saved_run(directory, 1)
    (directory / "1").rename(elsewhere)
    (directory / "1").symlink_to(elsewhere)
    run = make_run(seed=1)
    checkpoints = Checkpoints(directory, keep=1)
    assert checkpoints.restore(run.updater, resume="auto") == 1
    checkpoints.save(2, run.updater)
    checkpoints.close()
    assert [path.name for path in directory.iterdir()] == ["2"]
    assert (elsewhere / METADATA).is_file()


def edit_metadata(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = checkpoint / METADATA
    content = json.loads(path.read_text())
    change(content["custom_metadata"])
    path.write_text(json.dumps(content))


def test_a_checkpoint_of_the_layout_before_says_what_changed(tmp_path: Path) -> None:
    """It had the same items, sums and step, and no format."""
    saved_run(tmp_path, 1)
    for name in ("format", "sum"):
        edit_metadata(tmp_path / "1", lambda metadata, name=name: metadata.pop(name))
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, make_run())
    assert str(caught.value) == (
        f"checkpoint {tmp_path}/1 must have format 2, got 1: since then parameters are stepped in float32, moments are "
        "float32, and gradients are not kept between steps; finish that run with the version that wrote it, or start "
        "over with checkpoint.resume=never"
    )
    edit_metadata(tmp_path / "1", lambda metadata: metadata.update(signed(metadata | {"format": 3})))
    with pytest.raises(CheckpointError, match="must have format 2, got 3"):
        restored(tmp_path, make_run())


def test_what_is_saved_beside_the_arrays(saved: Path, sums_after: dict[int, dict[str, Any]]) -> None:
    metadata = json.loads((saved / "2" / METADATA).read_text())["custom_metadata"]
    arrays = metadata["arrays"]
    assert metadata == signed({"global_step": 2, "format": 2, "run": "", "checksums": sums_after[2], "arrays": arrays})
    assert arrays.keys() == sums_after[2].keys()
    assert arrays["model.kernel"] == "[4, 64] float32"
    assert {name.split("[")[0].split(".")[0] for name in metadata["checksums"]} == {"model", "optimizer"}


@pytest.mark.parametrize("flipped", ["checksums", "model.kernel", "global_step", "format", '"run"', '"sum"'])
def test_a_bit_flipped_in_what_a_checkpoint_says_of_itself_leads_to_the_one_before(
    directory: Path, flipped: str
) -> None:
    """The model was blamed for a name that had changed, and nothing was restored."""
    path = directory / "2" / METADATA
    text = path.read_text()
    place = text.index(flipped) + 2
    path.write_text(text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
    _, again = resumed(directory, 1)
    (note,) = again.notes
    assert note.startswith("checkpoint 2 is damaged (")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_time_beyond_all_calendars(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": 10**30}))


@pytest.mark.parametrize("damage", [a_pipe, a_time_beyond_all_calendars, lambda path: path.write_text("[")])
def test_an_older_checkpoint_that_cannot_be_opened_is_set_aside(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    """The newest is sound; Orbax reads what the older ones say of themselves before it saves the next."""
    damage(directory / "1" / METADATA)
    run, again = resumed(directory, 2)
    (note,) = again.notes
    assert note.startswith(f"checkpoint 1 is damaged ({METADATA} cannot be read: ")
    again.save(3, run.updater)
    again.close()
    assert sorted(path.name for path in directory.iterdir()) == ["2", "3"]


def test_an_id_of_a_run_that_is_too_long_is_refused(tmp_path: Path) -> None:
    run, checkpoints = make_run(), Checkpoints(tmp_path / "c", keep=2, run_file=tmp_path / "run_id")
    checkpoints.save(1, run.updater)
    checkpoints.close()
    (tmp_path / "run_id").write_text("7" * 101)
    with pytest.raises(CheckpointError, match="must hold the id of the run, of at most 100 bytes, got .*; put back"):
        resumed(tmp_path / "c", 1, run_file=tmp_path / "run_id")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        run, checkpoints = make_run(), Checkpoints(tmp_path / name / "c", keep=2, run_file=tmp_path / name / "run_id")
        checkpoints.save(1, run.updater)
        checkpoints.close()
    one, other = (tmp_path / name for name in ("one", "other"))
    run, again = resumed(one / "c", 1, run_file=one / "run_id")
    again.save(2, run.updater)
    again.close()
    (other / "c" / "1").rename(one / "c" / "3")
    edit_metadata(one / "c" / "3", lambda metadata: metadata.update(signed(metadata | {"global_step": 3})))
    theirs, ours = (other / "run_id").read_text(), (one / "run_id").read_text()
    with pytest.raises(CheckpointError, match=f"must be of this run, whose id is {ours}, got one of the run {theirs}"):
        resumed(one / "c", 3, run_file=one / "run_id")
    (one / "run_id").unlink()  # a run that has none takes what is there
    resumed(one / "c", 3, run_file=one / "run_id")


@pytest.mark.full
def test_orbax_compiles_programs_to_save_and_we_do_not(tmp_path: Path) -> None:
    """For arrays that several devices hold, such as the bias."""
    run = linear_run(linear_config(tmp_path), mesh=make_mesh(2, 2))
    run.step()
    checkpoints = Checkpoints(tmp_path / "ours", keep=2)
    checkpoints.restore(run.updater, resume="auto")
    with counted_compilations() as compiled:
        checkpoints.save(1, run.updater)
        checkpoints.close()
    assert compiled == []
    plain = ocp.CheckpointManager(tmp_path / "plain")
    with counted_compilations() as compiled:
        plain.save(1, args=ocp.args.PyTreeSave(nnx.state(run.updater.model)))
        plain.close()
    assert compiled


def test_digest_sees_values_names_and_shapes() -> None:
    def digest(**leaves: np.ndarray) -> str:
        return params_digest({name: jnp.asarray(value) for name, value in leaves.items()})

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


def test_sums_are_those_of_each_array_alone() -> None:
    random = np.random.default_rng(0)
    leaves: dict[str, np.ndarray] = {f"a{index}": random.normal(size=(3, 5)).astype(np.float32) for index in range(40)}
    leaves |= {"b": random.integers(0, 99, 7).astype(np.int32), "c": random.integers(-9, 9, (3, 5)).astype(np.int8)}
    words = {name: value.view(f"uint{8 * value.itemsize}").astype(np.uint64) for name, value in leaves.items()}
    found = checksums({name: jnp.asarray(value) for name, value in leaves.items()})
    assert found == {name: int(value.sum()) % 2**32 for name, value in words.items()}


# --- the best one ----------------------------------------------------------------------------------------------------


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    run = make_run()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.restore(run.updater, resume="auto")
    left = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, None)):
        checkpoints.save(step, run.updater, best=best)
        assert checkpoints._manager is not None
        checkpoints._manager.wait_until_finished()
        left.append(sorted(int(path.name) for path in tmp_path.iterdir()))
    checkpoints.close()
    assert left == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [5, 6], [6, 7]]


@pytest.mark.full
@pytest.mark.parametrize(("best", "left"), [(None, ["3", "4"]), (1, ["1", "3", "4"])])
def test_what_a_process_killed_before_it_removed_older_steps_has_left(
    tmp_path: Path, best: int | None, left: list[str]
) -> None:
    saved_run(tmp_path, 1, 2, 3, 4, keep=4)
    _, checkpoints = resumed(tmp_path, 4)
    checkpoints.close(best=best)  # the last step was saved, so nothing is saved before the end
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_policy_is_read_without_its_optimizer_and_nothing_is_touched(
    directory: Path, sums_after: dict[int, dict[str, Any]]
) -> None:
    run = make_run(seed=1)
    unfinished = directory / "3.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    read_policy(directory, 1, run.updater.model)
    assert checksums(model_leaves(nnx.state(run.updater.model))).items() <= sums_after[1].items()
    assert unfinished.exists()


def test_a_policy_that_is_not_there_or_not_whole(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none; there are steps none"):
        read_policy(tmp_path / "nosuch", 1, make_run().updater.model)
    directory = copied(saved, tmp_path)
    with pytest.raises(CheckpointError, match=r"a checkpoint must be in .*/9, found none; there are steps \[1, 2\]"):
        read_policy(directory, 9, make_run().updater.model)
    with pytest.raises(CheckpointError, match=r"model\.kernel is \[4, 64\] float32, now \[4, 32\] float32"):
        read_policy(directory, 1, make_run(width=32).updater.model)
    flip_arrays(directory / "2")
    with pytest.raises(CheckpointError, match="must hold"):
        read_policy(directory, 2, make_run().updater.model)


# --- values that come to the host -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp", "tp"), PartitionSpec(None, "tp"), PartitionSpec()])
def test_values_come_to_the_host_whole_and_are_not_kept_there(spec: PartitionSpec) -> None:
    """A model that is looked at leaf by leaf is not held once more; jax keeps what it brings, see `_npy_value`."""
    values = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    array = jax.device_put(jnp.asarray(values), NamedSharding(trainer_mesh(2, 2), spec))
    np.testing.assert_array_equal(whole(array), values)
    assert array._npy_value is None
    np.asarray(array)
    if not array.is_fully_replicated:  # of those on a CPU there is a copy already
        assert array._npy_value is not None
