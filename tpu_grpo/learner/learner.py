"""The learner the pipeline drives: one call updates the policy from one scored rollout.

    inputs = LearnerInputs(model=model, reference=None, mesh=mesh, tokenizer=tokenizer, pad_id=0, eos_id=2)
    learner = Learner(config, inputs, engine)
    for step in range(learner.restored_step + 1, config.run.max_steps + 1):
        result = learner.update(scored)         # raises before a non-finite number reaches the sampler
        ...                                     # move learner.params() to the sampler
        learner.save(step)
    learner.close()

Tunix's cluster, trainer and GRPO learner do the learning; its own loop, which samples on a second thread, is not used.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import DataError, NonFiniteError, RewardError
from tpu_grpo.learner.adapter import SamplingEngine
from tpu_grpo.learner.agreement import agreement_metrics
from tpu_grpo.learner.building import LearnerInputs, build_tunix_learner, row_shape
from tpu_grpo.learner.checkpoints import Checkpoints
from tpu_grpo.learner.digest import params_digest, whole
from tpu_grpo.learner.optimizer import UpdateRecord, last_update
from tpu_grpo.learner.repairs import Cluster
from tpu_grpo.learner.rows import group_advantages, train_rows
from tpu_grpo.learner.trained import parameters
from tpu_grpo.learner.trainer import CollectingTrainer, MicroStep
from tpu_grpo.learner.tunix_learner import TrainExample
from tpu_grpo.metrics.run_files import CHECKPOINTS_DIR
from tpu_grpo.types import Completion, ScoredRollout, UpdateResult


class Learner:
    """Holds the policy, its optimizer and its checkpoints.

    Args:
        config: the run.
        inputs: models, mesh and tokenizer.
        engine: samples, if Tunix asks; the pipeline does not.

    Raises:
        ConfigError: for rows that cannot be split over the mesh, or ``algorithm.beta`` without a reference.
        CheckpointError: for a checkpoint that cannot be restored.
    """

    def __init__(self, config: RunConfig, inputs: LearnerInputs, engine: SamplingEngine):
        self._config = config
        self._shape = row_shape(config, inputs.model, inputs.pad_id)
        self._tunix = build_tunix_learner(config, Cluster, inputs, engine)
        self._checkpoints = Checkpoints(config.run_dir / CHECKPOINTS_DIR, keep=config.checkpoint.keep)
        self.restored_step = self._checkpoints.restore(
            self._trainer.model, self._trainer.optimizer, resume=config.checkpoint.resume
        )
        """The step that was restored; 0 for a fresh start."""

    @property
    def _trainer(self) -> CollectingTrainer:
        cluster: Any = self._tunix.rl_cluster
        return cluster.actor_trainer

    def update(self, scored: ScoredRollout) -> UpdateResult:
        """Take ``algorithm.iterations`` optimizer updates on one rollout.

        Raises:
            DataError, RewardError, NonFiniteError: for a rollout that cannot be learnt from; the policy is unchanged.
            NonFiniteError: for a loss or gradient that is not finite; the policy is then corrupt: do not sync it.
        """
        started = time.perf_counter()
        advantages = self._advantages(scored)
        examples = self._examples(scored, advantages)
        passes = [self._one_pass(scored.rollout.batch.step, examples) for _ in range(self._config.algorithm.iterations)]
        seconds = time.perf_counter() - started
        return UpdateResult(metrics=_update_metrics(passes), advantages=advantages, seconds=seconds)

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> Float[np.ndarray, "B T"]:
        """Compute the policy's log-probability of every completion token, at the rollout's temperature, on every host.

        B must divide over the trainer's rows (fsdp); T is ``rollout.max_new_tokens``; ignore values past a
        completion's end.
        """
        rows = train_rows(prompts, completions, np.zeros(len(prompts)), self._shape)
        return whole(self._tunix.policy_logprobs(rows))

    def params(self) -> nnx.State:
        """Return the policy's parameters as they lie on the trainer's mesh, those that are not trained among them."""
        return parameters(self._trainer.model)

    def adapters(self) -> dict[str, np.ndarray]:
        """Gather the adapters on this host, by dotted name; every host must call it. Without any it is empty."""
        state = nnx.to_flat_state(nnx.state(self._trainer.model, nnx.LoRAParam))
        return {".".join(map(str, path)): whole(leaf[...]) for path, leaf in state}

    def params_digest(self) -> str:
        """Compute sha256 of all parameters; see `digest.params_digest`."""
        return params_digest(self.params())

    def save(self, step: int, *, best: int | None = None) -> None:
        """Save policy and optimizer as step ``step``, in the background; ``best`` is a step that is kept."""
        self._checkpoints.save(step, self._trainer.model, self._trainer.optimizer, best=best)

    def close(self) -> None:
        """Wait until every checkpoint is complete."""
        self._tunix.executor.shutdown()
        self._checkpoints.close()

    def _advantages(self, scored: ScoredRollout) -> np.ndarray:
        totals = scored.scores.total
        if (rows := len(scored.rollout.completions)) != self._config.batch_rows:
            raise DataError(
                f"a step must have data.prompts_per_step * algorithm.group_size = {self._config.batch_rows} rows, got "
                f"{rows}; fill the batch up before it is sampled"
            )
        if len(totals) != rows:
            raise RewardError(f"every completion needs a reward, got {len(totals)} for {rows}; score them all")
        algorithm = self._tunix.algo_config.algorithm
        return group_advantages(totals, group_size=self._config.algorithm.group_size, algorithm=algorithm)

    def _examples(self, scored: ScoredRollout, advantages: np.ndarray) -> list[TrainExample]:
        prompts = [prompt.token_ids for prompt in scored.rollout.row_prompts]
        rows = train_rows(prompts, scored.rollout.completions, advantages, self._shape)
        return [self._tunix.train_example(chunk) for chunk in rows.chunks(self._config.micro_batch_rows)]

    def _one_pass(self, step: int, examples: Sequence[TrainExample]) -> tuple[list[MicroStep], UpdateRecord]:
        self._tunix.rl_cluster.update_actor(examples, None)
        micro_steps = jax.device_get(self._trainer.take_micro_steps())
        record = last_update(self._trainer.optimizer.opt_state)
        losses = [float(micro.loss) for micro in micro_steps]
        for name, value in (("loss", sum(losses)), ("gradient norm", float(record.grad_norm))):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the {name} of step {step} must be finite, got {value}; the policy is spoilt: resume "
                    "from the last checkpoint with a lower optimizer.learning_rate, or model.dtype=float32"
                )
        return micro_steps, record


def _update_metrics(passes: Sequence[tuple[list[MicroStep], UpdateRecord]]) -> dict[str, float]:
    """Compute ``update/*`` over all passes, and ``agreement/*`` over the first.

    The weights of the first pass are those that the engine sampled with.

    Loss and entropy are means over micro-batches, as the optimizer sees them; KL and clip fraction are means over
    tokens; the gradient norm is the mean over updates of each update's norm before clipping; the rate is the last.
    """
    micro_steps = [micro for steps, _ in passes for micro in steps]
    tokens = [float(micro.aux["agreement"].tokens) for micro in micro_steps]

    def mean(name: str, weights: list[float] | None = None) -> float:
        return float(np.average([float(micro.aux[name]) for micro in micro_steps], weights=weights))

    return {
        "update/loss": float(np.mean([float(micro.loss) for micro in micro_steps])),
        "update/grad_norm": float(np.mean([float(record.grad_norm) for _, record in passes])),
        "update/kl": mean("kl", tokens),
        "update/entropy": mean("entropy"),
        "update/clip_fraction": mean("pg_clipfrac", tokens),
        "update/learning_rate": float(passes[-1][1].learning_rate),
        **agreement_metrics([micro.aux["agreement"] for micro in passes[0][0]]),
    }
