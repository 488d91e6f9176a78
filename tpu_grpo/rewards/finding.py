"""From a reward's name to the function, class or object it stands for.

find("gsm8k")                       # shipped
find("my_package_reward")           # an entry point of the group tpu_grpo.rewards of any installed package
find("my_rewards.py:short")         # a file, relative to the working directory
find("my_package.rewards:short")    # a module
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.shipped import SHIPPED

ENTRY_POINTS = "tpu_grpo.rewards"


def find(name: str) -> Any:
    """The function, class or callable object that ``name`` stands for.

    Files are found relative to the working directory and may import modules that lie beside them.

    Raises:
        RewardError: for an unknown name, a file or module that is missing or fails to import, or one without it.
    """
    if ":" not in name:
        return _find_named(name)
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise RewardError(f"a reward's name must read path.py:function, got {name!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    return _attribute(module, attribute, source)


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


def _attribute(module: ModuleType, attribute: str, source: str) -> Any:
    if not hasattr(module, attribute):
        here = [
            name
            for name, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        raise RewardError(f"{source} has no function {attribute!r}; functions there: {', '.join(here) or 'none'}")
    found = getattr(module, attribute)
    if not callable(found):
        raise RewardError(
            f"{source}:{attribute} must be a function of a batch, got a {type(found).__name__}; name a function"
        )
    return found
