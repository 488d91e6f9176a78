"""How the processes that import an environment's class start: how long one may take, and how often one may end."""

import time

from tpu_grpo.records.errors import EpisodeError

START_SECONDS = 120.0
"""A process has this time to import its environment, from when a conversation waits for it; outside of any deadline."""
_MOST_FAILURES = 3
"""So many processes in a row may end before they are ready; the import is at fault then, and no accident."""


class Starting:
    """The processes of one environment, until each is ready."""

    def __init__(self, name: str):
        self._name = name
        self._was_ready = False
        self._failures = 0
        """How many processes in a row have ended before they were ready."""
        self._waited_since: float | None = None

    def ready(self) -> None:
        """Take note that a process has imported the class."""
        self._was_ready, self._failures, self._waited_since = True, 0, None

    def waited_for(self) -> None:
        """Take note that a conversation waits, and no process is ready.

        Raises:
            EpisodeError: if one has waited for long.
        """
        now = time.monotonic()
        if self._waited_since is None:
            self._waited_since = now
        if now > self._waited_since + START_SECONDS:
            raise EpisodeError(
                f"environment {self._name} must be imported in its process within {START_SECONDS:.0f} s, "
                "got no answer; see what its file does when it is imported"
            )

    def failed(self, ending: str) -> None:
        """Take note that a process has ended before it was ready; ``ending`` says how, in words.

        Raises:
            EpisodeError: if none ever was ready, or several in a row have ended so.
        """
        self._failures += 1
        self._waited_since = None  # the next has its own time
        if not self._was_ready:
            raise EpisodeError(
                f"environment {self._name} must be imported in its process, which {ending} instead; import its file by "
                "hand to see why"
            )
        if self._failures >= _MOST_FAILURES:
            raise EpisodeError(
                f"environment {self._name} must be imported in each of its processes, which it was at first, got "
                f"{self._failures} in a row that ended before, and the last {ending}; see what its file needs at its "
                "import that is gone since: memory, files, a server"
            )

    def refused(self, text: str, trace: str) -> EpisodeError:
        """Return the error of a process that says why it could not import the class."""
        return EpisodeError(f"environment {self._name} failed in its process: {text}\n{trace}".rstrip())
