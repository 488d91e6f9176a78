"""Golden files: what goes in, and below it, indented, all that comes of it. ``GOLDENS=write`` writes what comes now."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

INDENT = "    "


def cases(path: Path) -> list[Any]:
    """Give the rows to ``parametrize``, named by what goes in."""
    return [pytest.param(given, told, id=given) for given, told in rows(path)]


def rows(path: Path) -> list[tuple[str, str]]:
    """Read what goes in and what comes of it."""
    found: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        if line.startswith(INDENT):
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line.removeprefix(INDENT)}".lstrip("\n"))
        else:
            found.append((line, ""))
    assert len(dict(found)) == len(found), f"{path} has a row twice"
    return found


def sections(path: Path) -> dict[str, str]:
    """Give what stands below each line ``=== NAME`` of a file."""
    _, *found = re.split(r"^=== (.*)\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def labelled(path: Path, name: str) -> list[Any]:
    """Give the rows of a section, Python literals or comments, that a person has written and no run rewrites."""
    return [ast.literal_eval(row) for row in sections(path)[name].splitlines() if not row.startswith("#")]


def compare_whole(path: Path, found: str) -> None:
    """Compare a text with a whole file; with ``GOLDENS=write``, write it."""
    if os.environ.get("GOLDENS") == "write":
        path.write_text(found)
    else:
        assert found.splitlines() == path.read_text().splitlines(), f"{path.name} is another one"


def compare(path: Path, given: str, told: str, found: str) -> None:
    """Compare what comes of a row with what the file says; with ``GOLDENS=write``, let the file say it."""
    if os.environ.get("GOLDENS") == "write":
        content = path.read_text()
        path.write_text(content.replace(block(given, told), block(given, found)))
    else:
        assert found == told, f"{path.name} has of\n{given}\nthis:\n{told}\nand what comes is:\n{found}"


def block(given: str, told: str) -> str:
    return "".join(f"{line}\n" for line in (given, *(INDENT + line for line in told.splitlines())))
