"""The learner the pipeline drives: one call updates the policy from one scored rollout.

inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
learner = Learner(config, inputs)
for step in range(learner.restored_step + 1, config.run.max_steps + 1):
    result = learner.update(scored)         # no number that is not finite reaches the policy
    ...                                     # move learner.params() to the sampler
    learner.save(step)
learner.close()
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float

from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner.building import LearnerInputs, build_parts, saved_reference
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.digest import params_digest, whole
from tpu_grpo.learner.failed import FailedUpdate, Keep, passed_over
from tpu_grpo.learner.kl_reward import with_kl_in_advantages
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.mini_batches import mini_batches
from tpu_grpo.learner.reference import reset
from tpu_grpo.learner.restoring import read_policy
from tpu_grpo.learner.rows import TrainRows, group_advantages, repacked, train_rows, unpacked
from tpu_grpo.learner.signal import counted_rows, informative_groups, signal_metrics
from tpu_grpo.learner.token_advantages import token_advantages
from tpu_grpo.learner.trained import has_adapters, parameters
from tpu_grpo.learner.update import by_name
from tpu_grpo.learner.update_metrics import MeasuredUpdate, update_metrics
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR
from tpu_grpo.records.errors import DataError, RewardError
from tpu_grpo.records.stages import Completion, ScoredRollout, UpdateResult


class Learner:
    """Holds the policy, its optimizer and its checkpoints.

    Args:
        config: the run.
        inputs: models and mesh.
        hosts: the processes of the run.

    Raises:
        ConfigError: for an algorithm or optimizer that cannot be trained with, or ``algorithm.beta`` without a
            reference.
        CheckpointError: for a checkpoint that cannot be restored.
    """

    def __init__(self, config: RunConfig, inputs: LearnerInputs, hosts: Hosts | None = None):
        self._config, self._host = config, 0 if hosts is None else hosts.index
        self._mesh = inputs.mesh
        parts = build_parts(config, inputs)
        self._algorithm, self._shape = parts.algorithm, parts.shape
        self._batches, self._updater, self._reference = parts.batches, parts.updater, parts.reference
        self._kept_reference = saved_reference(config, parts)
        self._keep: Keep | None = None
        self._skipped, self._kept_in = 0, None  # updates in a row, and where the first of them is kept
        self._checkpoints = Checkpoints(
            config.run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep, reference=self._kept_reference, hosts=hosts
        )
        self.restored_step = self._checkpoints.restore(self._updater, resume=config.checkpoint.resume)
        """The step that was restored; 0 for a fresh start."""
        self.restore_notes = tuple(self._checkpoints.notes)
        """What the user is to be told of the restore."""

    def share(self, names: Collection[str]) -> None:
        """Say which parameters' arrays the sampler holds: an update reuses the memory of the others."""
        self._updater.share(names)

    def update(self, scored: ScoredRollout) -> UpdateResult:
        """Go through one rollout ``algorithm.iterations`` times, with an optimizer update for each mini-batch.

        Raises:
            DataError, RewardError, NonFiniteError: for a rollout that cannot be learnt from; the policy is unchanged.
            NonFiniteError: for a loss or gradient that is not finite, unless such updates are skipped. Of several
                updates those before it were made.
        """
        started = time.perf_counter()
        self._check_rows(scored)
        informative_P = self.informative(scored)
        counted_B = counted_rows(scored.rollout, informative_P, self._config)
        advantages, step = self._advantages(scored, informative_P), scored.rollout.batch.step
        updates, notes = [], []
        for batches in self._updates(scored, advantages, counted_B):
            updates.append(update := self._update(batches))
            if not update.record.finite:
                place = (step, len(updates), self._config.updates_per_step)
                numbers = (update.loss, float(update.record.grad_norm))
                notes.append(self._pass_over(FailedUpdate(*place, *numbers, tuple(batches), scored, advantages)))
            else:
                self._skipped = 0
        self._reset_reference(step)
        seconds = time.perf_counter() - started
        metrics = update_metrics(updates) | signal_metrics(scored.rollout, informative_P, self._config)
        return UpdateResult(metrics=metrics, advantages=advantages, seconds=seconds, notes=tuple(notes))

    def keep_failed(self, keep: Keep) -> None:
        """Have updates whose loss or gradient is not finite kept, of several in a row the first."""
        self._keep = keep

    def informative(self, scored: ScoredRollout) -> Bool[np.ndarray, " P"]:
        """Say which groups can be learnt from; the rollout may have any number of prompts."""
        return informative_groups(scored, self._asked(scored), self._config)

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Float[np.ndarray, "B T"]:
        """Compute the policy's log-probability of every completion token, at the rollout's temperature, on every host.

        T is ``rollout.max_new_tokens``; values past a completion's end, and of tokens that were not sampled, are 0.
        """
        found = self._per_token(prompts, completions, lambda rows: {"policy": self._batches.policy_logprobs(rows)})
        return found["policy"]

    def params(self) -> nnx.State:
        """Return the policy's parameters as they lie on the trainer's mesh, those that are not trained among them."""
        return parameters(self._updater.model)

    def policy(self, step: int | None = None) -> nnx.Module:
        """Return the policy as it is, or as it was when this step was saved; what is not trained they share.

        Raises:
            CheckpointError: for a step that is not there or is damaged.
        """
        if step is None:
            return self._updater.model
        policy = nnx.clone(self._updater.model)
        read_policy(self._config.run_dir / CHECKPOINTS_DIR, step, policy, self._host)
        return policy

    def adapters(self) -> dict[str, np.ndarray]:
        """Gather the adapters, float32, on this host by dotted name; every host must call it. Without any: empty."""
        if not has_adapters(self._updater.model):
            return {}
        return {name: whole(leaf) for name, leaf in self._updater.stepped().items()}

    def params_digest(self) -> str:
        """Compute sha256 of all parameters, the trained ones as they are stepped; see `digest.params_digest`."""
        return params_digest(by_name(self.params()) | self._updater.stepped())

    def save_apart(self, directory: Path, step: int) -> None:
        """Save policy and optimizer as ``step`` in another directory, and wait until it is complete."""
        checkpoints = Checkpoints(directory, keep=1, reference=self._kept_reference)
        checkpoints.save(step, self._updater)
        checkpoints.close()

    def save(self, step: int, *, best: int | None = None) -> None:
        """Save policy and optimizer as step ``step``, in the background; ``best`` is a step that is kept."""
        self._checkpoints.save(step, self._updater, best=best)

    def close(self, *, best: int | None = None) -> None:
        """Wait until every checkpoint is complete; the newest stay, and the step ``best``."""
        self._checkpoints.close(best=best)

    def _check_rows(self, scored: ScoredRollout) -> None:
        totals = scored.scores.total
        if (rows := len(scored.rollout.completions)) != self._config.batch_rows:
            raise DataError(
                f"a step must have data.prompts_per_step * algorithm.group_size = {self._config.batch_rows} rows, got "
                f"{rows}; fill the batch up before it is sampled"
            )
        if len(totals) != rows:
            raise RewardError(f"every completion needs a reward, got {len(totals)} for {rows}; score them all")

    def _advantages(self, scored: ScoredRollout, informative_P: Bool[np.ndarray, " P"]) -> Float[np.ndarray, " B"]:
        """Compute the advantages; deviations of a whole step, too, are those of the groups that are not left out.

        Left out are groups of which no row is scored; a row that is not scored has the advantage 0.
        """
        size, scored_B = self._config.algorithm.group_size, scored.scores.scored
        taken_P: Bool[np.ndarray, " P"] = np.any(scored_B.reshape(-1, size), axis=1)
        if self._config.drops_uninformative:
            taken_P &= informative_P
        advantages = group_advantages(
            scored.scores.total,
            group_size=size,
            algorithm=self._algorithm,
            known=self._asked(scored),
            taken_P=taken_P,
        )
        return np.where(scored_B, advantages, 0.0)

    def _asked(self, scored: ScoredRollout) -> dict[str, np.ndarray]:
        """Put together what the advantages ask for beside the total rewards, see `ON_REQUEST`."""
        asked, groups = self._algorithm.asked, (-1, self._config.algorithm.group_size)
        found: dict[str, np.ndarray] = {}
        if "lengths_PG" in asked:
            found["lengths_PG"] = np.array([c.sampled_tokens for c in scored.rollout.completions]).reshape(groups)
        if "rewards_NPG" in asked or "weights_N" in asked:
            by_name, of_tokens = scored.scores.by_name, scored.scores.token_rewards
            specs = [spec for spec in self._config.rewards if spec.shown not in of_tokens]
            if not specs:
                raise RewardError(
                    f"these advantages take rewards of whole completions one by one, got only {list(of_tokens)}, which "
                    "are of single tokens; add one, or take another algorithm.advantage"
                )
            if missing := [spec.shown for spec in specs if spec.shown not in by_name]:
                raise RewardError(f"these advantages take rewards one by one, and {missing} are not scored; score them")
            found["rewards_NPG"] = np.stack([by_name[spec.shown].reshape(groups) for spec in specs])
            found["weights_N"] = np.array([spec.weight_at(scored.rollout.batch.step) for spec in specs])
        return found

    def _updates(
        self, scored: ScoredRollout, advantages: Float[np.ndarray, " B"], counted_B: Bool[np.ndarray, " B"]
    ) -> Iterator[list[TrainBatch]]:
        """Yield the micro-batches of every update on a rollout.

        What the policy is compared with is of the policy before the first update. Mini-batches of an iteration are
        placed together, so that no device waits for the host between them; one without a sampled token is left out.
        """
        config, rollout = self._config, scored.rollout
        iterations, prompts = config.algorithm.iterations, config.data.prompts_per_step
        if (size := config.mini_batch_prompts) == prompts:
            yield from self._with_kl_in_advantages([self._micro_batches(scored, advantages, counted_B)]) * iterations
            return
        row_prompts = [prompt.token_ids for prompt in rollout.row_prompts]
        known = self._per_token(row_prompts, rollout.completions, self._batches.compared)
        for iteration in range(1, iterations + 1):
            updates = []
            parts = mini_batches(prompts, size, config.run.seed, rollout.batch.step, iteration)
            for chosen in (part for part in parts if rollout.select(part).total_tokens):
                rows = rollout.rows_of(chosen)
                of_rows = {name: values_BT[rows] for name, values_BT in known.items()}
                updates.append(self._micro_batches(scored.select(chosen), advantages[rows], counted_B[rows], of_rows))
            yield from self._with_kl_in_advantages(updates)

    def _micro_batches(
        self,
        scored: ScoredRollout,
        advantages: Float[np.ndarray, " B"],
        counted_B: Bool[np.ndarray, " B"],
        known: Mapping[str, Float[np.ndarray, "B T"]] | None = None,
    ) -> list[TrainBatch]:
        """Pack and place the rows of an update, with what is ``known`` of their tokens by the names in `TrainRows`."""
        prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
        completions, aggregation, shape = scored.rollout.completions, self._algorithm.aggregation, self._shape
        of_tokens = token_advantages(advantages, scored, self._config)
        rows, packing = train_rows(prompts, completions, of_tokens, shape, aggregation, counted_B)
        fields: dict[str, Any] = {
            name: repacked(values_BT, packing, prompts, completions, shape.tokens)
            for name, values_BT in (known or {}).items()
        }
        return [self._batches.place(part) for part in replace(rows, **fields).chunks(shape.micro_batch)]

    def _with_kl_in_advantages(self, updates: Sequence[list[TrainBatch]]) -> list[list[TrainBatch]]:
        """Add the KL penalty to the advantages of the updates of an iteration, if it is a part of the reward."""
        section = self._config.algorithm
        if section.kl_in == "loss":
            return list(updates)
        penalized = iter(with_kl_in_advantages([batch for batches in updates for batch in batches], section.beta))
        return [[next(penalized) for _ in batches] for batches in updates]

    def _reset_reference(self, step: int) -> None:
        """Make the reference a copy of the policy, if the step is one of those after which that is done."""
        every = self._config.algorithm.reference_reset_every
        if every is not None and self._reference is not None and step % every == 0:
            reset(self._reference, self._updater.model, self._updater.trained)

    def _per_token(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        compute: Callable[[TrainRows], Mapping[str, jax.Array]],
    ) -> dict[str, Float[np.ndarray, "B T"]]:
        """Compute values of every sampled token, by name, on every host; 0 elsewhere and past a completion's end."""
        rows, packing = train_rows(prompts, completions, np.zeros(len(prompts)), self._shape)
        parts = [
            {name: whole(values) for name, values in compute(part).items()}
            for part in rows.chunks(self._shape.micro_batch)
        ]
        return {
            name: unpacked(
                np.concatenate([part[name] for part in parts]),
                packing,
                prompts,
                completions,
                self._shape.max_new_tokens,
            )
            for name in parts[0]
        }

    def _update(self, batches: Sequence[TrainBatch]) -> MeasuredUpdate:
        with self._mesh:
            started = [self._updater.accumulate(batch) for batch in batches], self._updater.step()
        return MeasuredUpdate(*jax.device_get(started))  # the first time that anything is waited for

    def _pass_over(self, failed: FailedUpdate) -> str:
        """Keep an update of which nothing arrived, and say so; or raise, if it is one too many."""
        if not self._skipped:
            self._kept_in = self._keep(failed) if self._keep else None
        self._skipped += 1
        return passed_over(failed, self._config.update, self._skipped, self._kept_in)
