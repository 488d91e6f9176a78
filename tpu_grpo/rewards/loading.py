"""From an entry of ``rewards`` in the config to a reward that is known to fit the data.

    loaded = load_reward(RewardSpec(name="my_rewards.py:short", options={"limit": 40}), columns={"question", "answer"})

Everything that can be known without a completion is checked here: the name, the file, the function, its signature
against the columns of the data and the options, and for shipped rewards the options' values.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_grpo.config import RewardSpec
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.answers import Batch, Call
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.finding import find
from tpu_grpo.rewards.protocol import EXTRAS, SAMPLE_ARGUMENTS, TEXT_ARGUMENTS, rows_at_a_time
from tpu_grpo.rewards.shipped import SHIPPED


@dataclass(frozen=True)
class LoadedReward:
    """A reward with the columns it is called with."""

    target: Any
    """The function, class or object."""
    call: Call
    arguments: tuple[str, ...]
    """Of prompts, completions and the data columns, the ones passed."""


@dataclass(frozen=True)
class _Taken:
    """What a signature takes by name."""

    named: Mapping[str, inspect.Parameter]
    anything: bool
    """Whether it has ``**kwargs``."""

    def takes(self, name: str) -> bool:
        return self.anything or name in self.named


def load_reward(spec: RewardSpec, columns: Collection[str]) -> LoadedReward:
    """Find the reward that ``spec`` names and check that it can be called on data with these ``columns``.

    Raises:
        RewardError: for a name that leads nowhere (see ``find``), a parameter that nothing fills, or an option it does
            not take.
    """
    target = find(spec.name)
    is_class = inspect.isclass(target)
    if is_class and "__call__" not in dir(target):
        raise RewardError(f"reward {spec.name} must have a method __call__ that scores, got a class without; add one")
    function = target.__call__ if is_class else target
    taken = _taken(spec.name, function, skip_self=is_class)
    built_with = _taken(spec.name, target) if is_class else None
    call_options = {} if built_with else spec.options
    extras = tuple(name for name in EXTRAS if name in taken.named and name not in (*columns, *call_options))
    _check_options(spec, built_with or taken, anything="options" in extras)
    concurrency = rows_at_a_time(function)
    offered = _offered(columns, by_row=concurrency is not None)
    _check_filled(spec, taken, [*offered.values(), *call_options], extras)
    if built_with:
        _check_filled(spec, built_with, list(spec.options), ())
    arguments = [n for n, shown in offered.items() if shown not in call_options and taken.takes(shown)]
    passed = {n: v for n, v in spec.options.items() if (built_with or taken).takes(n)}
    call = Call(
        name=spec.shown,
        source=spec.name,
        passed=passed,
        options=spec.options,
        extras=extras,
        concurrency=concurrency,
        is_async=inspect.iscoroutinefunction(function),
        messages=spec.messages,
        search=spec.on_error == "stop",
    )
    loaded = LoadedReward(target, call, tuple(arguments))
    if spec.name in SHIPPED:
        _try_options(spec, loaded)
    return loaded


def workers_of(spec: RewardSpec) -> int:
    """Processes a reward gets: what the config says, or what suits it."""
    if spec.workers is not None:
        return spec.workers
    return SHIPPED[spec.name].workers if spec.name in SHIPPED else 1


def repeats_itself(spec: RewardSpec) -> bool:
    """Whether a reward gives the same text the same value every time: what the config says, or what is known of it."""
    if spec.deterministic is not None:
        return spec.deterministic
    return SHIPPED[spec.name].deterministic if spec.name in SHIPPED else True


def _try_options(spec: RewardSpec, loaded: LoadedReward) -> None:
    """Shipped rewards judge their options when they are built, on zero rows, or on a row without anything."""
    try:
        if inspect.isclass(loaded.target):
            loaded.target(**spec.options)
        else:
            Caller(loaded.call, loaded.target).raw(_nothing(loaded))
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.name}, options {spec.options}: {error}") from error


def _nothing(loaded: LoadedReward) -> Batch:
    names = [*loaded.arguments, *(n for n in loaded.call.extras if n == "completion_ids")]
    if loaded.call.concurrency is None:
        return Batch(dict.fromkeys(names, ()), 0, 0)
    return Batch({name: [""] if name in TEXT_ARGUMENTS else [None] for name in names}, 0, 1)


def _offered(columns: Collection[str], *, by_row: bool) -> dict[str, str]:
    """Name of a column of the batch -> name of the argument that gets it."""
    offered = {name: name for name in [*TEXT_ARGUMENTS, *columns]}
    return offered | {batch: row for row, batch in SAMPLE_ARGUMENTS.items()} if by_row else offered


def _taken(name: str, function: Any, *, skip_self: bool = False) -> _Taken:
    try:
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} must have a signature to check; wrap it in a Python function") from error
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(f"reward {name} must take its arguments by name, got positional-only {by_position}; drop '/'")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return _Taken(named, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _check_filled(spec: RewardSpec, taken: _Taken, offered: list[str], extras: Collection[str]) -> None:
    for parameter in taken.named.values():
        if parameter.default is parameter.empty and parameter.name not in (*offered, *extras):
            raise RewardError(
                f"reward {spec.name} requires the parameter {parameter.name!r}, which is neither a column of the data "
                f"nor an option; available: {', '.join(offered)}. Add the column, set it in the reward's options, or "
                "give the parameter a default"
            )


def _check_options(spec: RewardSpec, taken: _Taken, *, anything: bool) -> None:
    if texts := sorted(set(spec.options) & {*TEXT_ARGUMENTS, *SAMPLE_ARGUMENTS}):
        raise RewardError(f"reward {spec.name}: options must not be called {texts}; these are the texts of the rollout")
    unknown = [name for name in spec.options if not taken.takes(name)]
    if unknown and not anything:
        raise RewardError(f"reward {spec.name} does not take the options {unknown}; it takes: {', '.join(taken.named)}")
