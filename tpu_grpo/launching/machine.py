"""The slice as a machine that is there, or is not: create, wait, describe, delete."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tpu_grpo.errors import LaunchError
from tpu_grpo.launching import commands
from tpu_grpo.launching.gcloud import Gcloud, GcloudError
from tpu_grpo.launching.settings import Settings

type Condition = Literal["missing", "waiting", "ready", "gone"]

REQUEST_GONE = ("FAILED", "SUSPENDING", "SUSPENDED")
NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "HIDING", "HIDDEN")
POLL_SECONDS = 20.0


@dataclass(frozen=True)
class Machine:
    """A slice as gcloud describes it."""

    condition: Condition
    """missing: does not exist; waiting: not usable yet; ready; gone: exists, and will never be usable again."""
    said: str
    """The states behind it, in the API's words."""
    workers: int = 0
    accelerator_type: str = ""


class MachineRoom:
    """What can be done with the slice of some settings."""

    def __init__(self, settings: Settings, gcloud: Gcloud, sleep: Callable[[float], None] = time.sleep):
        self._settings, self._gcloud, self._sleep = settings, gcloud, sleep

    def look(self) -> Machine:
        """Describe it. In a dry run it is there."""
        said = []
        if self._settings.how == "queued":
            request = self._describe(commands.describe_request(self._settings))
            state = "ACTIVE" if self._gcloud.dry_run else _request_state(request)
            if state is None:
                return Machine("missing", "there is no such queued resource (--how vm looks for a TPU VM)")
            said = [f"queued resource {state}"]
            if state in REQUEST_GONE:
                return Machine("gone", said[0] + _reason(request))
            if state != "ACTIVE":
                return Machine("waiting", said[0])
        node = self._describe(commands.describe_node(self._settings))
        if self._gcloud.dry_run:
            kind = self._settings.type
            return Machine("ready", "dry run", kind.hosts if kind else 1, kind.accelerator_type if kind else "")
        if node is None:  # a request that was fulfilled, and whose node was taken away
            return Machine("gone", f"{said[0]}, no node") if said else Machine("missing", "there is no such TPU VM")
        return _machine(node, said)

    def create(self) -> None:
        """Ask for it."""
        self._gcloud.run(commands.create(self._settings), show=True)

    def delete(self) -> None:
        """Give it back; nothing happens if it is not there."""
        try:
            self._gcloud.run(commands.delete(self._settings), show=True)
        except GcloudError as error:
            if error.explanation.kind != "missing":
                raise
            self._gcloud.say(f"{self._settings.name} does not exist; was it created with the other --how?")

    def wait(self) -> Machine:
        """Wait until it is ready.

        Raises:
            LaunchError: it never will be.
        """
        before = ""
        while True:
            machine = self.look()
            if machine.said != before:
                self._gcloud.say(f"{self._settings.name}: {machine.said}")
                before = machine.said
            if machine.condition == "ready":
                return machine
            if machine.condition != "waiting":
                raise LaunchError(
                    f"{self._settings.name} must become ready, got: {machine.said}; delete it, create it anew"
                )
            self._sleep(POLL_SECONDS)

    def require(self) -> Machine:
        """Describe it. Raises LaunchError unless it is ready."""
        machine = self.look()
        if machine.condition != "ready":
            raise LaunchError(
                f"{self._settings.name} must be ready, got: {machine.said}; "
                + ("wait, `status` shows its state" if machine.condition == "waiting" else "`create` it first")
            )
        return machine

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


def _machine(node: dict[str, Any], said: list[str]) -> Machine:
    state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
    words = ", ".join([*said, f"node {state}" + (f" ({health})" if health else "")])
    condition: Condition = "waiting"
    if state in NODE_GONE:
        condition = "gone"
    elif state == "READY" and health != "UNHEALTHY_MAINTENANCE":  # comes back by itself
        condition = "ready"
    return Machine(condition, words, len(node.get("networkEndpoints", [])), node.get("acceleratorType", ""))
