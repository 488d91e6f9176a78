"""The shapes that the package's annotations promise, checked at every call that a test makes.

jaxtyping's import hook hands every function and dataclass of the rooms below to `check_arrays`. It leaves to beartype
what is annotated with an array, such as ``Float[Array, "B T"]``, and nothing else, because tests pass fakes for most
other things. B is the same number in all arguments and the result of a call. What is compiled is checked when it is
traced.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

ROOMS = ("algorithms", "engine", "learner", "models", "observe", "rewards", "run", "weights")
"""Where functions take and return arrays. Records are left out, because tests make broken ones on purpose."""


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function check kinds and shapes of its arrays; one that names none stays as it is."""
    arrays = {name: kind for name, kind in function.__annotations__.items() if names_array(kind)}
    if not arrays:
        return function
    function.__annotations__ = {name: arrays.get(name, Any) for name in function.__annotations__}
    return beartype(function)


def names_array(kind: Any) -> bool:
    """Whether an annotation is an array with a shape, or holds one, as ``Float[Array, "B"] | None`` does."""
    return (inspect.isclass(kind) and issubclass(kind, AbstractArray)) or any(map(names_array, get_args(kind)))


def install() -> None:
    """Check the modules of ROOMS from now on; call it before they are imported."""
    package = Path(__file__).parents[1] / "tpu_grpo"
    files = [path.relative_to(package) for room in ROOMS for path in (package / room).rglob("*.py")]
    modules = [".".join(("tpu_grpo", *path.with_suffix("").parts)) for path in files]
    install_import_hook(modules, f"{__name__}.check_arrays")
