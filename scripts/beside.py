"""Lets every script find the package, which is beside this folder, and a Python that can run it.

``python scripts/run.py`` works after ``uv run scripts/run.py`` has made ``.venv``: if a Python lacks the package's
dependencies, the script starts again with the Python of ``.venv``. Older Pythons must be able to parse this file, so
that it can say what is missing.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = REPOSITORY / ".venv"
NEEDED = ("pydantic", "jax", "tunix", "sgl_jax")


def prepare() -> None:
    """Put the package on the path, or restart in the Python of ``.venv``; end the process if neither can run it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if sys.version_info[:2] == (3, 12) and not missing:
        sys.path.insert(0, str(REPOSITORY))
        return
    python = ENVIRONMENT / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ENVIRONMENT:
        sys.stdout.flush()
        os.execv(str(python), [str(python), *sys.orig_argv[1:]])
    lacks = "is not 3.12" if sys.version_info[:2] != (3, 12) else "lacks " + ", ".join(missing)
    script = os.path.relpath(sys.argv[0])
    typed = "pip install uv && uv run " + " ".join([script, *sys.argv[1:]])
    sys.exit(f"{sys.executable} {lacks}; type: {typed}")


def run(command: str) -> None:
    """Run a command, named by its module in tpu_grpo/cli, with the arguments of this process, and end with its code."""
    prepare()
    sys.exit(import_module(f"tpu_grpo.cli.{command}").main(sys.argv[1:]))
