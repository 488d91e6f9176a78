"""From a reward's name to the function, class or object it stands for.

find("gsm8k")                       # shipped
find("my_package_reward")           # an entry point of the group tpu_grpo.rewards of any installed package
find("my_rewards.py:short")         # a file, relative to the working directory
find("my_package.rewards:short")    # a module
"""

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tpu_grpo.errors import RewardError
from tpu_grpo.plugins import find_function
from tpu_grpo.rewards.shipped import SHIPPED

ENTRY_POINTS = "tpu_grpo.rewards"


def find(name: str) -> Any:
    """The function, class or callable object that ``name`` stands for.

    Files are found relative to the working directory and may import modules that lie beside them.

    Raises:
        RewardError: for an unknown name, a file or module that is missing or fails to import, or one without it.
    """
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
