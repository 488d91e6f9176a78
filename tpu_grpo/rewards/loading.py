"""From an entry of ``rewards`` in the config to a function that is known to fit the data.

    loaded = load_reward(RewardSpec(name="my_rewards.py:short", options={"limit": 40}), columns={"question", "answer"})

Everything that can be known without a completion is checked here: the name, the file, the function, its signature
against the columns of the data and the options, and for shipped rewards the options' values.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tpu_grpo.config import RewardSpec
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.protocol import TEXT_ARGUMENTS, Reward
from tpu_grpo.rewards.shipped import SHIPPED

HOW_TO_NAME = f"shipped: {', '.join(SHIPPED)}; your own: path.py:function or package.module:function"


@dataclass(frozen=True)
class LoadedReward:
    """A reward with the names of the columns it is called with."""

    name: str
    """As shown in metrics: the shipped name, or the function's."""
    function: Reward
    arguments: tuple[str, ...]
    """Of prompts, completions and the data columns, the ones passed."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, table: Mapping[str, Sequence[Any]]) -> Any:
        """Call the function on ``table`` (prompts, completions and data columns, each [B]).

        It gets lists of its own, so that what it does to them reaches no other reward. Returns what it returns, raises
        what it raises: RewardSet judges both.
        """
        return self.function(**{name: list(table[name]) for name in self.arguments}, **self.options)


def load_reward(spec: RewardSpec, columns: Collection[str]) -> LoadedReward:
    """Find the reward that ``spec`` names and check that it can be called on data with these ``columns``.

    Files are found relative to the working directory and may import modules that lie beside them.

    Raises:
        RewardError: for an unknown name, a file or module that is missing or fails to import, a function that is
            missing or not callable, a parameter that nothing fills, or an option it does not take.
    """
    if ":" not in spec.name:
        return _load_shipped(spec, columns)
    source, _, attribute = spec.name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise RewardError(f"a reward's name must read path.py:function, got {spec.name!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    function = _function(module, attribute, source)
    return _bind(attribute, function, spec, columns)


def _load_shipped(spec: RewardSpec, columns: Collection[str]) -> LoadedReward:
    if spec.name not in SHIPPED:
        near = difflib.get_close_matches(spec.name, SHIPPED, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RewardError(f"{spec.name!r} is not a shipped reward; {hint}({HOW_TO_NAME})")
    loaded = _bind(spec.name, SHIPPED[spec.name], spec, columns)
    try:
        loaded(dict.fromkeys([*TEXT_ARGUMENTS, *columns], ()))  # shipped rewards judge their options on zero rows
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec.name}, options {spec.options}: {error}") from error
    return loaded


# --- finding the function --------------------------------------------------------------------------------------------


def _load_file(path: Path) -> ModuleType:
    """Execute a file as a module of its own, once per path and content."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RewardError(
            f"reward file {path} must be readable from the working directory {Path.cwd()}, got {type(error).__name__}; "
            "correct the path in rewards"
        ) from error
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source).hexdigest()[:16]
    name = f"tpu_grpo_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None  # a path that ends in .py always has one
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with _search_first(path.resolve().parent):
            exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # user code: anything can come
        del sys.modules[name]
        raise RewardError(f"reward file {path} failed to import: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> ModuleType:
    try:
        with _search_first(Path.cwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code: anything can come
        raise RewardError(
            f"reward module {name} failed to import: {type(error).__name__}: {error}; a file is named with its suffix: "
            "path.py:function"
        ) from error


@contextmanager
def _search_first(directory: Path) -> Iterator[None]:
    """Find modules in ``directory`` too, for the time of an import only."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        if str(directory) in sys.path:
            sys.path.remove(str(directory))


def _function(module: ModuleType, attribute: str, source: str) -> Reward:
    if not hasattr(module, attribute):
        here = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise RewardError(f"{source} has no function {attribute!r}; functions there: {', '.join(here) or 'none'}")
    function = getattr(module, attribute)
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise RewardError(f"{source}:{attribute} must be a function of a batch, got a {kind}; name a function")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{source}:{attribute} must return its values, got an async function; run the loop inside")
    return cast(Reward, function)


# --- fitting it to the data ------------------------------------------------------------------------------------------


def _bind(name: str, function: Reward, spec: RewardSpec, columns: Collection[str]) -> LoadedReward:
    """Decide what the function is called with, or say why it cannot be."""
    parameters = _parameters(spec.name, function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    _check_options(spec, named, takes_all)
    offered = list(dict.fromkeys([*TEXT_ARGUMENTS, *columns]))
    for parameter in named.values():
        required = parameter.default is parameter.empty
        if required and parameter.name not in offered and parameter.name not in spec.options:
            raise RewardError(
                f"reward {spec.name} requires the parameter {parameter.name!r}, which is neither a column of the data "
                f"nor an option; available: {', '.join(offered)}. Add the column, set it in the reward's options, or "
                "give the parameter a default"
            )
    arguments = tuple(n for n in offered if n not in spec.options and (takes_all or n in named))
    return LoadedReward(name, function, arguments, dict(spec.options))


def _parameters(name: str, function: Reward) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} must have a signature to check; wrap it in a Python function") from error
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(f"reward {name} must take its arguments by name, got positional-only {by_position}; drop '/'")
    return parameters


def _check_options(spec: RewardSpec, named: Collection[str], takes_all: bool) -> None:
    if texts := sorted(set(spec.options) & set(TEXT_ARGUMENTS)):
        raise RewardError(f"reward {spec.name}: options must not be called {texts}; these are the texts of the rollout")
    unknown = [o for o in spec.options if o not in named]
    if unknown and not takes_all:
        raise RewardError(f"reward {spec.name} does not take the options {unknown}; it takes: {', '.join(named)}")
