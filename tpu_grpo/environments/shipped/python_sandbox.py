"""A tool that runs Python in a sandbox (tpu_grpo/workers/sandbox.py), for answers that are computed, as in GSM8K."""

from typing import Any

from tpu_grpo.workers.sandbox import Limits, run_script


class PythonSandbox:
    """The policy runs programs to work out its answer.

    Args:
        seconds: how long a program may run.
        memory_mb: how much memory a program may use, in MiB.
        max_characters: how long the output may be; a longer output loses its middle.
    """

    def __init__(self, seconds: float = 5.0, memory_mb: int = 1024, max_characters: int = 2000) -> None:
        for name, value, least in (("seconds", seconds, 0.1), ("memory_mb", memory_mb, 64)):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if max_characters < 1:
            raise ValueError(f"max_characters must be >= 1, got {max_characters}")
        self._limits, self._max_characters = Limits(float(seconds), int(memory_mb)), max_characters

    def reset(self, **columns: Any) -> None:
        """Begin an episode, without an observation."""

    def python(self, code: str) -> str:
        """Run a Python program and see what it prints. Nothing is kept from one program to the next.

        Args:
            code: The program. The value of its last line is printed, too.

        Returns:
            What it printed, and the error if there was one.
        """
        if not isinstance(code, str):
            raise TypeError(f"code must be a text, got {code!r}")
        ran = run_script(code, self._limits, self._max_characters)
        parts = [ran.output.rstrip("\n"), *([f"Error: {ran.error}"] if ran.error else [])]
        return "\n".join(part for part in parts if part) or "nothing was printed"
