"""Functions of the user's own, named in a config as ``path.py:function`` or ``package.module:function``.

find_function("my_rewards.py:short", "reward", RewardError)      # a file, relative to the working directory
find_function("my_package.data:puzzles", "data", DataError)      # a module

A file may import modules that lie beside it. What goes wrong is raised as the caller's error, with the setting's kind.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tpu_grpo.records.errors import TpuGrpoError
from tpu_grpo.records.outside import read_file


def find_function(name: str, kind: str, error: type[TpuGrpoError]) -> Any:
    """The function, class or callable object that ``name`` stands for.

    Raises:
        TpuGrpoError: of type ``error``, for a file or module that is missing or fails to import, or one without it.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise error(f"a {kind}'s name must read path.py:function, got {name!r}")
    load = _load_file if source.endswith(".py") else _load_module
    return _attribute(load(source, kind, error), attribute, source, kind, error)


def source_file(name: str) -> Path | None:
    """The file that ``path.py:function`` or ``package.module:function`` is written in; None for any other name."""
    where, colon, _ = name.rpartition(":")
    if not colon:
        return None
    if where.endswith(".py"):
        return Path(where)
    try:
        with _search_first(Path.cwd()):
            spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):  # a parent that is missing, or no package; who loads it says so
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _load_file(source: str, kind: str, error_type: type[TpuGrpoError]) -> ModuleType:
    """Execute a file as a module of its own, once per path and content."""
    path = Path(source)
    try:
        text = read_file(path)
    except OSError as error:
        raise error_type(
            f"{kind} file {path} must be readable from the working directory {Path.cwd()}, got {type(error).__name__}; "
            "correct the path"
        ) from error
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + text).hexdigest()[:16]
    name = f"tpu_grpo_{kind}_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None  # a path that ends in .py always has one
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with _search_first(path.resolve().parent):
            exec(compile(text, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # user code: anything can come
        del sys.modules[name]
        raise error_type(f"{kind} file {path} failed to import: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, kind: str, error_type: type[TpuGrpoError]) -> ModuleType:
    try:
        with _search_first(Path.cwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code: anything can come
        raise error_type(
            f"{kind} module {name} failed to import: {type(error).__name__}: {error}; a file is named with its suffix: "
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


def _attribute(module: ModuleType, attribute: str, source: str, kind: str, error: type[TpuGrpoError]) -> Any:
    if not hasattr(module, attribute):
        here = [
            name
            for name, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        raise error(f"{source} has no function {attribute!r}; functions there: {', '.join(here) or 'none'}")
    found = getattr(module, attribute)
    if not callable(found):
        what = "a function of a batch" if kind == "reward" else "a function"
        raise error(f"{source}:{attribute} must be {what}, got a {type(found).__name__}; name a function")
    return found
