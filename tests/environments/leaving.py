"""An environment that has something done when its process ends, as its import has."""

import atexit
import os
import tempfile
from pathlib import Path

from tpu_grpo.workers.process import WORKER_MARK


def note(text: str) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{text}\n")


SHARED = tempfile.TemporaryDirectory()
if WORKER_MARK in os.environ:
    atexit.register(note, "import")


class Leaving:
    """Has a directory of its own, and one that it shares with others."""

    def reset(self) -> None:
        self.own = tempfile.TemporaryDirectory()
        atexit.register(note, "conversation")

    def look(self) -> dict[str, str]:
        """Name the directories that are there."""
        named = {"shared": SHARED.name, "own": self.own.name}
        return {name: path for name, path in named.items() if Path(path).is_dir()}

    def get_reward(self) -> float:
        return 1.0
