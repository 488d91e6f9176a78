"""Programs of the policy and the tests that judge them, as text files have them."""

import json
import re
from pathlib import Path
from typing import Any

from tests.goldens import sections


def programs(name: str) -> dict[str, tuple[str, list[Any]]]:
    """Read a file next to this one. Below ``=== NAME`` is a program, and behind or below each ``---`` one of its tests:
    code, or an input and its output as JSON."""
    found: dict[str, tuple[str, list[Any]]] = {}
    for head, section in sections(Path(__file__).with_name(name)).items():
        program, *tests = (part.lstrip() for part in re.split(r"^---", section, flags=re.MULTILINE))
        found[head] = program, [json.loads(test) if test.startswith("{") else test for test in tests]
    return found
