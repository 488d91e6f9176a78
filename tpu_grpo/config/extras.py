"""The libraries that only one feature needs, which are extras of the package."""

from importlib.util import find_spec

from tpu_grpo.records.errors import TpuGrpoError

EXTRAS = {
    "reasoning_gym": "puzzles",
    "textarena": "textarena",
    "py3langid": "language",
    "jsonschema": "schema",
    "gcsfs": "gcs",
}
"""The name of the extra in pyproject.toml that brings a module."""


def need(library: str, user: str, error: type[TpuGrpoError]) -> None:
    """Check that the library of an extra, by the name of its module, is installed, without importing it.

    ``user`` is what needs it, for the message: a setting with its value, or a reward or environment by its name.

    Raises:
        TpuGrpoError: of type ``error``, if the library is not installed.
    """
    if find_spec(library) is None:
        extra = EXTRAS[library]
        raise error(
            f'{user} needs the package {library}, which is not installed; type: pip install "tpu-grpo[{extra}]", or '
            f"in a clone: uv sync --extra {extra}"
        )
