"""Saving and restoring the policy and what updates it, through Orbax.

Of a model with adapters these alone are saved; the sums are of its other parameters as well, so that adapters are not
continued on another base.

    <run.dir>/checkpoints/<step>/   model_params, optimizer_state, and
                                    {"global_step": step, "format": FORMAT, "checksums": {...}}

model_params holds the model as it computes; optimizer_state holds the count of updates, the optimizer's moments, and
what the parameters have beyond ``model.dtype``. Where they are used, entropy_state holds the coefficient of an entropy
bonus that is adapted, and reference_params a reference of the KL penalty that is made anew now and then.

A step is saved on a thread of its own into a directory with a temporary name, renamed when it is complete: a process
that is killed leaves the previous checkpoint as the newest, and the next start removes what was unfinished.

A run continues after the newest checkpoint that is sound; damaged ones that are newer are moved out of its way.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import restoring
from tpu_grpo.learner.digest import checksums
from tpu_grpo.learner.restoring import ENTROPY, FORMAT, MODEL, REFERENCE, STATE, Unsound
from tpu_grpo.learner.saving import SavingManager
from tpu_grpo.learner.update import Updater, UpdateState, by_name
from tpu_grpo.observe.run_files import DAMAGED_DIR, saved_steps
from tpu_grpo.records.errors import CheckpointError

Resume = Literal["auto", "never", "require"]


class _SavedState(NamedTuple):
    """The part of an `UpdateState` that every run has."""

    count: Any
    optimizer: Any
    kept: Any


class Held(NamedTuple):
    """What a run holds that checkpoints are of, with its models taken apart."""

    model: nnx.State
    updates: UpdateState
    reference: nnx.State | None

    @classmethod
    def of(cls, updater: Updater, reference: nnx.Module | None = None) -> Self:
        """Take the models apart, which takes as long as all the rest of a small model's save."""
        return cls(nnx.state(updater.model), updater.state, None if reference is None else nnx.state(reference))

    def items(self) -> dict[str, Any]:
        """Return the trees that are saved, by item."""
        updates, saved_part = self.updates, restoring.saved_part
        items = {MODEL: saved_part(self.model), STATE: _SavedState(updates.count, updates.optimizer, updates.kept)}
        if updates.entropy:
            items[ENTROPY] = updates.entropy
        return items if self.reference is None else items | {REFERENCE: saved_part(self.reference)}

    def leaves(self) -> dict[str, Any]:
        """Return the arrays whose sums are saved, by name."""
        reference = {} if self.reference is None else by_name(restoring.saved_part(self.reference))
        paths = jax.tree_util.tree_leaves_with_path(self.updates)
        return (
            restoring.model_leaves(self.model)
            | {f"reference.{name}": leaf for name, leaf in reference.items()}
            | {f"optimizer{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
        )


@dataclass
class NewestAndBest(PreservationPolicy):
    """Has Orbax keep the ``count`` newest checkpoints, and one that is the best."""

    count: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Give one answer per checkpoint; checkpoints come in the order of their steps."""
        newest = {checkpoint.step for checkpoint in checkpoints[-self.count :]}
        return [checkpoint.step in newest or checkpoint.step == self.best for checkpoint in checkpoints]


class Checkpoints:
    """Saves and restores the checkpoints of one run, labelled by its steps.

    checkpoints = Checkpoints(directory, keep=2)
    step = checkpoints.restore(updater, resume="auto")      # first of all
    checkpoints.save(step + 1, updater)
    checkpoints.close()

    Args:
        directory: where they are.
        keep: so many of the newest stay.
        reference: a model that is saved, too.
        hosts: the processes of the run; all of them call every method, at the same steps.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        reference: nnx.Module | None = None,
        hosts: Hosts | None = None,
    ):
        self._directory, self._reference, self._hosts = directory.absolute(), reference, hosts or Hosts()
        self._aside = self._directory.with_name(DAMAGED_DIR)
        self._kept = NewestAndBest(keep)
        self._starts_over = False
        self._restored = 0
        self.notes: list[str] = []
        """What the user is to be told of the restore."""

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Open the directory; a run that starts over does so at its first save, when an earlier run has made room."""
        if self._starts_over and (steps := saved_steps(self._directory)):
            raise CheckpointError(
                f"checkpoint.resume=never needs an empty {self._directory}, found step {steps[-1]}; move it away, or "
                "use another run.dir"
            )
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept)
        return SavingManager(self._directory, item_handlers=dict(restoring.handlers()), options=options)

    def restore(self, updater: Updater, *, resume: Resume) -> int:
        """Load the newest checkpoint that is sound, exactly, and return its step; 0 if there is none.

        Raises:
            CheckpointError: for some of which none can be read back, and for none with ``require``. With ``never`` one
                that is there is not looked at now, and refused when the first step is saved.
        """
        self._starts_over = resume == "never"
        steps = [] if self._starts_over else self._saved_steps()
        if not steps and resume == "require":
            raise CheckpointError(
                f"checkpoint.resume=require needs a checkpoint in {self._directory}, found none; check run.dir, or "
                "use checkpoint.resume=auto"
            )
        if not steps:
            checksums(self._held(updater).leaves())  # compiles them now, not at the first save
            return 0
        self._restored = self._read_newest_sound(steps, updater)
        return self._restored

    def _saved_steps(self) -> list[int]:
        """Return the steps that are saved, the newest first, the same on every host; the rest of a killed save goes."""
        if self._hosts.is_first:
            self._remove_unfinished()
        self._hosts.barrier("unfinished checkpoints")
        steps = list(reversed(saved_steps(self._directory)))
        self._hosts.agree(f"the steps in {self._directory.name}", repr(steps))
        return steps

    def save(self, step: int, updater: Updater, *, best: int | None = None) -> None:
        """Start saving; returns when the values are copied and may change. A step that is saved is left alone.

        Of the others the newest stay, and the step ``best``.
        """
        self._kept.best = best
        if step == self._manager.latest_step():
            return
        held = self._held(updater)
        self._manager.save(
            step,
            args=ocp.args.Composite(**{item: ocp.args.PyTreeSave(tree) for item, tree in held.items().items()}),
            custom_metadata={"global_step": step, "format": FORMAT, "checksums": checksums(held.leaves())},
            force=True,
        )

    def close(self, *, best: int | None = None) -> None:
        """Wait until every save is complete; raises what the saving thread raised, such as OSError for a full disk.

        Steps that a process killed between its save and the removal of older ones has left are removed now.
        """
        if not self._restored and "_manager" not in vars(self):
            return  # nothing was there, and nothing was saved
        self._manager.wait_until_finished()
        for step in sorted(self._manager.all_steps())[: -self._kept.count]:
            if step != best:
                self._manager.delete(step)
        self._manager.close()

    def _remove_unfinished(self) -> None:
        """Remove what a killed process was saving; Orbax would do so in the background, before its next save."""
        for path in self._directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
            shutil.rmtree(path)

    def _read_newest_sound(self, steps: Sequence[int], updater: Updater) -> int:
        reasons: dict[int, str] = {}
        for step in steps:
            if reason := self._read(step, updater):
                reasons[step] = reason
                continue
            if reasons:
                self._set_aside(reasons, step)
            return step
        raise self._all_unsound(reasons)

    def _read(self, step: int, updater: Updater) -> str:
        """Load a step; returns why it is not sound on some host, the same on all of them, or nothing."""
        path, held, reason = self._directory / str(step), self._held(updater), ""
        items, saved = {}, {}
        try:
            items, saved = restoring.read_items(path, held.items(), self._hosts.index, held.leaves())
        except Unsound as error:
            reason = str(error)
        told = self._hosts.gather(f"what was read of step {step}", reason.encode())
        if reasons := [(index, what.decode()) for index, what in enumerate(told) if what]:
            index, reason = reasons[0]
            return f"on host {index}: {reason}" if self._hosts.count > 1 else reason
        self._install(items, updater)
        try:
            restoring.check_sums(saved, checksums(self._held(updater).leaves()))
        except Unsound as error:
            return str(error)
        return ""

    def _held(self, updater: Updater) -> Held:
        return Held.of(updater, self._reference)

    def _install(self, items: Mapping[str, Any], updater: Updater) -> None:
        nnx.update(updater.model, items[MODEL])
        state: _SavedState = items[STATE]
        updater.state = UpdateState(state.count, state.optimizer, state.kept, items.get(ENTROPY, ()))
        if self._reference is not None:
            nnx.update(self._reference, items[REFERENCE])

    def _set_aside(self, reasons: Mapping[int, str], sound: int) -> None:
        """Move damaged checkpoints out of the way of a run that goes on after an older one, and tell the user."""
        for step, reason in reasons.items():
            to = _free_name(self._aside / str(step))
            if self._hosts.is_first:
                to.parent.mkdir(exist_ok=True)
                (self._directory / str(step)).rename(to)
            self.notes.append(
                f"checkpoint {step} is damaged ({reason}) and was moved to {to}; the run continues after step {sound}, "
                "its newest sound checkpoint"
            )
        self._hosts.barrier("damaged checkpoints")

    def _all_unsound(self, reasons: Mapping[int, str]) -> CheckpointError:
        (newest, reason), *older = reasons.items()
        others = f"; nor could {' and '.join(str(step) for step, _ in older)}" if older else ""
        return CheckpointError(
            f"checkpoint {self._directory / str(newest)} must hold this model and optimizer, whole, but could not be "
            f"restored ({reason}){others}; undo a change of model, optimizer or algorithm, put back a sound copy, or "
            "start over with checkpoint.resume=never"
        )


def _free_name(path: Path) -> Path:
    """Return the path, or the first of ``<path>.1``, ``<path>.2``... that is not taken."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
