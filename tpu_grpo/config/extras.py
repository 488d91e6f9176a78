"""Optional libraries, each needed by a single feature; they are extras of the package."""

from importlib.util import find_spec

from tpu_grpo.records.errors import TpuGrpoError

EXTRAS = {
    "reasoning_gym": "puzzles",
    "textarena": "textarena",
    "py3langid": "language",
    "jsonschema": "schema",
    "gcsfs": "gcs",
}
"""Module -> extra in pyproject.toml that installs it."""


def need(library: str, user: str, error: type[TpuGrpoError]) -> None:
    """Check, without importing it, that the library with this module name, which an extra installs, is there.

    ``user`` names what needs the library, for the message: a setting with its value, a reward, or an environment.

    Raises:
        TpuGrpoError: of type ``error``, if the library is not installed.
    """
    if find_spec(library) is None:
        extra = EXTRAS[library]
        raise error(
            f'{user} needs the package {library}, which is not installed; type: pip install "tpu-grpo[{extra}]", or '
            f"in a clone: uv sync --extra {extra}"
        )
