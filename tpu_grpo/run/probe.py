"""Proof, in every run, that the engines hold the trainer's policy.

The engines sample a few tokens after fixed prompts with fixed keys, and the trainer says how likely it finds them:

    mean |engine - trainer| within the bound     the run goes on
    beyond it                                    the run stops, naming the leaf that is farthest from what it should be

and the leaves themselves are compared as well, each computed anew and by itself, which finds what a few tokens would
not show, such as a leaf that one sync has left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import WeightsError
from tpu_grpo.learner import Learner
from tpu_grpo.rollout.sampler import PROBE_SAMPLE
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.types import Prompt, Request, SampleKey, SamplingParams

PROBE_TOKENS = 16
"""Longest completion of the probe."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
"""Mean difference per token beyond which rounding is no explanation. Measured: 1e-6 to 2e-5 in float32, 0.005 to 0.1 in
bfloat16 (the largest with experts, of which rounding can choose others)."""


@dataclass(frozen=True)
class Probe:
    """Compares after the first sync and after every ``meshes.probe_every``-th."""

    config: RunConfig
    engines: SyncedEngines
    learner: Learner
    prompts: Sequence[Prompt]
    """As many as divide over the trainer's rows."""

    def after_sync(self, number: int) -> float | None:
        """Compare if sync ``number`` (the first is 0) is due; every host calls it.

        Returns:
            The mean difference of the log-probabilities, or None when it was not due.

        Raises:
            WeightsError: engines and trainer do not hold the same policy; names the worst leaf.
        """
        every = self.config.meshes.probe_every
        if every == 0 or number % every:
            return None
        worst, gap = self.engines.worst_leaf(self.learner.params())
        difference = self._difference()
        bound = self.config.meshes.probe_bound or BOUNDS[self.config.model.dtype]
        if gap == 0.0 and difference <= bound:
            return difference
        where = (
            f"the sampler's {worst} is off by up to {gap:.3g}"
            if gap > 0.0
            else "every leaf is what the family's rules say, so the two sides compute different models"
        )
        raise WeightsError(
            f"after sync {number} the engines must hold the trainer's parameters and find tokens as likely, within "
            f"meshes.probe_bound={bound:g} (mean difference of log-probabilities), got {difference:.3g}: {where}; what "
            "was sampled since the last good probe is of another policy: continue from a checkpoint before it"
        )

    def _difference(self) -> float:
        """Mean of |engine - trainer| over the probe's tokens."""
        rollout, seed = self.config.rollout, self.config.run.seed
        sampling = SamplingParams(min(rollout.max_new_tokens, PROBE_TOKENS), rollout.temperature, ignore_stop=False)
        requests = [
            Request(prompt.token_ids, sampling, SampleKey(seed, 0, row, PROBE_SAMPLE))
            for row, prompt in enumerate(self.prompts)
        ]
        completions = self.engines.replicas.generate(requests)
        trainer_BT = self.learner.logprobs([prompt.token_ids for prompt in self.prompts], completions)
        gaps = [np.abs(row[: len(c.token_ids)] - c.logprobs) for row, c in zip(trainer_BT, completions, strict=True)]
        return float(np.concatenate(gaps).mean())
