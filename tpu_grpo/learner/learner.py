"""The learner, which updates the policy from one scored rollout per call.

inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
learner = Learner(config, inputs)           # restores the newest checkpoint
for step in range(learner.restored_step + 1, config.run.max_steps + 1):
    result = learner.update(scored)         # NaN and infinities never reach the policy
    ...                                     # move learner.params() to the sampler
    learner.save(step)
learner.close()

A rollout becomes one `Signal`, which holds the advantages and marks the completions that count. The signal becomes
packed rows, the rows become micro-batches, and the micro-batches make one update or several.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Shaped

from tpu_grpo.config import RunConfig, UpdateSection
from tpu_grpo.hosts import Hosts, hosts_of, packed, unpacked as unpacked_numbers
from tpu_grpo.learner.batches import with_kl_in_advantages, with_top_entropy
from tpu_grpo.learner.building import LearnerInputs, LearnerParts, build_parts
from tpu_grpo.learner.checkpoints import Checkpoints, read_groups, read_policy, sum_of_groups, unsound_explained
from tpu_grpo.learner.loss import AgreementSums, TrainBatch
from tpu_grpo.learner.parameters import by_name, copy_values, parameters, params_digest, trained_type, whole
from tpu_grpo.learner.rows import RowShape, sampled_mask, train_rows, unpacked
from tpu_grpo.learner.signal import Signal, read_signal
from tpu_grpo.learner.teachers import TeacherReadings
from tpu_grpo.learner.update import MeasuredUpdate, update_metrics
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, RUN_FILE
from tpu_grpo.records.errors import CheckpointError, DataError, NonFiniteError
from tpu_grpo.records.stages import Completion, ScoredRollout, UpdateResult

RESTORED, METRICS = "the step that was restored", "the metrics of an update"
LOGPROBS, DIGEST = "log-probabilities of the policy", "the digest of the parameters"
GROUPS = "the checksum of the groups that were restored"
"""Names of what the trainer's hosts broadcast to the hosts that only sample."""


MOST_SKIPPED = 10
"""With update.on_non_finite=skip, the run ends if more updates than this in a row are not finite."""


class SkippedUpdates:
    """Counts consecutive skipped updates, and raises an error if no further update may be skipped."""

    def __init__(self, section: UpdateSection):
        self._section, self._in_a_row = section, 0

    def interrupted(self) -> None:
        """Note that an update was applied, so that the count of consecutive skipped updates restarts from 0."""
        self._in_a_row = 0

    def add(self, what: str) -> str:
        """Skip an update, and return a note about it. Raises NonFiniteError if updates may not be skipped, or if too
        many consecutive updates were skipped. ``what`` says which number was not finite."""
        self._in_a_row += 1
        section = self._section
        if section.on_non_finite == "stop":
            why, remedy = "nothing of it reached the policy", ", or set update.on_non_finite=skip"
        elif self._in_a_row > MOST_SKIPPED:
            why, remedy = f"that makes {self._in_a_row} updates in a row, and {MOST_SKIPPED} may be skipped", ""
        else:
            return f"{what}; the update was skipped, and nothing of it reached the policy"
        raise NonFiniteError(
            f"{what}; {why}. Continue from the last checkpoint with a lower optimizer.learning_rate or "
            f"model.dtype=float32, which checkpoint.allow_changes must name{remedy}"
        )


class Learner:
    """Holds the policy, its optimizer and its checkpoints.

    Raises ConfigError for an algorithm or optimizer that cannot be built, or ``algorithm.beta`` > 0 without a
    reference, and CheckpointError for a checkpoint that cannot be restored.
    """

    def __init__(self, config: RunConfig, inputs: LearnerInputs, hosts: Hosts | None = None):
        self._config, self._hosts = config, hosts or Hosts()
        self._own_slice = self._hosts.among(hosts_of(inputs.mesh.devices.flat))
        self.trainers = self._hosts.among(hosts_of((inputs.joined or inputs.mesh).devices.flat))
        """The hosts of all slices that have devices of a trainer, and hold parameters."""
        self._parts = self.build(config, inputs)
        self._updater = self._parts.updater
        self._skipped = SkippedUpdates(config.update)
        self._directory = config.run_dir / CHECKPOINTS_DIR
        self._checkpoints = Checkpoints(
            self._directory,
            keep=config.checkpoint.keep,
            frozen=self._parts.saved_frozen,
            hosts=self._own_slice,
            run_file=config.run_dir / RUN_FILE,
            carries=config.open_groups > 0,
        )
        self._saves = self._parts.slices.index == 0
        """Whether this host's slice saves checkpoints, which only the first does; all slices hold the same."""
        restored = self._checkpoints.restore(self._updater, resume=config.checkpoint.resume) if self._saves else 0
        share = self._from_trainers if self._parts.slices.count == 1 else self._hosts.broadcast
        self.restored_step = share(RESTORED, restored, int)
        """The step that was restored; 0 for a fresh start."""
        if not self._saves and self.restored_step:  # by now, the first slice has moved damaged checkpoints away
            self._restore_as_first_slice()
        self._has_previous = not self.restored_step
        self.restore_notes = tuple(self._checkpoints.notes)
        self.carried = self._checkpoints.carried
        """The groups that were kept after the restored step, as JSON (tpu_grpo/run/partial_groups.py); None without
        such."""
        if self.restored_step and config.open_groups:
            self._from_trainers(GROUPS, sum_of_groups(self.carried), int)

    def _restore_as_first_slice(self) -> None:
        restored = self._checkpoints.restore(self._updater, resume="require")
        if restored != self.restored_step:
            raise CheckpointError(
                f"every slice must restore the checkpoint of step {self.restored_step}, got {restored} on host "
                f"{self._hosts.index}; give all slices the same files, or remove the damaged checkpoint"
            )

    build = staticmethod(build_parts)
    """Builds the parts that update the policy; they are abstract if the model is."""

    def share(self, names: Collection[str]) -> None:
        """Name the parameters whose arrays the sampler also uses; an update donates the buffers of all other
        parameters."""
        self._updater.share(names)

    def taught(self, scored: ScoredRollout) -> TeacherReadings:
        """Return what the teachers say about a rollout; every host must call this."""
        return self._parts.teachers.read(scored, self._per_token, self._hosts)

    def update(self, scored: ScoredRollout, taught: TeacherReadings | None = None) -> UpdateResult:
        """Go through one rollout ``algorithm.iterations`` times, with an optimizer update for each mini-batch.
        ``taught`` is what `taught` returned for it, if that was called before.

        Raises:
            DataError, RewardError, NonFiniteError: for a rollout that cannot be learnt from; the policy is unchanged.
            NonFiniteError: for a loss or gradient that is not finite, if `SkippedUpdates` does not skip the update.
                The step's earlier updates remain applied.
        """
        before = 0.0 if taught is None else taught.metrics.get("teachers/seconds", 0.0)
        started, config, parts = time.perf_counter() - before, self._config, self._parts
        if (rows := len(scored.rollout.completions)) != config.batch_rows:
            raise DataError(
                f"a step must have data.prompts_per_step * algorithm.group_size = {config.batch_rows} rows, got "
                f"{rows}; fill the batch up before it is sampled"
            )
        signal = self._signal(scored)
        updates, notes = [], []
        began = any(completion.sampled_tokens for completion in signal.completions)
        if not began:
            failed: Any = signal.completions[0].episode  # the environment did, before the first turn
            why = f"in row 0 the environment {failed.environment} {failed.failure.text}"
            notes.append(f"step {signal.step}: nothing was learnt, because no conversation had a turn: {why}")
        taught = self.taught(scored) if taught is None else taught
        for update in self._made_updates(signal, scored, taught) if began else ():
            updates.append(update)
            if update.record.finite:
                self._skipped.interrupted()
                continue
            notes.append(self._skipped.add(self._failure(update, len(updates), signal, scored, taught.broken)))
        parts.teachers.follow(self._updater.stepped)
        every = config.algorithm.reference_reset_every
        if every is not None and parts.reference is not None and signal.step % every == 0:
            copy_values(parts.reference.model, self._updater.model, self._updater.trained)
        measures = update_metrics(updates, stale=config.algorithm.staleness > 0) if began else {}
        seconds = time.perf_counter() - started
        measures = {**measures, **signal.metrics(), **taught.metrics}
        metrics = self._from_trainers(METRICS, measures, dict[str, float])  # waits for hosts that sample
        histograms = updates[0].histograms if began and updates[0].record.finite else {}
        return UpdateResult(metrics, signal.advantages_B, seconds, tuple(notes), histograms)

    def _signal(self, scored: ScoredRollout) -> Signal:
        config = self._config
        return read_signal(
            *(scored, self._parts.settings.algorithm, config.rewards, config.environment),
            masks_truncated=config.algorithm.truncated == "mask",
            drops_uninformative=config.drops_uninformative,
            from_rewards=config.algorithm.learns_from_rewards,
        )

    def _made_updates(self, signal: Signal, scored: ScoredRollout, taught: TeacherReadings) -> Iterator[MeasuredUpdate]:
        """Make the step's updates; yields the measurements of each update."""
        every = self._config.logging.histograms_every
        due = every > 0 and signal.step % every == 0  # whether to make histograms of the step's first update
        for number, batches in enumerate(self._updates(signal, taught)):
            yield self._update(batches, histograms=due and number == 0, first=number == 0)

    def _failure(
        self, update: MeasuredUpdate, number: int, signal: Signal, scored: ScoredRollout, broken: str = ""
    ) -> str:
        """Say which number of an update is not finite, in which gradients, and which row of the step it may come from.

        That row is the first with a log-probability of a teacher (``broken`` says it) or of the current policy that is
        not finite, or else that of the largest advantage. Every host with devices of a trainer must call this.
        """
        name, algorithm, several = "loss", self._config.algorithm.name, self._config.updates_per_step
        value = update.loss
        if math.isfinite(value):
            name, value = "gradient norm", float(update.record.grad_norm)
        of_several = f", update {number} of {several}," if several > 1 else ""
        own = f" with algorithm.name={algorithm}" if ":" in algorithm else ""
        rule = f"the {name} of step {signal.step}{of_several}{own} must be finite, got {value:g}"
        logps_BT = self._per_token(
            signal.prompts, signal.completions, lambda batch: {"policy": self._parts.batches.policy_logprobs(batch)}
        )["policy"]
        bad = np.argwhere(~np.isfinite(logps_BT))
        largest_B = [
            np.abs(values[sampled_mask(completion)]).max(initial=0.0)
            for values, completion in zip(signal.token_advantages, signal.completions, strict=True)
        ]
        row, what = int(np.argmax(largest_B)), f"the largest advantage, {max(largest_B):g}, is"
        if len(bad):
            row, token = bad[0].tolist()
            what = f"the policy's log-probability of token {token} is {logps_BT[row, token]}"
        rewards = ", ".join(f"{name} {values[row]:g}" for name, values in scored.scores.by_name.items())
        of_row = f" in row {row}, whose reward is {scored.scores.total[row]:g} ({rewards})"
        if broken:
            what, of_row = f"{broken}; check its weights, or give it dtype=float32", ""
        tensors = ""
        if update.broken:
            tensors = f"; {len(update.broken)} gradients are not finite, the first that of {update.broken[0]}"
        return f"{rule}{tensors}; {what}{of_row}"

    def informative(self, scored: ScoredRollout) -> Bool[np.ndarray, " P"]:
        """Return which groups are informative (see signal.py); the rollout may have any number of prompts."""
        return self._signal(scored).informative_P

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Float[np.ndarray, "B T"]:
        """Compute the policy's log-probability of every completion token, at the rollout's temperature, on every host.

        T is ``rollout.max_new_tokens``; values past a completion's end, and of tokens that were not sampled, are 0.
        """
        batches = self._parts.batches
        found = self._per_token(prompts, completions, lambda batch: {"policy": batches.policy_logprobs(batch)})
        if self.trainers is not self._hosts:
            self._hosts.broadcast(LOGPROBS, packed(found["policy"].ravel()), str)
        return found["policy"]

    def gradients(self, scored: ScoredRollout) -> dict[str, np.ndarray]:
        """Compute the gradient of the first update's loss on a rollout: float32 arrays by dotted name, on every host.
        The policy is not changed. Raises the errors of `update` for a rollout that cannot be learnt from."""
        self._updater.accumulate(next(self._updates(self._signal(scored), self.taught(scored))))
        gradients = {name: whole(value) for name, value in self._updater.gradients().items()}
        self._updater.forget_gradients()
        return gradients

    def params(self) -> nnx.State:
        """Return the policy's parameters, sharded over the trainer's mesh, frozen ones included."""
        return parameters(self._updater.model)

    def policy(self, step: int | None = None) -> nnx.Module:
        """Return the current policy, or a copy of the policy saved at ``step``. With adapters, the copy shares the base
        model's arrays. Raises CheckpointError for a checkpoint that is missing or damaged."""
        if step is None:
            return self._updater.model
        policy = nnx.clone(self._updater.model)
        read_policy(self._directory, step, policy, self._hosts.index)
        return policy

    def adapters(self) -> dict[str, np.ndarray]:
        """Gather the adapters on this host as float32 arrays by dotted name; {} if the policy has none. Every host must
        call this."""
        if trained_type(self._updater.model) is not nnx.LoRAParam:
            return {}
        return {name: whole(leaf) for name, leaf in self._updater.stepped().items()}

    def params_digest(self) -> str:
        """Compute the SHA-256 of all parameters, the trained ones in the optimizer's precision; see
        `parameters.params_digest`."""
        return self._from_trainers(DIGEST, params_digest(by_name(self.params()) | self._updater.stepped()), str)

    def save_apart(self, directory: Path, step: int, carried: Callable[[], Any] | None = None) -> None:
        """Save as `save` does, but in another directory, and wait until the save is complete."""
        if not self._saves:
            return
        checkpoints = Checkpoints(directory, keep=1, frozen=self._parts.saved_frozen, hosts=self._own_slice)
        checkpoints.save(step, self._updater, carried=carried)
        checkpoints.close()

    def save(self, step: int, *, best: int | None = None, carried: Callable[[], Any] | None = None) -> None:
        """Save policy, optimizer and ``carried()`` (groups as JSON) as step ``step``, in the background. The checkpoint
        of the step ``best`` is not deleted."""
        if self._saves:
            self._checkpoints.save(step, self._updater, best=best, carried=carried)

    def close(self, *, best: int | None = None) -> None:
        """Wait until every checkpoint is complete. The newest checkpoints and that of the step ``best`` are kept."""
        if self._saves:
            self._checkpoints.close(best=best)

    def _from_trainers(self, name: str, value: Any, kind: object) -> Any:
        """Return host 0's value on every host. Host 0 is one of the trainer's hosts, and they all have this value.

        If all hosts are the trainer's, nothing is sent.
        """
        return value if self.trainers is self._hosts else self._hosts.broadcast(name, value, kind)

    def _updates(self, signal: Signal, taught: TeacherReadings) -> Iterator[list[TrainBatch]]:
        """Yield the micro-batches of every update on a rollout.

        Log-probabilities of the old policy and the reference are computed before the first update. The mini-batches of
        an iteration are placed together, so that no device waits for the host between them.
        """
        config, rows = self._config, (signal.prompts, signal.completions)
        iterations, size = config.algorithm.iterations, config.mini_batch_prompts
        known: dict[str, np.ndarray] = {**taught.known}
        if self._parts.shape.chosen:
            compute = partial(self._parts.batches.policy_logprobs, field="entropies_RS")
            known |= self._per_token(*rows, lambda batch: {"importance": compute(batch)})
        if size == config.data.prompts_per_step:
            yield from self._placed([(signal, known)]) * iterations
            return
        known |= self._per_token(*rows, self._parts.batches.compared)
        for iteration in range(1, iterations + 1):
            parts = signal.mini_batches(size, config.run.seed, iteration)
            yield from self._placed(
                [(part, {name: values_BT[rows] for name, values_BT in known.items()}) for part, rows in parts]
            )

    def _placed(
        self, signals: Sequence[tuple[Signal, Mapping[str, Shaped[np.ndarray, "B T ..."]]]]
    ) -> list[list[TrainBatch]]:
        """Put the rows of an iteration's updates on the devices. Each signal comes with the arrays that are already
        known, by name; with {} if none are."""
        section, shape, updates = self._config.algorithm, self._parts.shape, list[list[TrainBatch]]()
        aggregation = self._parts.settings.algorithm.aggregation
        for signal, known in signals:
            batch, _ = train_rows(
                signal.prompts, signal.completions, signal.advantages, shape, aggregation, signal.counted_B, known
            )
            if shape.chosen:
                batch = with_top_entropy(batch, section.top_entropy_quantile)
            updates.append([self._parts.batches.place(part) for part in self._own(batch, shape)])
        if section.kl_in == "loss":
            return updates
        flat = [batch for batches in updates for batch in batches]
        of_all = partial(self._parts.slices.of_all, "sums of the KL penalty", trainers=self.trainers)
        penalized = iter(with_kl_in_advantages(flat, section.beta, of_all))
        return [[next(penalized) for _ in batches] for batches in updates]

    def _per_token(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        compute: Callable[[TrainBatch], Mapping[str, jax.Array]],
        shape: RowShape | None = None,
    ) -> dict[str, Shaped[np.ndarray, "B T ..."]]:
        """Apply ``compute`` to packed rows, and return its arrays by name on every host; 0 for tokens not sampled. The
        rows have the shape of the policy's, or ``shape``."""
        shape = shape or self._parts.shape
        batch, packing = train_rows(prompts, completions, np.zeros(len(prompts)), shape)
        parts = self._parts.slices.gathered(map(compute, self._own(batch, shape)))
        return {
            name: unpacked(
                np.concatenate([part[name] for part in parts]), packing, len(completions), shape.max_new_tokens
            )
            for name in parts[0]
        }

    def _own(self, batch: TrainBatch, shape: RowShape) -> list[TrainBatch]:
        """Cut rows of a shape into micro-batches, and return those of this host's slice."""
        return self._parts.slices.own(list(batch.chunks(shape.micro_batch)), lambda: shape.empty(shape.micro_batch))

    def _update(self, batches: Sequence[TrainBatch], *, histograms: bool = False, first: bool = True) -> MeasuredUpdate:
        sampled_by = self._agreement_with_previous(batches) if first else None
        sums = self._updater.accumulate(batches)
        counted = self._updater.histograms() if histograms else {}
        # the host waits for the devices in this line only
        sums, record, counted, sampled_by = jax.device_get((sums, self._updater.step(), counted, sampled_by))
        of_all = self._parts.slices.of_all("sums of the micro-batches", sums, self.trainers)
        return MeasuredUpdate(of_all, record, counted, sampled_by, self._updater.broken)

    def _agreement_with_previous(self, batches: Sequence[TrainBatch]) -> AgreementSums | None:
        """With algorithm.staleness, compare the engine with the policy that it sampled this step's completions with.

        One micro-batch of this slice is compared, that with the most tokens of the step's rollout. The current policy
        then becomes the previous one. Returns None in the first step of a continued run, whose checkpoint does not hold
        the policy of the step before.
        """
        if (previous := self._parts.previous) is None:
            return None
        made, sums = self._parts.batches, None
        if self._has_previous:
            newest = batches[0]
            if newest.older is not None:
                newest = max(batches, key=lambda batch: int(made.newest(batch).sum()))
            sums = made.agreement_with(previous, newest)
        copy_values(previous, self._updater.model, self._updater.trained)
        self._has_previous = True
        return sums


class DescribedLearner(Learner):
    """The learner on a host that only samples. It has abstract parameters, and receives the trainer's metrics. Of the
    update it only computes what teachers say on its devices, and it neither restores nor saves.

    Args:
        config: the run.
        parts: the abstract parts of the run's learner (see building.py).
        hosts: all hosts of the run.
    """

    def __init__(self, config: RunConfig, parts: LearnerParts, hosts: Hosts):
        self._config, self._hosts, self._parts, self._updater = config, hosts, parts, parts.updater
        self._skipped, self._saves = SkippedUpdates(config.update), False
        self.trainers = hosts.among([hosts.index])  # this host tells nobody
        self.restored_step = self._from_trainers(RESTORED, 0, int)
        self.restore_notes, self.carried = (), None
        if self.restored_step and config.open_groups:
            path = config.run_dir / CHECKPOINTS_DIR / str(self.restored_step)
            with unsound_explained(path):
                self.carried = read_groups(path, self._from_trainers(GROUPS, 0, int))

    def update(self, scored: ScoredRollout, taught: TeacherReadings | None = None) -> UpdateResult:
        """Wait for the update on the trainer's hosts, where notes and histograms stay. Raises the
        errors of `read_signal`."""
        started, signal = time.perf_counter(), self._signal(scored)
        _ = self.taught(scored) if taught is None else taught
        metrics = self._from_trainers(METRICS, {}, dict[str, float])
        return UpdateResult(metrics, signal.advantages_B, time.perf_counter() - started)

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Float[np.ndarray, "B T"]:
        """Return the log-probabilities that the trainer's hosts compute, see `Learner.logprobs`."""
        shape = len(completions), self._config.rollout.max_new_tokens
        read = lambda text: unpacked_numbers(text, math.prod(shape))  # noqa: E731
        return self._hosts.broadcast(LOGPROBS, "", str, read).reshape(shape).astype(np.float32)

    def policy(self, step: int | None = None) -> nnx.Module:
        """Return the abstract policy, which is the same for every step."""
        return self._updater.model

    def adapters(self) -> dict[str, Any]:
        """Return the descriptions of the adapters, by dotted name; empty without adapters."""
        return by_name(nnx.state(self._updater.model, nnx.LoRAParam))

    def params_digest(self) -> str:
        """Return the digest that the trainer's hosts compute."""
        return self._from_trainers(DIGEST, "", str)
