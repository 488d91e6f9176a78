"""Creates, describes, awaits and deletes a slice."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tpu_grpo.launching import commands
from tpu_grpo.launching.gcloud import Gcloud, GcloudError
from tpu_grpo.launching.options import Options
from tpu_grpo.records.errors import LaunchError

type Condition = Literal["missing", "waiting", "ready", "gone"]

REQUEST_GONE = ("FAILED", "SUSPENDING", "SUSPENDED")
NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "HIDING", "HIDDEN")
POLL_SECONDS = 20.0


@dataclass(frozen=True)
class SliceState:
    """Describes a slice as gcloud sees it."""

    condition: Condition
    """A missing slice does not exist, a waiting one is not usable yet, and one that is gone never will be again."""
    description: str
    """These are the states behind the condition, in the API's words."""
    workers: int = 0
    accelerator_type: str = ""


class TpuSlice:
    """Controls the slice that the options name."""

    def __init__(self, options: Options, gcloud: Gcloud, sleep: Callable[[float], None] = time.sleep):
        self._options, self._gcloud, self._sleep = options, gcloud, sleep

    def look(self) -> SliceState:
        """Return its state; in a dry run it is ready."""
        seen = []
        if self._options.how == "queued":
            request = self._describe(commands.describe_request(self._options))
            state = "ACTIVE" if self._gcloud.dry_run else _request_state(request)
            if state is None:
                return SliceState("missing", "there is no such queued resource (--how vm looks for a TPU VM)")
            seen = [f"queued resource {state}"]
            if state in REQUEST_GONE:
                return SliceState("gone", seen[0] + _reason(request))
            if state != "ACTIVE":
                return SliceState("waiting", seen[0])
        node = self._describe(commands.describe_node(self._options))
        if self._gcloud.dry_run:
            kind = self._options.slice
            return SliceState("ready", "dry run", kind.hosts if kind else 1, kind.accelerator_type if kind else "")
        if node is None:  # a request that was fulfilled, and whose node was taken away
            return (
                SliceState("gone", f"{seen[0]}, no node") if seen else SliceState("missing", "there is no such TPU VM")
            )
        return _node_state(node, seen)

    def create(self) -> None:
        """Ask for it."""
        self._gcloud.run(commands.create(self._options), show=True)

    def delete(self) -> None:
        """Give it back; nothing happens if it is not there."""
        try:
            self._gcloud.run(commands.delete(self._options), show=True)
        except GcloudError as error:
            if error.explanation.kind != "missing":
                raise
            self._gcloud.say(f"{self._options.name} does not exist; was it created with the other --how?")

    def wait(self) -> SliceState:
        """Wait until it is ready.

        Raises:
            LaunchError: it never will be.
        """
        before = ""
        while True:
            state = self.look()
            if state.description != before:
                self._gcloud.say(f"{self._options.name}: {state.description}")
                before = state.description
            if state.condition == "ready":
                return state
            if state.condition != "waiting":
                raise LaunchError(
                    f"{self._options.name} must become ready, got: {state.description}; delete it, create it anew"
                )
            self._sleep(POLL_SECONDS)

    def require_ready(self) -> SliceState:
        """Return its state. Raises LaunchError unless it is ready."""
        state = self.look()
        if state.condition != "ready":
            remedy = "wait, `status` shows its state" if state.condition == "waiting" else "`create` it first"
            raise LaunchError(f"{self._options.name} must be ready, got: {state.description}; {remedy}")
        return state

    def _describe(self, command: commands.Command) -> dict[str, Any] | None:
        try:
            return self._gcloud.json(command)
        except GcloudError as error:
            if error.explanation.kind != "missing":
                raise
            return None


def _request_state(request: dict[str, Any] | None) -> str | None:
    return None if request is None else request.get("state", {}).get("state", "STATE_UNSPECIFIED")


def _reason(request: dict[str, Any] | None) -> str:
    message = (request or {}).get("state", {}).get("failedData", {}).get("error", {}).get("message", "")
    return f": {message}" if message else ""


def _node_state(node: dict[str, Any], seen: list[str]) -> SliceState:
    state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
    description = ", ".join([*seen, f"node {state}" + (f" ({health})" if health else "")])
    condition: Condition = "waiting"
    if state in NODE_GONE:
        condition = "gone"
    elif state == "READY" and health != "UNHEALTHY_MAINTENANCE":  # comes back by itself
        condition = "ready"
    return SliceState(condition, description, len(node.get("networkEndpoints", [])), node.get("acceleratorType", ""))
