"""An entry of ``rewards`` in the config is loaded: its name leads to a function or class that is known to fit the data.

    loaded = load_reward(RewardSpec(name="my_rewards.py:short", options={"limit": 40}), columns={"question", "answer"})

    find_reward("gsm8k")                       # a shipped reward
    find_reward("my_package_reward")           # an entry point of the group tpu_grpo.rewards of an installed package
    find_reward("my_rewards.py:short")         # a file, relative to the working directory
    find_reward("my_package.rewards:short")    # a module

Everything that can be known without a completion is checked here: the name, the file, the function, its signature
against the columns of the data and the options, and for shipped rewards the options' values.
"""

import difflib
import importlib
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tpu_grpo.config import GIVEN, RewardSpec
from tpu_grpo.config.plugins import find_function
from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.batches import Call, RewardBatch
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.protocol import OF_ROWS, SAMPLE_ARGUMENTS, TEXT_ARGUMENTS, gives_tokens
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.rewards.signatures import Signature, form_of, signature_of

ENTRY_POINTS = "tpu_grpo.rewards"
"""An installed package offers rewards as entry points of this group."""


@dataclass(frozen=True)
class LoadedReward:
    """A LoadedReward holds a reward that was found, and the columns that it is called with."""

    target: Any
    """This is the function, class or callable object."""
    call: Call
    arguments: tuple[str, ...]
    """These of prompts, completions and the data columns are passed."""

    @property
    def batch_columns(self) -> list[str]:
        """Name the columns of a batch for this reward: its arguments, and those of OF_ROWS that it declares."""
        return [*self.arguments, *(name for name in OF_ROWS if name in self.call.extras)]


def load_reward(spec: RewardSpec, columns: Collection[str], max_steps: int = 0) -> LoadedReward:
    """Find the reward that ``spec`` names and check that it can be called on data with these ``columns``.

    ``max_steps`` are those of the run, which a reward may ask for.

    Raises:
        RewardError: for a name that leads nowhere (see ``find_reward``), a parameter that nothing fills, or an option
            it does not take.
    """
    target = find_reward(spec.name) if spec.function is None else spec.function
    function, signature, constructor = _taken_apart(spec, target)
    form, call_options = form_of(function, signature), {} if constructor else spec.options
    extras = form.extras((*columns, *call_options))
    _check_options(spec, constructor or signature, takes_all="options" in extras)
    _check_per_token(spec, function, extras)
    offered = form.offered(columns)
    _check_filled(spec, signature, [*offered.values(), *call_options], [form.shown(name) for name in extras])
    if constructor:
        _check_filled(spec, constructor, list(spec.options), ())
    arguments = [n for n, shown in offered.items() if shown not in call_options and form.takes(shown)]
    call = Call(
        name=spec.shown,
        source=spec.name,
        passed_options={n: v for n, v in spec.options.items() if (constructor or signature).takes(n)},
        options=spec.options,
        extras=extras,
        concurrency=form.concurrency,
        is_async=inspect.iscoroutinefunction(function),
        messages=spec.messages or (spec.name in SHIPPED and SHIPPED[spec.name].messages),
        per_token=gives_tokens(function),
        verl=form.verl,
        max_steps=max_steps,
        find_failing_row=spec.on_error == "stop",
    )
    loaded = LoadedReward(target, call, tuple(arguments))
    if spec.name in SHIPPED:
        _try_options(spec, loaded)
    return loaded


def _taken_apart(spec: RewardSpec, target: Any) -> tuple[Any, Signature, Signature | None]:
    """Return the function that scores, its signature, and that of the constructor if the target is a class."""
    if not inspect.isclass(target):
        return target, signature_of(spec.name, target), None
    if "__call__" not in dir(target):
        raise RewardError(f"reward {spec.name} must have a method __call__ that scores, got a class without; add one")
    return target.__call__, signature_of(spec.name, target.__call__, skip_self=True), signature_of(spec.name, target)


def workers_of(spec: RewardSpec) -> int:
    """Return how many processes a reward gets: what the config says, or else what suits it."""
    if spec.function is not None:
        return 0  # no other process has it
    if spec.workers is not None:
        return spec.workers
    return SHIPPED[spec.name].workers if spec.name in SHIPPED else 1


def repeats_itself(spec: RewardSpec) -> bool:
    """Return whether the same text always gets the same value, by the config or else by what is known of the reward."""
    if spec.deterministic is not None:
        return spec.deterministic
    return SHIPPED[spec.name].deterministic if spec.name in SHIPPED else True


# --- a name -> what it stands for ------------------------------------------------------------------------------------


def find_reward(name: str) -> Any:
    """Return the function, class or callable object that ``name`` stands for.

    Files are found relative to the working directory and may import modules that lie beside them.

    Raises:
        RewardError: for an unknown name, a file or module that is missing or fails to import, or one without it.
    """
    if name.startswith(GIVEN):
        raise RewardError(
            f"reward {name.removeprefix(GIVEN)} was passed to tpu_grpo.train as a function, and its code is in no file "
            f"that {name!r} could name; pass it with rewards= again, or put it in a file and name path.py:function"
        )
    return find_function(name, "reward", RewardError) if ":" in name else _find_named(name)


def _find_named(name: str) -> Any:
    if name in SHIPPED:
        module, _, attribute = SHIPPED[name].source.partition(":")
        return getattr(importlib.import_module(f"tpu_grpo.rewards.shipped.{module}"), attribute)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in installed:
        return _load_entry_point(installed[name])
    known = [*SHIPPED, *installed]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    others = f"installed: {', '.join(sorted(installed))}; " if installed else ""
    raise RewardError(
        f"{name!r} is not a shipped reward; {hint}(shipped: {', '.join(SHIPPED)}; {others}your own: path.py:function "
        "or package.module:function)"
    )


def _load_entry_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # user code: anything can come
        raise RewardError(
            f"reward {point.name}, an entry point at {point.value}, failed to load: {type(error).__name__}: {error}; "
            "repair or remove the package that brings it"
        ) from error


# --- does it fit the data and the options? ---------------------------------------------------------------------------


def _check_filled(spec: RewardSpec, signature: Signature, offered: list[str], extras: Collection[str]) -> None:
    for parameter in signature.named.values():
        if parameter.default is parameter.empty and parameter.name not in (*offered, *extras):
            raise RewardError(
                f"reward {spec.name} requires the parameter {parameter.name!r}, which is neither a column of the data "
                f"nor an option; available: {', '.join(offered)}. Add the column (data.columns gives one another "
                "name), set it in the reward's options, or give the parameter a default"
            )


def _check_options(spec: RewardSpec, signature: Signature, *, takes_all: bool) -> None:
    if texts := sorted(set(spec.options) & {*TEXT_ARGUMENTS, *SAMPLE_ARGUMENTS}):
        raise RewardError(f"reward {spec.name}: options must not be called {texts}; these are the texts of the rollout")
    unknown = [name for name in spec.options if not signature.takes(name)]
    if unknown and not takes_all:
        known = ", ".join(signature.named)
        raise RewardError(f"reward {spec.name} does not take the options {unknown}; it takes: {known}")


def _check_per_token(spec: RewardSpec, function: Any, extras: Collection[str]) -> None:
    if not gives_tokens(function):
        return
    if "completion_ids" not in extras:
        raise RewardError(
            f"reward {spec.name} gives a number per token (@per_token), so it must take completion_ids, which say how "
            "many tokens there are, got a function that does not; declare it, and call no column or option so"
        )
    if spec.on_error == "value" and spec.error_value:
        raise RewardError(
            f"reward {spec.name} gives a number per token (@per_token), so its error_value must be 0, got "
            f"{spec.error_value}; one number says nothing of single tokens: leave it out, or use on_error: skip"
        )


def _try_options(spec: RewardSpec, loaded: LoadedReward) -> None:
    """Let a shipped reward check its options: they do so when they are built, on zero rows, or on an empty row."""
    try:
        if inspect.isclass(loaded.target):
            loaded.target(**spec.options)
        else:
            Caller(loaded.call, loaded.target).raw_outputs(_empty_batch(loaded))
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.name}, options {spec.options}: {error}") from error


def _empty_batch(loaded: LoadedReward) -> RewardBatch:
    """Make a batch of zero rows, or of one row without anything for a function of one row."""
    names = loaded.batch_columns
    if loaded.call.concurrency is None:
        return RewardBatch(dict.fromkeys(names, ()), 0, 0)
    texts = (*TEXT_ARGUMENTS, "rendered_prompts")
    return RewardBatch({name: [""] if name in texts else [None] for name in names}, 0, 1)
