"""One algorithm a file: its advantages and its token loss side by side, with paper and equations.

grpo.py       GRPO
dr_grpo.py    Dr. GRPO
rloo.py       RLOO
algorithm.py  what an algorithm is
checks.py     what is seen to before a class of the user's own is trained with

    algorithm = open_algorithm(config.algorithm)

A new algorithm is a file here, a line in `SHIPPED`, and its test; or a file of the user's own, named in the config.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float

from tpu_grpo.algorithms.algorithm import Algorithm, TokenLosses, token_ratio
from tpu_grpo.algorithms.checks import build, try_out
from tpu_grpo.algorithms.dr_grpo import DrGrpo
from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.algorithms.rloo import Rloo
from tpu_grpo.config import AlgorithmSection, LossAggregation
from tpu_grpo.errors import ConfigError
from tpu_grpo.plugins import find_function

SHIPPED: Mapping[str, type[Algorithm]] = {"grpo": Grpo, "dr_grpo": DrGrpo, "rloo": Rloo}
"""The algorithms that ship, by ``algorithm.name``."""
_ADVANTAGES = {"grpo": Grpo, "drgrpo": DrGrpo, "rloo": Rloo}
"""Whose advantages ``algorithm.advantage`` takes."""


@dataclass(frozen=True)
class RunAlgorithm:
    """The algorithm of a run: one algorithm's token losses, perhaps with another's advantages or aggregation."""

    objective: Algorithm
    baseline: Algorithm
    aggregation: LossAggregation

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Compute the advantages of ``baseline``."""
        return self.baseline.advantages(rewards_PG=rewards_PG)

    def token_losses(
        self,
        logprobs_BT: Float[Array, "B T"],
        old_logprobs_BT: Float[Array, "B T"],
        advantages_BT: Float[Array, "B T"],
    ) -> TokenLosses:
        """Compute the token losses of ``objective``."""
        return self.objective.token_losses(
            logprobs_BT=logprobs_BT, old_logprobs_BT=old_logprobs_BT, advantages_BT=advantages_BT
        )


def open_algorithm(section: AlgorithmSection) -> RunAlgorithm:
    """Build the algorithm that the section names, and check it if it is the user's own.

    Raises:
        ConfigError: for an unknown name, a file that does not import, options that the constructor does not take, and a
            class that lacks a method or answers a trial call with wrong shapes or with numbers that are not finite.
    """
    settings = {
        "group_size": section.group_size,
        "iterations": section.iterations,
        "clip_low": section.clip_low,
        "clip_high": section.upper_clip,
    }
    algorithm = build(section.name, _find(section.name), settings, section.options)
    if section.name not in SHIPPED:
        try_out(section.name, algorithm, section.group_size)
    baseline = algorithm
    if section.advantage is not None:
        baseline = build(section.advantage, _ADVANTAGES[section.advantage], settings, {})
    return RunAlgorithm(algorithm, baseline, section.loss_aggregation or algorithm.aggregation)


def _find(name: str) -> object:
    if name in SHIPPED:
        return SHIPPED[name]
    if ":" in name:
        return find_function(name, "algorithm", ConfigError)
    near = difflib.get_close_matches(name, SHIPPED, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"algorithm.name={name} is not a shipped algorithm; {hint}(shipped: {', '.join(SHIPPED)}; your own: "
        "path.py:Class or package.module:Class)"
    )


__all__ = ["SHIPPED", "Algorithm", "RunAlgorithm", "TokenLosses", "open_algorithm", "token_ratio"]
