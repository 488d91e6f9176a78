"""Rewards that are passed to ``tpu_grpo.train`` as functions, and not named in a config, become entries of the config.

    with_rewards(config, [function])                                 in place of the config's rewards
    with_rewards(config, [*config.rewards, function])                beside them
    with_rewards(config, [{"name": function, "weight": 0.5}, "gsm8k"])

A function that a worker process can import, by the name of its module, is one of ``package.module:function``, and runs
where such rewards run. Any other (a lambda, a closure, a function of a notebook or of the script itself, an object)
exists in this process only, and is called here.
"""

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_grpo.config import GIVEN, RewardSpec, RunConfig, parse_config
from tpu_grpo.records.errors import ConfigError

GivenReward = Callable[..., Any] | RewardSpec | Mapping[str, Any] | str
"""A function, class or callable object; or an entry of the config, whose name may be one; or a name."""


def with_rewards(config: RunConfig, rewards: Sequence[GivenReward]) -> RunConfig:
    """Return the config with these rewards in place of its own.

    Raises:
        ConfigError: for no reward, one of another type, wrong settings, or workers for what they cannot import.
    """
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or not rewards:
        raise ConfigError(f"rewards must be a list of at least one function, got {rewards!r}; put it in a list")
    functions: dict[int, Any] = {}
    entries = [_entry(given, position, functions) for position, given in enumerate(rewards)]
    found = parse_config({**dict(config), "rewards": entries})
    specs = [
        spec.calling(functions[position]) if position in functions else spec
        for position, spec in enumerate(found.rewards)
    ]
    return parse_config({**dict(config), "rewards": specs})


def _entry(given: GivenReward, position: int, functions: dict[int, Any]) -> RewardSpec | dict[str, Any]:
    """Return an entry of the config; a function that only this process has is noted in ``functions``."""
    if isinstance(given, RewardSpec):
        return given
    entry = dict(given) if isinstance(given, Mapping) else {"name": given}
    if isinstance(name := entry.get("name"), str):
        return entry
    if not callable(name):
        raise ConfigError(
            f"rewards[{position}] must be a function, a name, or an entry of the config that has one of them as its "
            f"name, got {given!r}"
        )
    if (importable := importable_name(name)) is not None:
        return {**entry, "name": importable}
    own = _own_name(name, position)
    if entry.get("workers"):
        raise ConfigError(
            f"rewards[{position}], {own}, cannot run in {entry['workers']} workers: it is no function of a module that "
            "they can import; move it to a file of its own, or leave workers out"
        )
    functions[position] = name
    return {**entry, "name": f"{GIVEN}{own}", "workers": 0}


def importable_name(function: Any) -> str | None:
    """Return the name by which another process can import a function or class; None if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    package = module.partition(".")[0]
    return f"{module}:{name}" if any(_finds(finder, package) for finder in sys.meta_path) else None


def _finds(finder: Any, package: str) -> bool:
    """Say whether an importer finds a module anew: this process may have it from elsewhere."""
    spec: importlib.machinery.ModuleSpec | None = finder.find_spec(package, None)
    return spec is not None


def _own_name(function: Any, position: int) -> str:
    """Return what metrics call it: the function's name, or that of an object's class; ``reward0`` for a lambda."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else f"reward{position}"
