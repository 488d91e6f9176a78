"""How a reward wants to be called: with a batch of rows or with one, and what its parameters stand for.

    def f(completions, answer)                                         a batch
    @per_sample def f(completion, answer)                              one row
    def f(completion, answer)                                          one row, as verifiers calls rewards
    def f(data_source, solution_str, ground_truth, extra_info=None)    one row, as verl calls rewards

A function of one row that is not marked is told by its parameters: ``completion`` or ``solution_str``, and neither
``completions`` nor ``prompts``.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.protocol import (
    BY_KWARGS,
    EXTRAS,
    ROWS_AT_A_TIME,
    SAMPLE_ARGUMENTS,
    TEXT_ARGUMENTS,
    rows_at_a_time,
)

VERL_COMPLETION = "solution_str"
VERL_INFO = "extra_info"
"""verl passes an empty one where the data has no such column."""
VERL_TRUTH, VERL_TRUTH_COLUMN = "ground_truth", "reward_model"
"""verl's data has the ground truth within another column."""


@dataclass(frozen=True)
class Signature:
    """A Signature says what a function takes by name."""

    named: Mapping[str, inspect.Parameter]
    has_kwargs: bool

    def takes(self, name: str) -> bool:
        """Return whether an argument of that name can be passed."""
        return self.has_kwargs or name in self.named


def signature_of(name: str, function: Any, *, skip_self: bool = False) -> Signature:
    """Read the signature of a function of the reward ``name``.

    Raises:
        RewardError: for one that cannot be read, or that has parameters without a name for callers.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} must have a signature to check; wrap it in a Python function") from error
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(f"reward {name} must take its arguments by name, got positional-only {by_position}; drop '/'")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Signature(named, any(p.kind is p.VAR_KEYWORD for p in parameters))


@dataclass(frozen=True)
class Form:
    """A Form says how a function is called."""

    signature: Signature
    concurrency: int | None
    """An async function of one row runs for this many rows at a time; it is None for a function of a batch."""
    verl: bool
    """Its parameters are those of verl's rewards."""

    def shown(self, name: str) -> str:
        """Return the parameter that gets a column of a batch: ``completion`` gets completions in one of one row."""
        if self.verl and name == "completions":
            return VERL_COMPLETION
        return _ROW_ARGUMENTS.get(name, name) if self.concurrency is not None else name

    def offered(self, columns: Collection[str]) -> dict[str, str]:
        """Map each column of a batch to the parameter that gets it; a text goes before a column of the same name."""
        offered = {name: self.shown(name) for name in TEXT_ARGUMENTS}
        offered |= {name: name for name in columns if name not in TEXT_ARGUMENTS and name not in offered.values()}
        if self.verl and VERL_TRUTH not in columns and VERL_TRUTH_COLUMN in columns:
            offered[VERL_TRUTH_COLUMN] = VERL_TRUTH
        return offered

    def takes(self, name: str) -> bool:
        """Return whether an argument is passed: verl passes those that a function names, and nothing else."""
        return name in self.signature.named if self.verl else self.signature.takes(name)

    def extras(self, taken: Collection[str]) -> tuple[str, ...]:
        """Name those of EXTRAS that the function gets, unless a column or an option has ``taken`` the name."""
        named = self.signature.named
        wanted = [name for name in EXTRAS if self.shown(name) in named]
        if self.verl:
            wanted += [name for name in (VERL_INFO,) if name in named]
        elif self.signature.has_kwargs:
            wanted += [name for name in BY_KWARGS if name not in wanted]
        return tuple(name for name in wanted if self.shown(name) not in taken)


_ROW_ARGUMENTS = {batch: row for row, batch in SAMPLE_ARGUMENTS.items()}


def form_of(function: Any, signature: Signature) -> Form:
    """Say how a function with this signature is called."""
    verl = VERL_COMPLETION in signature.named
    marked = rows_at_a_time(function)
    of_a_batch = any(name in signature.named for name in TEXT_ARGUMENTS)
    if marked is None and not of_a_batch and (verl or "completion" in signature.named):
        marked = ROWS_AT_A_TIME
    return Form(signature, marked, verl and not of_a_batch)


def verl_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a row as verl passes them: the ground truth by itself, and no null ``extra_info``.

    Raises:
        ValueError: for a column ``reward_model`` without a ground truth.
    """
    found = dict(arguments)
    if VERL_INFO in found and found[VERL_INFO] is None:
        found[VERL_INFO] = {}
    if "completion" in found:
        found[VERL_COMPLETION] = found.pop("completion")
    if VERL_TRUTH_COLUMN in found:
        column = found.pop(VERL_TRUTH_COLUMN)
        if not isinstance(column, Mapping) or VERL_TRUTH not in column:
            raise ValueError(f"the column reward_model must hold a ground_truth, as verl's data does, got {column!r}")
        found[VERL_TRUTH] = column[VERL_TRUTH]
    return found
