"""Combines the parts of a run's algorithm: token losses, advantages, aggregation and correction."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from tpu_grpo.algorithms.algorithm import PerToken, Sequences, Taught, TokenLosses, asked, requested
from tpu_grpo.algorithms.correction import Correction
from tpu_grpo.config import LossAggregation

_WITH_NUMBERS = ("objective", "correction")


@dataclass(frozen=True)
class RunAlgorithm:
    """The algorithm of a run; its token losses and advantages may come from different classes."""

    objective: Any
    """Computes token losses."""
    baseline: Any
    """Computes advantages."""
    aggregation: LossAggregation
    correction: Correction | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        """The settings of objective and correction that a compiled program can take as inputs, by name."""
        return {
            f"{part}.{name}": value
            for part in _WITH_NUMBERS
            for name in getattr(getattr(self, part), "numbers", ())
            if (value := getattr(getattr(self, part), name)) is not None
        }

    def with_numbers(self, numbers: Mapping[str, Any]) -> "RunAlgorithm":
        """Return the same algorithm with other values for `numbers`, which may be arrays that jax traces."""
        changed = {}
        for part in _WITH_NUMBERS:
            own = {key.partition(".")[2]: value for key, value in numbers.items() if key.partition(".")[0] == part}
            if own:
                changed[part] = copy.copy(getattr(self, part))
                vars(changed[part]).update(own)
        return replace(self, **changed)

    @property
    def top_k(self) -> int | None:
        """How many of a teacher's likeliest tokens the objective compares; None if it knows the sampled token only."""
        return getattr(self.objective, "top_k", None)

    @property
    def asked(self) -> tuple[str, ...]:
        """Those argument names of `ON_REQUEST` that the method ``advantages`` has parameters for."""
        return requested(self.baseline.advantages)

    def advantages(
        self, rewards_PG: Float[np.ndarray, "P G"], known: Mapping[str, Any] | None = None
    ) -> Float[np.ndarray, "P G"]:
        """Compute the advantages; ``baseline`` gets those arguments in ``known`` that it has parameters for."""
        return self.baseline.advantages(rewards_PG=rewards_PG, **asked(self.baseline.advantages, known or {}))

    def token_losses(
        self,
        logprobs_BT: PerToken,
        old_logprobs_BT: PerToken,
        advantages_BT: PerToken,
        sequences: Sequences | None = None,
        taught: Taught | None = None,
    ) -> TokenLosses:
        """Compute the token losses; ``objective`` gets ``sequences`` and ``taught`` if it has parameters for them."""
        known = {name: each for name, each in (("sequences", sequences), ("taught", taught)) if each is not None}
        return self.objective.token_losses(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_logprobs_BT,
            advantages_BT=advantages_BT,
            **asked(self.objective.token_losses, known),
        )
