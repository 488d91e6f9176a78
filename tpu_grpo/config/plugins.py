"""Imports what a config asks for: functions of the user, optional libraries, and this package's additions.

Functions are named in a config as ``path.py:function`` or ``package.module:function``:

    find_function("my_rewards.py:short", "reward", RewardError)      # a file, relative to the working directory
    find_function("my_package.data:puzzles", "data", DataError)      # a module

A file may import modules in its own directory. Errors are raised as the caller's error class, and name the kind of
function. Each optional library is needed by a single feature, and is an extra of the package:

    need("textarena", "the environment textarena", EpisodeError)     # looks for the library, without importing it

The core of this package imports none of its additions; it finds their modules here when a config asks for them:

    addition("environments").load_environments(config.environment, config.rewards)
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from tpu_grpo.records.errors import TpuGrpoError
from tpu_grpo.records.untrusted_input import read_file

EXTRAS = {
    "reasoning_gym": "puzzles",
    "textarena": "textarena",
    "py3langid": "language",
    "jsonschema": "schema",
    "gcsfs": "gcs",
}
"""Module -> extra in pyproject.toml that installs it."""
ADDITIONS = {
    "environments": "tpu_grpo.environments.opening",
    "chat_format": "tpu_grpo.environments.chat_format",
    "turn_scheduler": "tpu_grpo.environments.turn_scheduler",
    "report": "tpu_grpo.report.run_page",
    "model_card": "tpu_grpo.report.model_card",
    "planned": "tpu_grpo.report.planned",
    "published": "tpu_grpo.report.published",
    "tunix_options": "tpu_grpo.tunix_loop.tunix_options",
    "tunix_learner": "tpu_grpo.tunix_loop.tunix_learner",
}
"""What stands on the core: name -> module."""


def find_function(name: str, kind: str, error: type[TpuGrpoError]) -> Any:
    """Return the function, class or callable object with the name ``name``. Raises TpuGrpoError of type ``error`` if
    the file or module is missing, fails to import, or lacks the function."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise error(f"a {kind}'s name must read path.py:function, got {name!r}")
    module = load_source(source, kind, error)
    if not hasattr(module, attribute):
        here = [
            member
            for member, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        raise error(f"{source} has no function {attribute!r}; functions there: {', '.join(here) or 'none'}")
    found = getattr(module, attribute)
    if not callable(found):
        what = "a function of a batch" if kind == "reward" else "a function"
        raise error(f"{name} must be {what}, got a {type(found).__name__}; name a function")
    return found


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "did you mean NAME? " for the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""


def not_shipped(
    shown: str,
    name: str,
    kind: str,
    shipped: Collection[str],
    error: type[TpuGrpoError],
    *,
    form: str = "function",
    instead: str = "",
    installed: Collection[str] = (),
) -> TpuGrpoError:
    """Return the error for a name that is not shipped, not installed, and not a ``form`` in a file or module."""
    hint = instead or did_you_mean(name, [*shipped, *installed])
    others = f"installed: {', '.join(sorted(installed))}; " if installed else ""
    return error(
        f"{shown} is not a shipped {kind}; {hint}(shipped: {', '.join(shipped)}; {others}your own: path.py:{form} or "
        f"package.module:{form})"
    )


def load_source(source: str, kind: str, error: type[TpuGrpoError]) -> ModuleType:
    """Import a file or a module, and return it; raises as `find_function` does."""
    return (_load_file if source.endswith(".py") else _load_module)(source, kind, error)


def source_file(name: str) -> Path | None:
    """Return the file of ``path.py:function`` or ``package.module:function``; None for any other name."""
    where, colon, _ = name.rpartition(":")
    if not colon:
        return None
    if where.endswith(".py"):
        return Path(where)
    try:
        with _search_first(Path.cwd()):
            spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):  # the parent package is missing; loading it reports that
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _load_file(source: str, kind: str, error_type: type[TpuGrpoError]) -> ModuleType:
    """Execute a file as a module; only once per kind, path and content."""
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
    sys.modules[name] = module  # dataclasses and pickle look up the module there
    try:
        with _search_first(path.resolve().parent):
            exec(compile(text, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # user code may raise anything
        del sys.modules[name]
        raise error_type(
            f"{kind} file {path} failed to import: {type(error).__name__}: {error}{_remedy(error)}"
        ) from error
    return module


def _load_module(name: str, kind: str, error_type: type[TpuGrpoError]) -> ModuleType:
    try:
        with _search_first(Path.cwd()):
            return importlib.import_module(name)
    except error_type:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise error_type(
            f"{kind} module {name} failed to import: {type(error).__name__}: {error}{_remedy(error)}; a file is named "
            "with its suffix: path.py:function"
        ) from error


PACKAGES = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dotenv": "python-dotenv",
    "Levenshtein": "python-Levenshtein",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}
"""Module -> package to install, for packages whose names differ."""


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        install = f"pip install {PACKAGES.get(package, package.replace('_', '-'))}"
        return f"; {install}, or copy what you use into a file without that import"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; name it as a module of its package: package.module:function"
    return ""


@contextmanager
def _search_first(directory: Path) -> Iterator[None]:
    """Put ``directory`` first on the import path, during the block."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        if str(directory) in sys.path:
            sys.path.remove(str(directory))


def addition(name: str) -> Any:
    """Import the module of ADDITIONS with this name, and return it."""
    return importlib.import_module(ADDITIONS[name])


class Shipped[T](Mapping[str, T]):
    """What ships under a name; the module of an entry is imported when the entry is first taken.

    ``places`` has each entry's place in ``package``, as module:object.
    """

    def __init__(self, package: str, places: Mapping[str, str]):
        self._package, self._places = package, places

    def __getitem__(self, name: str) -> T:
        return resolve_name(f"{self._package}.{self._places[name]}")

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def need(library: str, user: str, error: type[TpuGrpoError]) -> None:
    """Check that the optional library with this module name is installed, without importing it.

    ``user`` names what needs the library, for the message: a setting with its value, a reward, or an environment.

    Raises:
        TpuGrpoError: of type ``error``, if the library is not installed.
    """
    if importlib.util.find_spec(library) is None:
        extra = EXTRAS[library]
        raise error(
            f'{user} needs the package {library}, which is not installed; type: pip install "tpu-grpo[{extra}]", or '
            f"in a clone: uv sync --extra {extra}"
        )
