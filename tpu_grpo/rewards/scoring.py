"""From a rollout to one number per row: every reward called once, checked, weighted and summed.

B rows; row ``p * G + g`` is completion ``g`` of prompt ``p``. With weights 1 and 0.5, a row scored ``(1.0, None)``
totals 1.0, ``(1.0, 0.4)`` totals 1.2, and ``(None, None)`` is an error: nothing can be learned from it.
"""

import math
import reprlib
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import RewardSpec
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.loading import LoadedReward, load_reward
from tpu_grpo.rewards.protocol import TEXT_ARGUMENTS
from tpu_grpo.types import Rollout, Scores

Table = Mapping[str, Sequence[Any]]
"""prompts, completions and data columns by name, each [B]."""

_SHORT = reprlib.Repr(maxstring=120, maxother=120)


def open_rewards(specs: Sequence[RewardSpec], columns: Collection[str]) -> "RewardSet":
    """Load every reward of the config for data with these columns.

    Raises:
        RewardError: for a reward that cannot be loaded or two that would share a name in the metrics.
    """
    loaded = tuple(load_reward(spec, columns) for spec in specs)
    names = [reward.name for reward in loaded]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise RewardError(
            f"rewards must have names of their own in the metrics, got {twice} twice from {[s.name for s in specs]}; "
            "rename one function"
        )
    return RewardSet(loaded, tuple(spec.weight for spec in specs))


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run with their weights."""

    loaded: tuple[LoadedReward, ...]
    weights: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards in the metrics, in the order of the config."""
        return tuple(reward.name for reward in self.loaded)

    def values(self, rollout: Rollout, names: Collection[str]) -> dict[str, Float[np.ndarray, " B"]]:
        """What some of the rewards give, before weighting. Raises as ``score`` does for a reward that fails."""
        chosen = [reward for reward in self.loaded if reward.name in names]
        table = _table(rollout, {name for reward in chosen for name in reward.arguments})
        return {reward.name: _values(reward, table) for reward in chosen}

    def score(self, rollout: Rollout) -> Scores:
        """Call each reward once over all B rows; total = sum of weight * value over the rewards that apply.

        Raises:
            RewardError: for a reward that raises, returns anything but one finite number or None per row, or a row
                that no reward applies to; names the reward and the row.
        """
        started = time.perf_counter()
        table = _table(rollout, {name for reward in self.loaded for name in reward.arguments})
        by_name = {reward.name: _values(reward, table) for reward in self.loaded}
        total = _weighted_sum(by_name, self.weights, table)
        return Scores(total=total, by_name=by_name, seconds=time.perf_counter() - started)


def _table(rollout: Rollout, names: Collection[str]) -> Table:
    rows = rollout.row_prompts
    table: dict[str, list[Any]] = {"prompts": [p.text for p in rows], "completions": list(rollout.texts)}
    for name in sorted(set(names) - set(TEXT_ARGUMENTS)):
        lacking = next((i for i, p in enumerate(rows) if name not in p.columns), None)
        if lacking is not None:
            raise RewardError(
                f"rewards were opened for data with the column {name!r}, which {_row(lacking, table)} lacks; it has "
                f"{sorted(rows[lacking].columns)}. Add the column to the data"
            )
        table[name] = [p.columns[name] for p in rows]
    return table


def _values(reward: LoadedReward, table: Table) -> Float[np.ndarray, " B"]:
    """One reward's values, float64, NaN where it does not apply."""
    try:
        values = reward(table)
    except Exception as error:  # user code: anything can come
        raise RewardError(_raised(reward, table, error)) from error
    expected = len(table["completions"])
    found = _length(values)
    if found != expected:
        got = f"a {type(values).__name__}" if found is None else f"{found} values"
        raise RewardError(
            f"reward {reward.name} must return a list of one number (or None) per completion, {expected} here, got "
            f"{got}"
        )
    return np.array([_number(reward, table, i, value) for i, value in enumerate(values)], dtype=np.float64)


def _length(values: Any) -> int | None:
    """Length of something list-like; None for anything else, generators, text, sets and mappings included."""
    if isinstance(values, str | bytes | set | frozenset | Mapping) or not hasattr(values, "__len__"):
        return None
    if getattr(values, "shape", (0,)) == ():
        return None
    return len(values)


def _number(reward: LoadedReward, table: Table, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of numpy or jax
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward {reward.name} must return finite numbers (or None where it does not apply), got "
            f"{_SHORT.repr(value)} for {_row(row, table)}"
        )
    return number


def _weighted_sum(
    by_name: Mapping[str, Float[np.ndarray, " B"]], weights: Sequence[float], table: Table
) -> Float[np.ndarray, " B"]:
    total_B = np.zeros(len(table["completions"]))
    applies_B = np.zeros(len(table["completions"]), dtype=bool)
    for values_B, weight in zip(by_name.values(), weights, strict=True):  # in order: the same bits on every host
        total_B += np.where(np.isnan(values_B), 0.0, weight * values_B)
        applies_B |= ~np.isnan(values_B)
    if not applies_B.all():
        raise RewardError(
            f"every row needs at least one reward that applies, got None from all of {', '.join(by_name)} for "
            f"{_row(int(np.argmin(applies_B)), table)}; drop the record or add a reward that scores it"
        )
    return total_B


# --- saying what went wrong, and where -------------------------------------------------------------------------------


def _raised(reward: LoadedReward, table: Table, error: Exception) -> str:
    what = f"reward {reward.name} raised {type(error).__name__}: {error} ({_place(reward, error)})"
    row = _first_failing_row(reward, table)
    if row is None:
        return f"{what}; no row raises on its own, so it takes several together"
    return f"{what}; {_row(row, table)} raises on its own. Return None for rows the reward does not apply to"


def _first_failing_row(reward: LoadedReward, table: Table) -> int | None:
    """Call a reward that raised once more, a row at a time, up to the first row that raises.

    The run ends with this error either way, so a second call per row is a fair price for the name of the sample.
    """
    for row in range(len(table["completions"])):
        try:
            reward({name: [values[row]] for name, values in table.items()})
        except Exception:  # user code: anything can come
            return row
    return None


def _place(reward: LoadedReward, error: Exception) -> str:
    """The innermost line of the reward's own file in the traceback, or else of any file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(reward.function, "__code__", None), "co_filename", None)
    frame = next((f for f in reversed(frames) if f.filename == file), frames[-1])
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _row(row: int, table: Table) -> str:
    prompt, completion = table["prompts"][row], table["completions"][row]
    return f"row {row} (prompt {_SHORT.repr(prompt)}, completion {_SHORT.repr(completion)})"
