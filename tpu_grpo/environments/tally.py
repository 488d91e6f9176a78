"""Counts of what happens in conversations with environments, as metrics under ``environments/``."""

import collections

from tpu_grpo.environments.actions import Answered, Failed, LoadedEnvironment, Reply, ToolCall
from tpu_grpo.environments.requests import Act, Request
from tpu_grpo.types import Figure


class Tally:
    """What happened since the last look.

    environments/conversations          that were begun
    environments/calls/<tool>           calls of a tool that there is
    environments/call_errors            calls that raised, or could not be made or read
    environments/failures/<kind>        environments that failed: raised, late, died, memory, wrong
    environments/answer_seconds         mean time of an answer, and the longest: environments/longest_answer_seconds
    environments/waited_seconds         how long the main process waited for answers
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._seconds: list[float] = []

    def begun(self) -> None:
        """Count a conversation."""
        self._sums["conversations"] += 1

    def answered(self, loaded: LoadedEnvironment, request: Request, reply: Reply, seconds: float) -> None:
        """Count what came of a request after so many seconds."""
        self._seconds.append(seconds)
        if isinstance(reply, Failed):
            self._sums[f"failures/{reply.failure.kind}"] += 1
        if isinstance(request, Act) and isinstance(reply, Answered):
            tools = {tool["function"]["name"] for tool in loaded.tools}
            self._sums["call_errors"] += reply.errors
            for call in request.action.calls:
                if isinstance(call, ToolCall) and call.name in tools:
                    self._sums[f"calls/{call.name}"] += 1

    def waited(self, seconds: float) -> None:
        """Count the time that the main process waited."""
        self._sums["waited_seconds"] += seconds

    def taken(self) -> dict[str, Figure]:
        """Return the counts, and begin anew."""
        figures = {f"environments/{name}": Figure(value, "sum") for name, value in self._sums.items()}
        if seconds := self._seconds:
            figures["environments/answer_seconds"] = Figure(sum(seconds) / len(seconds), "mean", len(seconds))
            figures["environments/longest_answer_seconds"] = Figure(max(seconds), "max")
        self._sums.clear()
        self._seconds = []
        return figures
