"""The learner the pipeline drives: one call updates the policy from one scored rollout.

inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
learner = Learner(config, inputs)
for step in range(learner.restored_step + 1, config.run.max_steps + 1):
    result = learner.update(scored)         # raises before a non-finite number reaches the sampler
    ...                                     # move learner.params() to the sampler
    learner.save(step)
learner.close()
"""

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float

from tpu_grpo.algorithms import correction_metrics
from tpu_grpo.config import RunConfig
from tpu_grpo.errors import DataError, NonFiniteError, RewardError
from tpu_grpo.learner.agreement import agreement_metrics
from tpu_grpo.learner.building import LearnerInputs, build_parts
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.digest import params_digest, whole
from tpu_grpo.learner.kl_reward import with_kl_in_advantages
from tpu_grpo.learner.loss import LossSums, TrainBatch
from tpu_grpo.learner.reference import reset
from tpu_grpo.learner.rows import group_advantages, train_rows, unpacked
from tpu_grpo.learner.signal import counted_rows, informative_groups, signal_metrics
from tpu_grpo.learner.trained import has_adapters, parameters
from tpu_grpo.learner.update import UpdateRecord, by_name
from tpu_grpo.metrics.run_files import CHECKPOINTS_DIR
from tpu_grpo.types import Completion, ScoredRollout, UpdateResult


class Learner:
    """Holds the policy, its optimizer and its checkpoints.

    Args:
        config: the run.
        inputs: models and mesh.

    Raises:
        ConfigError: for an algorithm or optimizer that cannot be trained with, or ``algorithm.beta`` without a
            reference.
        CheckpointError: for a checkpoint that cannot be restored.
    """

    def __init__(self, config: RunConfig, inputs: LearnerInputs):
        self._config = config
        self._mesh = inputs.mesh
        parts = build_parts(config, inputs)
        self._algorithm, self._shape = parts.algorithm, parts.shape
        self._batches, self._updater, self._reference = parts.batches, parts.updater, parts.reference
        kept = parts.reference if config.algorithm.reference_reset_every is not None else None
        self._checkpoints = Checkpoints(config.run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep, reference=kept)
        self.restored_step = self._checkpoints.restore(self._updater, resume=config.checkpoint.resume)
        """The step that was restored; 0 for a fresh start."""

    def share(self, names: Collection[str]) -> None:
        """Say which parameters' arrays the sampler holds: an update reuses the memory of the others."""
        self._updater.share(names)

    def update(self, scored: ScoredRollout) -> UpdateResult:
        """Take ``algorithm.iterations`` optimizer updates on one rollout.

        Raises:
            DataError, RewardError, NonFiniteError: for a rollout that cannot be learnt from; the policy is unchanged.
            NonFiniteError: for a loss or gradient that is not finite; the policy is then corrupt: do not sync it.
        """
        started = time.perf_counter()
        self._check_rows(scored)
        informative_P = self.informative(scored)
        counted_B = counted_rows(scored.rollout, informative_P, self._config)
        advantages = self._advantages(scored, informative_P)
        batches = self._micro_batches(scored, advantages, counted_B)
        passes = [self._one_pass(scored.rollout.batch.step, batches) for _ in range(self._config.algorithm.iterations)]
        self._reset_reference(scored.rollout.batch.step)
        seconds = time.perf_counter() - started
        metrics = _update_metrics(passes) | signal_metrics(scored.rollout, informative_P, self._config)
        return UpdateResult(metrics=metrics, advantages=advantages, seconds=seconds)

    def informative(self, scored: ScoredRollout) -> Bool[np.ndarray, " P"]:
        """Say which groups can be learnt from; the rollout may have any number of prompts."""
        return informative_groups(scored, self._asked(scored), self._config)

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Float[np.ndarray, "B T"]:
        """Compute the policy's log-probability of every completion token, at the rollout's temperature, on every host.

        T is ``rollout.max_new_tokens``; values past a completion's end are 0.
        """
        rows, packing = train_rows(prompts, completions, np.zeros(len(prompts)), self._shape)
        found = [whole(self._batches.policy_logprobs(part)) for part in rows.chunks(self._shape.micro_batch)]
        return unpacked(np.concatenate(found), packing, prompts, completions, self._shape.max_new_tokens)

    def params(self) -> nnx.State:
        """Return the policy's parameters as they lie on the trainer's mesh, those that are not trained among them."""
        return parameters(self._updater.model)

    def adapters(self) -> dict[str, np.ndarray]:
        """Gather the adapters, float32, on this host by dotted name; every host must call it. Without any: empty."""
        if not has_adapters(self._updater.model):
            return {}
        return {name: whole(leaf) for name, leaf in self._updater.stepped().items()}

    def params_digest(self) -> str:
        """Compute sha256 of all parameters, the trained ones as they are stepped; see `digest.params_digest`."""
        return params_digest(by_name(self.params()) | self._updater.stepped())

    def save(self, step: int, *, best: int | None = None) -> None:
        """Save policy and optimizer as step ``step``, in the background; ``best`` is a step that is kept."""
        self._checkpoints.save(step, self._updater, best=best)

    def close(self) -> None:
        """Wait until every checkpoint is complete."""
        self._checkpoints.close()

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
        """Compute the advantages; deviations of a whole step, too, are those of the groups that are not left out."""
        return group_advantages(
            scored.scores.total,
            group_size=self._config.algorithm.group_size,
            algorithm=self._algorithm,
            known=self._asked(scored),
            taken_P=informative_P if self._config.drops_uninformative else None,
        )

    def _asked(self, scored: ScoredRollout) -> dict[str, np.ndarray]:
        """Put together what the advantages ask for beside the total rewards, see `ON_REQUEST`."""
        asked, groups = self._algorithm.asked, (-1, self._config.algorithm.group_size)
        found: dict[str, np.ndarray] = {}
        if "lengths_PG" in asked:
            found["lengths_PG"] = np.array([len(c.token_ids) for c in scored.rollout.completions]).reshape(groups)
        if "rewards_NPG" in asked or "weights_N" in asked:
            specs, by_name = self._config.rewards, scored.scores.by_name
            if missing := [spec.shown for spec in specs if spec.shown not in by_name]:
                raise RewardError(f"these advantages take rewards one by one, and {missing} are not scored; score them")
            found["rewards_NPG"] = np.stack([by_name[spec.shown].reshape(groups) for spec in specs])
            found["weights_N"] = np.array([spec.weight_at(scored.rollout.batch.step) for spec in specs])
        return found

    def _micro_batches(
        self, scored: ScoredRollout, advantages: Float[np.ndarray, " B"], counted_B: Bool[np.ndarray, " B"]
    ) -> list[TrainBatch]:
        prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
        completions, aggregation = scored.rollout.completions, self._algorithm.aggregation
        rows, _ = train_rows(prompts, completions, advantages, self._shape, aggregation, counted_B)
        placed = [self._batches.place(part) for part in rows.chunks(self._shape.micro_batch)]
        section = self._config.algorithm
        return with_kl_in_advantages(placed, section.beta) if section.kl_in == "reward" else placed

    def _reset_reference(self, step: int) -> None:
        """Make the reference a copy of the policy, if the step is one of those after which that is done."""
        every = self._config.algorithm.reference_reset_every
        if every is not None and self._reference is not None and step % every == 0:
            reset(self._reference, self._updater.model, self._updater.trained)

    def _one_pass(self, step: int, batches: Sequence[TrainBatch]) -> tuple[list[LossSums], UpdateRecord]:
        with self._mesh:
            started = [self._updater.accumulate(batch) for batch in batches], self._updater.step()
        sums, record = jax.device_get(started)  # the first time that anything is waited for
        for name, value in (("loss", sum(micro.loss for micro in sums)), ("gradient norm", record.grad_norm)):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the {name} of step {step} must be finite, got {value}; the policy is spoilt: resume "
                    "from the last checkpoint with a lower optimizer.learning_rate, or model.dtype=float32"
                )
        return sums, record


def _update_metrics(passes: Sequence[tuple[list[LossSums], UpdateRecord]]) -> dict[str, float]:
    """Compute ``update/*`` and ``correction/*`` over all passes, and ``agreement/*`` over the first.

    The weights of the first pass are those that the engine sampled with.

    The loss is the mean over updates of each update's loss; entropy, KL and clip fraction are means over tokens; the
    gradient norm is the mean over updates of each update's norm before clipping; the rate is the last update's, and of
    the kept steps the smallest counts.
    """
    micro = [sums for one_pass, _ in passes for sums in one_pass]
    records = [record for _, record in passes]
    tokens = sum(float(sums.agreement.tokens) for sums in micro)
    corrected = [sums.correction for sums in micro if sums.correction is not None]

    def mean(values: Sequence[Any], count: float) -> float:
        return math.fsum(map(float, values)) / count

    return {
        "update/loss": mean([sums.loss for sums in micro], len(passes)),
        "update/grad_norm": mean([record.grad_norm for record in records], len(passes)),
        "update/step_kept": min(float(record.step_kept) for record in records),
        "update/kl": mean([sums.kl for sums in micro], tokens),
        "update/entropy": mean([sums.entropy for sums in micro], tokens),
        "update/clip_fraction": mean([sums.clipped for sums in micro], tokens),
        "update/learning_rate": float(records[-1].learning_rate),
        **agreement_metrics([sums.agreement for sums in passes[0][0]]),
        **(correction_metrics(corrected) if corrected else {}),
        **_entropy_metrics(records),
    }


def _entropy_metrics(records: Sequence[UpdateRecord]) -> dict[str, float]:
    """Say what the last update multiplied its entropy with, where that is adapted."""
    coefficient = records[-1].entropy_coefficient
    return {} if coefficient is None else {"update/entropy_coefficient": float(coefficient)}
