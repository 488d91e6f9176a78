"""The algorithms. Each file holds the advantages and token losses of one algorithm and its variants, and cites papers.

    algorithm = open_algorithm(config.algorithm)

A new shipped algorithm is a file here, a line in `SHIPPED` and a test. The config can also name a user's own file.
"""

from collections.abc import Mapping
from typing import Any

from tpu_grpo.algorithms.algorithm import Algorithm, Sequences, Taught, TokenLosses, token_ratio
from tpu_grpo.algorithms.checks import build, check_penalties, notices, try_out
from tpu_grpo.algorithms.combined import RunAlgorithm
from tpu_grpo.algorithms.correction import CorrectionSums, correction_metrics, open_correction
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.config.plugins import Shipped, find_function, not_shipped
from tpu_grpo.records.errors import ConfigError

SHIPPED: Mapping[str, type] = Shipped(
    __name__,
    {
        "grpo": "grpo:Grpo",
        "dr_grpo": "grpo:DrGrpo",
        "rloo": "reinforce:Rloo",
        "dapo": "grpo:Dapo",
        "gspo": "gspo:Gspo",
        "luspo": "luspo:Luspo",
        "cispo": "cispo:Cispo",
        "dppo": "dppo:Dppo",
        "sapo": "sapo:Sapo",
        "vespo": "vespo:Vespo",
        "reinforce": "reinforce:Reinforce",
        "distill": "distill:Distill",
        "gkd": "gkd:Gkd",
    },
)
"""The algorithms that ship, by ``algorithm.name``."""
_PPO = "take grpo, which has PPO's clip, and the mean of a group in the place of a critic "
_ELSEWHERE = {"ppo": _PPO, "gae": _PPO} | dict.fromkeys(
    ("reinforce++", "reinforce_plus_plus"), "take reinforce with algorithm.advantage=reinforce_pp "
)
"""What the error message for another library's algorithm name recommends instead."""
_SETTINGS = ("group_size", "iterations", "mini_batch_prompts", "old_policy")
"""Settings that a shipped class gets if its constructor has parameters for them."""
_BOUNDS = ("clip_low", "clip_high", "dual_clip", "delta")
"""The settings of the clip. It is an error to set one that the class has no parameter for; a user's own class may lack
parameters for clip_low and clip_high."""


def open_algorithm(section: AlgorithmSection) -> RunAlgorithm:
    """Build the algorithm that the section names, and check it if it is the user's own.

    Raises:
        ConfigError: for an unknown name, a file that cannot be imported, options that the constructor does not take,
            settings that do not go together, and a class that lacks a method, or returns wrong shapes or numbers that
            are not finite in a trial call.
    """
    check_penalties(section)
    name = section.name
    if name in SHIPPED:
        settings = {setting: getattr(section, setting) for setting in (*_SETTINGS, *_BOUNDS)}
        algorithm = build(name, SHIPPED[name], settings, section.options, bounds=_BOUNDS)
    elif ":" in name:
        found = find_function(name, "algorithm", ConfigError)
        algorithm = build(name, found, _settings_of_ones_own(section), section.options, bounds=_BOUNDS[2:])
        try_out(name, algorithm, section.group_size)
    else:
        shown, instead = f"algorithm.name={name}", _ELSEWHERE.get(name.lower(), "")
        raise not_shipped(shown, name, "algorithm", SHIPPED, ConfigError, form="Class", instead=instead)
    baseline = algorithm
    if section.advantage is not None:
        from tpu_grpo.algorithms.advantages import ADVANTAGES  # imports other algorithms

        baseline = ADVANTAGES[section.advantage]()
    aggregation = section.loss_aggregation or algorithm.aggregation
    return RunAlgorithm(algorithm, baseline, aggregation, open_correction(section))


def _settings_of_ones_own(section: AlgorithmSection) -> dict[str, Any]:
    settings = {
        "group_size": section.group_size,
        "iterations": section.iterations,
        "clip_low": section.lower_clip,
        "clip_high": section.upper_clip,
    }
    later = {"dual_clip": section.dual_clip, "delta": section.delta}  # a class may use these names for its options
    return settings | {name: value for name, value in later.items() if value is not None}


__all__ = [
    "SHIPPED",
    "Algorithm",
    "CorrectionSums",
    "RunAlgorithm",
    "Sequences",
    "Taught",
    "TokenLosses",
    "correction_metrics",
    "notices",
    "open_algorithm",
    "token_ratio",
]
