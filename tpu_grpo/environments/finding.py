"""An environment's name leads to its class."""

import difflib
import importlib
from typing import Any

from tpu_grpo.config.plugins import find_function
from tpu_grpo.environments.shipped import SHIPPED
from tpu_grpo.records.errors import EpisodeError


def source_of(name: str) -> str:
    """Return where the class of an environment is, as path.py:Class or package.module:Class.

    Raises:
        EpisodeError: for a name that is neither, and none of those that ship.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    if ":" in name:
        return name
    near = difflib.get_close_matches(name, SHIPPED, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise EpisodeError(
        f"{name!r} is not a shipped environment; {hint}(shipped: {', '.join(SHIPPED) or 'none'}; your own: "
        "path.py:Class or package.module:Class)"
    )


def find_environment(source: str) -> Any:
    """Return the class, or the function that makes an environment, at ``source``.

    Raises:
        EpisodeError: for a file or module that is missing or fails to import, or one without it.
    """
    return find_function(source, "environment", EpisodeError)


def import_beforehand(target: Any) -> None:
    """Import the packages that a shipped class names in ``_imported_before``, before its conversations are forked.

    The main process imports the class, and does without them. Otherwise each conversation's process would import them
    by itself, which takes seconds of CPU each time.

    Raises:
        EpisodeError: for a package that cannot be imported.
    """
    for name in getattr(target, "_imported_before", ()):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise EpisodeError(f"the environment needs the package {name}, got {error}; install it") from error
