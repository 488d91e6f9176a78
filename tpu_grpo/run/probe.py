"""The probe, which checks in every run that the engines hold the trainer's policy.

The engines sample a few tokens after fixed prompts with fixed keys, and the trainer computes the log-probabilities of
the same tokens:

    mean |engine - trainer| is within the bound     the run goes on
    it is beyond the bound                          the run stops and names the leaf that differs most

The probe also compares the leaves themselves, each computed again by a program of its own. That finds what a few tokens
would not show, such as a leaf that one sync left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_grpo.config import RunConfig
from tpu_grpo.engine.sampler import PROBE_SAMPLE
from tpu_grpo.learner import Learner
from tpu_grpo.records.errors import WeightsError
from tpu_grpo.records.stages import Prompt, Request, SampleKey, SamplingParams
from tpu_grpo.run.engines import SyncedEngines

PROBE_TOKENS = 16
"""The most tokens of a completion of the probe."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
"""A larger mean difference per token cannot come from rounding. We measured 1e-6 to 2e-5 in float32 and 0.005 to 0.1 in
bfloat16; the largest come from models with experts, where rounding can change the routing."""
CACHE_BOUNDS = {"auto": 0.0, "int8": 0.2, "fp8": 0.5}
"""A KV cache of 8 bits allows at least this. We measured 0.02 to 0.05 with int8 and 0.006 to 0.19 with fp8; the
largest come from random models with large weights."""


def probe_bound(config: RunConfig) -> float:
    """Return the largest mean difference of log-probabilities that rounding, and what a cache leaves out, can cause."""
    return max(BOUNDS[config.model.dtype], CACHE_BOUNDS[config.rollout.kv_dtype])


@dataclass(frozen=True)
class Probe:
    """Compares engines and trainer after the first sync and after every ``meshes.probe_every``-th."""

    config: RunConfig
    engines: SyncedEngines
    learner: Learner
    prompts: Sequence[Prompt]

    def after_sync(self, number: int) -> float | None:
        """Compare if it is due after sync ``number``, counted from 0; every host must call this.

        Returns:
            The mean difference of the log-probabilities, or None if no comparison was due.

        Raises:
            WeightsError: if engines and trainer do not hold the same policy; it names the worst leaf.
        """
        every = self.config.meshes.probe_every
        if every == 0 or number % every:
            return None
        worst, gap = self.engines.worst_leaf(self.learner.params())
        difference = self._difference()
        bound = self.config.meshes.probe_bound or probe_bound(self.config)
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
        """Return the mean of |engine - trainer| over the log-probabilities of the probe's tokens."""
        rollout, seed, return_experts = self.config.rollout, self.config.run.seed, self.config.algorithm.routing_replay
        sampling = SamplingParams(min(rollout.max_new_tokens, PROBE_TOKENS), rollout.temperature, ignore_stop=False)
        requests = [
            Request(prompt.token_ids, sampling, SampleKey(seed, 0, row, PROBE_SAMPLE), return_experts)
            for row, prompt in enumerate(self.prompts)
        ]
        completions = self.engines.replicas.generate(requests)
        trainer_BT = self.learner.logprobs([prompt.token_ids for prompt in self.prompts], completions)
        gaps = [np.abs(row[: len(c.token_ids)] - c.logprobs) for row, c in zip(trainer_BT, completions, strict=True)]
        return float(np.concatenate(gaps).mean())
