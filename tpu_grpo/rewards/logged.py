"""What a reward logs beside its value: through log_metric, or as verl's rewards do, in what they return of a row.

{"score": 1.0, "acc": True, "pred": "72"}    is worth 1.0 and logs acc; a text is no metric
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast

from tpu_grpo.rewards.batches import Problem, number_or_none
from tpu_grpo.rewards.protocol import RESERVED_METRICS

SCORE = "score"


def logger(logged: dict[str, list[float]]) -> Callable[[str, float], None]:
    """Make the ``log_metric`` of a call, which adds to what was logged."""

    def log_metric(name: str, value: float) -> None:
        number = number_or_none(value)
        if name in RESERVED_METRICS or number is None or math.isnan(number):
            raise ValueError(
                f"log_metric takes a name other than {', '.join(RESERVED_METRICS)} and a finite number, got "
                f"{name!r}, {value!r}"
            )
        logged.setdefault(name, []).append(number)

    return log_metric


def score_of(result: Any, logged: dict[str, list[float]]) -> Any:
    """Return what a row is worth, and log what else is a number in a result with a score, or return the problem."""
    if not isinstance(result, Mapping) or SCORE not in result:
        return result
    log_metric = logger(logged)
    for name, value in result.items():
        if name == SCORE or not (isinstance(value, Real) or getattr(value, "shape", None) == ()):
            continue
        try:
            log_metric(str(name), cast(float, value))
        except ValueError as error:
            return Problem("wrong", f"returned a score with a metric that cannot be logged: {error}")
    return result[SCORE]
