"""Saves and restores the policy, the optimizer's state and the other state of updates, through Orbax.

Of a model with adapters, only the adapters are saved. The checksums also cover the base model, so that a run cannot
continue on another base model.

    <run.dir>/checkpoints/<step>/   model_params, optimizer_state, and the metadata
                                    {"global_step": step, "format": FORMAT, "run": id, "checksums": {...},
                                     "arrays": {...} (shapes and types), "sum": ...}

model_params holds the parameters that the model computes with; optimizer_state holds the count of updates, the
optimizer's moments, and the parameters' precision beyond ``model.dtype``. Some runs also save entropy_state (the
adapted coefficient of the entropy bonus), reference_params (the KL penalty's reference, if the run resets it),
teacher_params_NAME (a teacher that is a moving average of the policy) or carried_groups
(tpu_grpo/run/partial_groups.py).

A background thread saves a step into a directory with a temporary name, which is renamed when complete. If the process
is killed, the previous checkpoint stays the newest, and the next start removes the unfinished one.

A run continues after its newest sound (undamaged) checkpoint, and moves newer, damaged ones to another directory.
Orbax stores no checksums, and may read a file with changed bytes without an error. The checksums in the metadata
reveal the change.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from tpu_grpo.hosts import Hosts, by_host, end_all_hosts
from tpu_grpo.hosts.sharded_arrays import from_shards
from tpu_grpo.learner.compact import join_residual
from tpu_grpo.learner.parameters import Values, by_name, checksums, trained_type
from tpu_grpo.learner.update import Updater, UpdateState
from tpu_grpo.observe.run_files import DAMAGED_DIR, FROM_WEIGHTS, saved_steps
from tpu_grpo.records.errors import CheckpointError, DiskError, disk_error, disk_errors_explained
from tpu_grpo.records.json_files import replace_text
from tpu_grpo.records.untrusted_input import parse_json, read_file

Resume = Literal["auto", "never", "require"]
FORMAT = 2
"""The version of optimizer_state's contents. Version 1, which checkpoints did not name, held bfloat16 moments and the
accumulated gradients of ``optax.MultiSteps``."""
MODEL, STATE, ENTROPY, REFERENCE = "model_params", "optimizer_state", "entropy_state", "reference_params"
CARRIED, GROUPS_FILE = "carried_groups", "groups.json"
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's name of the file with a checkpoint's metadata."""
SHOWN = 300
"""The most characters of an error that a message quotes; Orbax's errors may contain whole trees of arrays."""
_NUMBER = re.compile(r"os_error_code='(\d+)'")
"""Finds the errno that TensorStore writes into exceptions that are not an OSError."""


class Unsound(Exception):
    """A checkpoint that is damaged, or belongs to another model or optimizer; the message says which."""


class _SavedState(NamedTuple):
    """The part of an `UpdateState` that every run has."""

    count: Any
    optimizer: Any
    kept: Any


class Held(NamedTuple):
    """The arrays of a run that checkpoints hold."""

    model: nnx.State
    updates: UpdateState
    frozen: Mapping[str, nnx.State]
    """The saved models that no gradient changes, by item."""

    @classmethod
    def of(cls, updater: Updater, frozen: Mapping[str, nnx.Module] = MappingProxyType({})) -> Self:
        """Split the models into their arrays. For a small model, this takes as long as the rest of a save."""
        states = {item: nnx.state(model) for item, model in frozen.items()}
        return cls(nnx.state(updater.model), updater.state, states)

    def items(self) -> dict[str, Any]:
        """Return the trees of arrays to save, by item; an item is a subdirectory of the checkpoint."""
        updates = self.updates
        state = _SavedState(updates.count, updates.optimizer, updates.kept)
        items: dict[str, Any] = {MODEL: saved_part(self.model), STATE: state}
        if updates.entropy:
            items[ENTROPY] = updates.entropy
        return items | {item: saved_part(frozen) for item, frozen in self.frozen.items()}

    def leaves(self) -> dict[str, Any]:
        """Return the arrays whose checksums are saved, by name."""
        frozen = [
            (item.replace("_params", ""), name, leaf)
            for item, state in self.frozen.items()
            for name, leaf in by_name(saved_part(state)).items()
        ]
        paths = jax.tree_util.tree_leaves_with_path(self.updates)
        return (
            model_leaves(self.model)
            | {f"{model}.{name}": leaf for model, name, leaf in frozen}
            | {f"optimizer{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
        )


@dataclass
class NewestAndBest(PreservationPolicy):
    """Makes Orbax keep the ``count`` newest checkpoints and that of the step ``best``, if it is set."""

    count: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint, in the order of their steps, whether to keep it."""
        newest = {checkpoint.step for checkpoint in checkpoints[-self.count :]}
        return [checkpoint.step in newest or checkpoint.step == self.best for checkpoint in checkpoints]


class Checkpoints:
    """Saves and restores the checkpoints of one run, numbered by step.

    checkpoints = Checkpoints(directory, keep=2)
    step = checkpoints.restore(updater, resume="auto")      # first of all
    checkpoints.save(step + 1, updater)
    checkpoints.close()

    The ``keep`` newest checkpoints are kept. ``hosts`` are the hosts that hold the arrays, including host 0. Each of
    them must call every method, at the same steps. ``run_file`` holds the run's random id, written at the first save;
    `restore` refuses checkpoints with another id.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        frozen: Mapping[str, nnx.Module] | None = None,
        hosts: Hosts | None = None,
        run_file: Path | None = None,
        carries: bool = False,
    ):
        self._directory, self._frozen, self._hosts = directory.absolute(), frozen or {}, hosts or Hosts()
        self._aside = self._directory.with_name(DAMAGED_DIR)
        self._kept = NewestAndBest(keep)
        self._restored = 0
        self._run_file, self._run = run_file, ""
        self.notes: list[str] = []
        """Messages for the user about the restore."""
        self._carries = carries
        self.carried: Any = None
        """The groups that a restore has read, as JSON; None without."""

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, opened at the first save."""
        self._run = self._run or self._id_of_run(secrets.token_hex(8))
        processes, members = ocp.options.MultiprocessingOptions(), self._hosts.members
        if len(members) < self._hosts.count:
            # For a subset of the processes, Orbax makes no directory, and needs a prefix for the names of barriers.
            self._directory.mkdir(parents=True, exist_ok=True)
            processes = ocp.options.MultiprocessingOptions(
                active_processes=set(members), barrier_sync_key_prefix="trainer"
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            create=processes.active_processes is None,
            multiprocessing_options=processes,
        )
        items: dict[str, Any] = handlers(self._frozen, multiprocessing_options=processes)
        return SavingManager(self._directory, item_handlers=items, options=options)

    def restore(self, updater: Updater, *, resume: Resume) -> int:
        """Load the newest sound checkpoint and return its step; 0 if there is none.

        Raises CheckpointError if there are checkpoints but none can be read back, or if there are none and ``resume``
        is ``require``. With ``never``, existing checkpoints are ignored; run/directory.py moves them away.
        """
        steps = [] if resume == "never" else self._saved_steps()
        if not steps and resume == "require":
            raise CheckpointError(
                f"checkpoint.resume=require needs a checkpoint in {self._directory}, found none; check run.dir, or "
                "use checkpoint.resume=auto"
            )
        if not steps:
            # compiles the sums now, not at the first save
            checksums(Held.of(updater, self._frozen).leaves())
            return 0
        self._run, reasons = self._id_of_run(), dict[int, str]()
        for step in steps:
            if reason := self._read(step, updater):
                reasons[step] = reason
                continue
            reasons |= self._unreadable([older for older in steps if older < step])
            if reasons:
                self._set_aside(reasons, step)
            self._restored = step
            return step
        (newest, reason), *older = reasons.items()
        others = f"; nor could {' and '.join(str(step) for step, _ in older)}" if older else ""
        raise CheckpointError(
            f"checkpoint {self._directory / str(newest)} must hold this model and optimizer, whole, but could not be "
            f"restored ({reason}){others}; undo a change of model, optimizer or algorithm (or of "
            "rollout.partial_extra), put back a sound copy, or start over with checkpoint.resume=never"
        )

    def _id_of_run(self, new: str = "") -> str:
        """Return the run's id, which host 0 reads from ``run_file``; if there is none, host 0 saves ``new`` there."""
        if self._run_file is None:
            return ""
        found = ""
        if self._hosts.is_first:
            if new and not self._run_file.is_file():
                self._run_file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._run_file, new)
            try:
                found = read_file(self._run_file, 100).decode(errors="replace") if self._run_file.is_file() else ""
            except OSError as error:
                raise CheckpointError(
                    f"{self._run_file} must hold the id of the run, of at most 100 bytes, got {error}; put back a "
                    "sound copy, or remove it"
                ) from error
        return self._hosts.broadcast("the id of the run", found, str)

    def _unreadable(self, steps: Sequence[int]) -> dict[int, str]:
        """Return, by step, why Orbax cannot read a checkpoint's timestamp, without which its manager does not open."""
        reasons = dict[int, str]()
        if self._hosts.is_first:
            for step in steps:
                try:
                    parse_json(read_file(self._directory / str(step) / METADATA))  # refuses pipes and endless files
                    _ = ocp.path.step.standard_name_format().find_step(self._directory, step).commit_timestamp
                except Exception as error:  # changed bytes can make Orbax raise anything
                    reasons[step] = f"{METADATA} cannot be read: {str(error)[:SHOWN]}"
        return self._hosts.broadcast("checkpoints that cannot be read", reasons, dict[int, str])

    def _saved_steps(self) -> list[int]:
        """Remove unfinished saves, and return the saved steps, newest first, which must be the same on all hosts."""
        if self._hosts.is_first:  # Orbax would do so in the background, before its next save
            for path in self._directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(path)
        self._hosts.barrier("unfinished checkpoints")
        steps = list(reversed(saved_steps(self._directory)))
        self._hosts.agree(f"the steps in {self._directory.name}", repr(steps))
        return steps

    def save(
        self,
        step: int,
        updater: Updater,
        *,
        best: int | None = None,
        carried: Callable[[], Any] | None = None,
    ) -> None:
        """Start saving a step, unless it is saved already. Returns once the arrays are copied and may change.

        ``carried`` returns the groups to save, as JSON.

        Older checkpoints are deleted, except the newest ``keep`` and that of the step ``best``.
        """
        self._kept.best = best
        if step == self._manager.latest_step():
            return
        held = Held.of(updater, self._frozen)
        items, leaves = held.items(), held.leaves()
        sums, arrays = checksums(leaves), described(leaves)
        if len(self._hosts.members) == 1 < self._hosts.count:
            items = jax.tree.map(_as_a_copy, items)
        arguments: dict[str, Any] = {item: ocp.args.PyTreeSave(tree) for item, tree in items.items()}
        if carried is not None:
            groups = carried()
            arguments[CARRIED], sums[CARRIED] = ocp.args.JsonSave(groups), sum_of_groups(groups)
            arrays[CARRIED] = "saved"
        metadata = {"global_step": step, "format": FORMAT, "run": self._run, "checksums": sums, "arrays": arrays}
        self._manager.save(step, args=ocp.args.Composite(**arguments), custom_metadata=signed(metadata), force=True)

    def close(self, *, best: int | None = None) -> None:
        """Wait until every save is complete; raises the error of the saving thread, such as DiskError for a full disk.

        Then delete the older checkpoints that an earlier, killed process did not delete.
        """
        if not self._restored and "_manager" not in vars(self):
            return  # nothing was restored, and nothing was saved
        self._manager.wait_until_finished()
        for step in sorted(self._manager.all_steps())[: -self._kept.count]:
            if step != best:
                self._manager.delete(step)
        self._manager.close()

    def _read(self, step: int, updater: Updater) -> str:
        """Load a step. Return "" if its checkpoint is sound, else what is damaged, as the same text on all hosts."""
        path, held, reason = self._directory / str(step), Held.of(updater, self._frozen), ""
        items, saved, carried = {}, {}, None
        arrays = described(held.leaves()) | ({CARRIED: "saved"} if self._carries else {})
        try:
            items, saved = read_items(path, held.items(), self._hosts.index, arrays, self._run)
            if self._carries:
                carried = read_groups(path, saved[CARRIED])
        except Unsound as error:
            reason = str(error)
        answers = self._hosts.share(f"what was read of step {step}", reason, str)
        if reasons := [(index, what) for index, what in enumerate(answers) if what]:
            index, reason = reasons[0]
            return f"on host {index}: {reason}" if self._hosts.count > 1 else reason
        nnx.update(updater.model, items[MODEL])
        state: _SavedState = items[STATE]
        updater.state = UpdateState(state.count, state.optimizer, state.kept, items.get(ENTROPY, ()))
        for item, model in self._frozen.items():
            nnx.update(model, items[item])
        self.carried = carried
        return wrong_sums(saved, Held.of(updater, self._frozen).leaves())

    def _set_aside(self, reasons: Mapping[int, str], sound: int) -> None:
        """Move damaged checkpoints (``reasons`` by step) to DAMAGED_DIR, and add notes; the run uses step ``sound``."""
        for step, reason in reasons.items():
            names = chain([str(step)], (f"{step}.{number}" for number in count(1)))
            to = next(path for name in names if not (path := self._aside / name).exists())
            if self._hosts.is_first:
                to.parent.mkdir(exist_ok=True)
                (self._directory / str(step)).rename(to)
            self.notes.append(
                f"checkpoint {step} is damaged ({reason}) and was moved to {to}; the run continues after step {sound}, "
                "its newest sound checkpoint"
            )
        self._hosts.barrier("damaged checkpoints")


# --- reading: each host reads its own shards --------------------------------------------------------------------------


def read_items(
    path: Path,
    wanted: Mapping[str, Any],
    host: int,
    arrays: Mapping[str, str],
    run: str = "",
    *,
    partial: bool = False,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Read this host's shards of some items of a step's checkpoint, without waiting for the other hosts.

    Args:
        path: the checkpoint, ``<directory>/<step>``.
        wanted: for each item, a tree of arrays (or descriptions) with the wanted types and shardings.
        host: the index of this host.
        arrays: the arrays that must have been saved, as `described` does.
        run: the id of the run that must have saved the checkpoint; only compared if both have an id.
        partial: ignore saved arrays that are not in ``wanted``.

    Returns:
        The items, and the checksums of all arrays of the checkpoint, by name.

    Raises:
        Unsound: the checkpoint is damaged, holds another step, or has arrays of other shapes.
        CheckpointError: the checkpoint was written by another version or run, or for other arrays (another model,
            optimizer or loss).
    """
    # Read without the barriers of Orbax: a host whose read fails would not reach them.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=host, active_processes={host}, barrier_sync_key_prefix=f"reading_on_host_{host}"
    )
    options = ocp.CompositeOptions(multiprocessing_options=alone)
    items: dict[str, Any] = handlers(wanted, multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **items)
    reader = ocp.Checkpointer(handler, multiprocessing_options=alone)
    try:
        if odd := [part for part in path.rglob("*") if not (part.is_file() or part.is_dir())]:
            raise Unsound(f"{odd[0].relative_to(path)} is no file")  # the read of a pipe would never end
        metadata = reader.metadata(path).custom_metadata or {}
        _check_metadata(path, metadata, arrays, run, exactly=STATE in wanted and not partial)
        if missing := [item for item in wanted if not (path / item).is_dir()]:
            raise Unsound(f"{' and '.join(missing)} is missing")
        as_wanted = ocp.checkpoint_utils.construct_restore_args  # reads arrays in the types and shardings of a tree
        arguments = {
            item: ocp.args.PyTreeRestore(item=tree, restore_args=as_wanted(target=tree), partial_restore=partial)
            for item, tree in wanted.items()
        }
        return dict(reader.restore(path, args=ocp.args.Composite(**arguments)).items()), metadata["checksums"]
    except (CheckpointError, Unsound):
        raise
    except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise  # the checkpoint is not to blame
        raise Unsound(f"{type(error).__name__}: {str(error).strip()[:SHOWN]}") from error
    finally:
        reader.close()


def read_groups(path: Path, expected_sum: int) -> Any:
    """Read the groups of a step's checkpoint, as JSON; raises Unsound for a file that is missing or was changed."""
    file = path / CARRIED / GROUPS_FILE
    try:
        groups = parse_json(read_file(file, most=file.stat().st_size))  # experts may take gigabytes
    except (OSError, ValueError) as error:
        raise Unsound(f"{CARRIED} cannot be read: {str(error)[:SHOWN]}") from error
    if sum_of_groups(groups) != expected_sum:
        raise Unsound(f"{CARRIED} is not what was saved")
    return groups


def sum_of_groups(groups: Any) -> int:
    """Return a checksum of groups in JSON."""
    return zlib.crc32(json.dumps(groups, sort_keys=True).encode())


def wrong_sums(saved: Mapping[str, int], leaves: Mapping[str, jax.Array]) -> str:
    """Say how many arrays do not match their saved checksum, or have none; "" if all arrays match."""
    wrong = [name for name, value in checksums(leaves).items() if saved.get(name) != value]
    return f"{len(wrong)} arrays are not what was saved, the first {wrong[0]}" if wrong else ""


def read_policy(directory: Path, step: int, model: nnx.Module, host: int = 0) -> None:
    """Load the policy of one checkpoint, without the optimizer's state, into a model. A run may be saving to the
    directory. Raises CheckpointError for a checkpoint that is missing, damaged, or of another model."""
    path = directory.absolute() / str(step)
    if not (path / MODEL).is_dir():
        found = list(saved_steps(directory))
        raise CheckpointError(f"a checkpoint must be in {path}, found none; there are steps {found or 'none'}")
    with unsound_explained(path):
        arrays = described(model_leaves(nnx.state(model)))
        items, saved = read_items(path, {MODEL: saved_part(nnx.state(model))}, host, arrays)
        nnx.update(model, items[MODEL])
        if reason := wrong_sums(saved, model_leaves(nnx.state(model))):
            raise Unsound(reason)


def read_stepped(directory: Path, step: int, model: nnx.Module, *, residual: bool, host: int = 0) -> Values:
    """Read the trained parameters of a checkpoint, by name, in float32, as the optimizer updates them.

    ``model`` holds the policy of that step in bfloat16, as `read_policy` reads it. The float32 values are copies in the
    checkpoint or, with ``residual``, the sums of the model's parameters and the checkpoint's 8-bit residuals. Raises
    CheckpointError for a checkpoint that is damaged, or of another model.
    """
    path, trained = directory.absolute() / str(step), by_name(nnx.state(model, trained_type(model)))
    kind = jnp.int8 if residual else jnp.float32
    kept = {name: jax.ShapeDtypeStruct(v.shape, kind, sharding=v.sharding) for name, v in trained.items()}
    with unsound_explained(path):
        arrays = described({f"optimizer.kept[{name!r}]": value for name, value in kept.items()})
        items, saved = read_items(path, {STATE: {"kept": kept}}, host, arrays, partial=True)
        kept = items[STATE]["kept"]
        if reason := wrong_sums(saved, {f"optimizer.kept[{name!r}]": value for name, value in kept.items()}):
            raise Unsound(reason)
    return {name: join_residual(trained[name], value) for name, value in kept.items()} if residual else kept


@contextmanager
def unsound_explained(path: Path) -> Iterator[None]:
    """Convert Unsound to CheckpointError."""
    try:
        yield
    except Unsound as error:
        raise CheckpointError(
            f"checkpoint {path} must hold this model, whole, but could not be read ({error}); take another step, or "
            "the config of the run that saved it"
        ) from error


def handlers(further: Iterable[str], **settings: Any) -> dict[str, Any]:
    """Make Orbax's handler for every item of a checkpoint, ``further`` ones included; each gets the ``settings``."""
    # By default Orbax cuts an array that several devices replicate into pieces, by a program compiled for each shape at
    # the first save. Here only small arrays are replicated, and they are saved whole. A file of shardings would take a
    # quarter of the time of a small model's save, and is not needed, because a restore states the wanted shardings.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    items = {MODEL, STATE, ENTROPY, REFERENCE, *further} - {CARRIED}
    trees = {item: ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **settings) for item in items}
    return {**trees, CARRIED: ocp.JsonCheckpointHandler(GROUPS_FILE, **settings)}


def _as_a_copy(array: jax.Array) -> jax.Array:
    """Declare an array that one process holds to be the first of two replicas, the second being on the last hosts.

    In a run of several processes, Orbax refuses an array that only one process holds. It writes the first replica.
    """
    assert isinstance(array.sharding, NamedSharding)
    mesh = array.sharding.mesh
    own = np.asarray(mesh.devices)
    others = np.asarray(by_host(jax.devices())[-mesh.size :]).reshape(own.shape)
    both = NamedSharding(Mesh(np.stack([own, others]), ("copy", *mesh.axis_names)), array.sharding.spec)
    return from_shards(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=both), array)


def saved_part(state: nnx.State) -> nnx.State:
    """Return the part of a model's state that a checkpoint holds: its adapters if it has any, else all of it."""
    adapters = nnx.filter_state(state, nnx.LoRAParam)
    return adapters if nnx.to_flat_state(adapters) else state


def model_leaves(state: nnx.State) -> dict[str, Any]:
    """Return all arrays of a model's state, under the names that their checksums have in a checkpoint."""
    return {f"model.{name}": leaf for name, leaf in by_name(state).items()}


def signed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Add the SHA-256 of a checkpoint's metadata: a changed byte is then reported as damage, not as another model."""
    text = json.dumps({name: value for name, value in metadata.items() if name != "sum"}, sort_keys=True)
    return {**metadata, "sum": hashlib.sha256(text.encode()).hexdigest()}


def described(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Write the shape and the type of each array: {"model.final_norm.w": "[64] float32"}."""
    return {name: f"{list(leaf.shape)} {jnp.dtype(leaf.dtype)}" for name, leaf in leaves.items()}


def _check_metadata(
    path: Path, metadata: Mapping[str, Any], arrays: Mapping[str, str], run: str, *, exactly: bool
) -> None:
    if "checksums" not in metadata:
        raise Unsound("its checksums are missing")
    found = metadata.get("format", 1)
    if metadata != signed(metadata) and ("sum" in metadata or found == FORMAT):
        raise Unsound("what it says of itself is not what was saved")
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} must have format {FORMAT}, got {found}: since then parameters are stepped in float32, "
            "moments are float32, and gradients are not kept between steps; finish that run with the version that "
            "wrote it, or start over with checkpoint.resume=never"
        )
    if run and (other := metadata.get("run")) and other != run:
        raise CheckpointError(
            f"checkpoint {path} must be of this run, whose id is {run}, got one of the run {other}; move it away, or "
            "continue that run in its own directory"
        )
    if (step := metadata.get("global_step")) != int(path.name):
        raise Unsound(f"it is named {path.name} and holds step {step}")
    saved = metadata.get("arrays") or {name: arrays.get(name, "") for name in metadata["checksums"]}
    own = ("model.", "optimizer.o", "optimizer.k") if exactly else ()
    names = {**arrays, **{name: "" for name in saved if name.startswith(own)}}
    there, here = [{name: found.get(name, "none") for name in names} for found in (saved, arrays)]
    if other := [f"{name} is {there[name]}, now {here[name]}" for name in names if there[name] != here[name]]:
        raise CheckpointError(
            f"checkpoint {path} must hold the arrays of this run, got {len(other)} others: {'; '.join(other[:3])}"
            f"{'; ...' * (len(other) > 3)}: that is another model, model.dtype, model.lora, optimizer or algorithm, or "
            f"rollout.partial_extra is new; undo the change, or {FROM_WEIGHTS}"
        )


# --- writing in the background ----------------------------------------------------------------------------------------


class SavingManager(ocp.CheckpointManager):
    """Orbax's manager, changed so that a disk error is raised as a DiskError and immediately ends all hosts.

    Orbax 0.12.8 writes on threads of its own. After an error on such a thread, this host waits at one barrier and the
    other hosts wait at another, for 20 minutes. Until then nobody sees the error.
    """

    _step: int | None = None
    """The step that is being saved, or was saved last."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # Orbax raises for a step whose directory is a link; the link is removed, and what it leads to is kept.
        delete, place = self._checkpoint_deleter.delete, Path(self.directory)
        self._checkpoint_deleter.delete = lambda step: (
            path.unlink(missing_ok=True) if (path := place / str(step)).is_symlink() else delete(step)
        )
        # A disk error is raised with a message of one line, so two kinds of tracebacks are hidden here. Orbax logs the
        # error where it occurs. Then it closes an event loop to which TensorStore still reports the end of every other
        # array, and each report becomes an exception that nobody can catch.
        logging.getLogger("absl").addFilter(_is_not_of_the_disk)
        if getattr(sys.unraisablehook, "func", None) is not _print_unless_of_a_closed_loop:
            sys.unraisablehook = partial(_print_unless_of_a_closed_loop, sys.unraisablehook)

    def save(self, step: int, *args: Any, **settings: Any) -> bool:
        """Start saving a step. Raises DiskError if this save or the previous one met a disk error."""
        self.wait_until_finished()
        self._step = step
        with disk_errors_explained(self._explained):
            return super().save(step, *args, **settings)

    def wait_until_finished(self) -> None:
        """Wait for the step that is being saved. Raises DiskError if this save met a disk error."""
        with disk_errors_explained(self._explained):
            super().wait_until_finished()

    def _wait_for_checkpointers(self) -> None:
        """Wait for the threads that write. Orbax calls this on another thread, before it waits for the other hosts."""
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            end_all_hosts(self._explained(error) or error, f"step {self._step} could not be saved")
            raise

    def _explained(self, error: BaseException) -> DiskError | None:
        """Convert an error that the disk caused to a DiskError with a one-line message; None for other errors."""
        if isinstance(error, DiskError):
            return error
        if (number := _system_error(error)) is None:
            return None
        return disk_error(OSError(number, os.strerror(number), f"step {self._step} in {self.directory}"))


def _system_error(error: BaseException) -> int | None:
    """Return the errno of the system error that caused ``error``; None if no system error did."""
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def _is_not_of_the_disk(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or _system_error(error) is None


def _print_unless_of_a_closed_loop(
    otherwise: "Callable[[sys.UnraisableHookArgs], object]", unraisable: "sys.UnraisableHookArgs"
) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        otherwise(unraisable)
