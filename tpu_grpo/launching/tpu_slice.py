"""Creates and deletes slices of Cloud TPUs, looks at their state, and waits for them."""

import time
from dataclasses import dataclass
from typing import Any, Literal

from tpu_grpo.launching.gcloud import Gcloud, GcloudError
from tpu_grpo.launching.launch_options import Options
from tpu_grpo.records.errors import ConfigError, LaunchError

type Condition = Literal["missing", "waiting", "ready", "gone"]

REQUEST_GONE = ("FAILED", "SUSPENDING", "SUSPENDED")
NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "HIDING", "HIDDEN")
CREATE_FLAGS = ("service_account", "network", "subnetwork", "valid_until_duration", "spot", "reserved", "internal_ips")
POLL_SECONDS = 20.0


@dataclass(frozen=True)
class SliceState:
    """The state of a slice, or of several slices together, as gcloud describes it."""

    condition: Condition
    """missing: does not exist; waiting: not usable yet; ready: usable; gone: exists, but will never be usable again."""
    description: str
    """The states that the API reports, in its words."""
    workers: int = 0
    accelerator_type: str = ""


class TpuSlice:
    """Controls what the options name: a queued resource with one node per slice, or a single node itself."""

    def __init__(self, options: Options, gcloud: Gcloud):
        self._options, self._gcloud = options, gcloud
        self._name, self._queued = options.name, options.how == "queued"
        self._noun = "queued-resources" if self._queued else "tpu-vm"
        numbered = [f"{options.name}-{number}" for number in range(options.slices)]
        self.nodes = numbered if options.slices > 1 else [options.name]
        """The names of the nodes, one for each slice."""

    def look(self) -> SliceState:
        """Return the state, which is ready if all slices are, and gone if one is; always ready in a dry run."""
        seen = []
        if self._queued:
            request: Any = self._gcloud.describe("queued-resources", "describe", self._name)
            if self._gcloud.dry_run:
                request = {"state": {"state": "ACTIVE"}}
            if request is None:
                return SliceState("missing", "there is no such queued resource (--how vm looks for a TPU VM)")
            state = request.get("state", {}).get("state", "STATE_UNSPECIFIED")
            seen = [f"queued resource {state}"]
            if (asked := _nodes_asked(request)) not in (0, len(self.nodes)):
                raise LaunchError(
                    f"--slices must be the number of nodes of the queued resource {self._name}, {asked}, got "
                    f"{len(self.nodes)}; give --slices {asked} (TPU_SLICES), or take another --name"
                )
            if state in REQUEST_GONE:
                message = request["state"].get("failedData", {}).get("error", {}).get("message", "")
                names = self.nodes if state == "SUSPENDING" and len(self.nodes) > 1 else []  # which slice was lost
                seen += [node.description for node in map(self._look_at, names) if node.condition == "gone"]
                return SliceState("gone", ", ".join(seen) + (f": {message}" if message else ""))
            if state != "ACTIVE":
                return SliceState("waiting", seen[0])
        nodes = [self._look_at(name) for name in self.nodes]
        if self._gcloud.dry_run:
            kind = self._options.slice
            workers = len(nodes) * (kind.hosts if kind else 1)
            return SliceState("ready", "dry run", workers, kind.accelerator_type if kind else "")
        worst_first: list[Condition] = ["missing", "gone", "waiting", "ready"]
        condition = worst_first[min(worst_first.index(node.condition) for node in nodes)]
        shown = [node for node in nodes if node.condition != "ready"] or nodes
        description = ", ".join([*seen, *(node.description for node in shown)])
        workers = sum(node.workers for node in nodes)
        return SliceState(condition, description, workers, max(node.accelerator_type for node in nodes))

    def _look_at(self, name: str) -> SliceState:
        """Return the state of one node."""
        node: Any = self._gcloud.describe("tpu-vm", "describe", name)
        named = f"node {name}" if len(self.nodes) > 1 else "node"
        if node is None and self._queued:  # the request was fulfilled, and the node removed since
            return SliceState("gone", f"no {named}")
        if node is None:
            return SliceState("missing", "there is no such TPU VM")
        state, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "")
        condition: Condition = "gone" if state in NODE_GONE else "waiting"
        if state == "READY" and health != "UNHEALTHY_MAINTENANCE":  # maintenance ends by itself
            condition = "ready"
        description = f"{named} {state}" + (f" ({health})" if health else "")
        workers = len(node.get("networkEndpoints", []))
        return SliceState(condition, description, workers, node.get("acceleratorType", ""))

    def create(self) -> None:
        """Request the slices; a queued resource is not waited for. Raises ConfigError if --type was not given."""
        if (kind := self._options.slice) is None:
            raise ConfigError("--type must say which slice to create, got none; for example --type v5e-16")
        runtime = self._options.runtime or kind.generation.runtime
        words = [self._noun, "create", self._name, f"--accelerator-type={kind.accelerator_type}"]
        several = [f"--node-count={len(self.nodes)}", f"--node-prefix={self._name}"]
        named = several if len(self.nodes) > 1 else [f"--node-id={self._name}"]
        words += [*named, f"--runtime-version={runtime}"] if self._queued else [f"--version={runtime}"]
        self._gcloud.run(["gcloud", "compute", "tpus", *words, *self._gcloud.flags(*CREATE_FLAGS)], show=True)

    def delete(self) -> None:
        """Delete the slice and wait until it is deleted; if it does not exist, only print a line."""
        words = [self._noun, "delete", self._name, *(["--force"] if self._queued else [])]  # --force: with its node
        try:
            self._gcloud.run(["gcloud", "compute", "tpus", *words, *self._gcloud.flags()], show=True)
        except GcloudError as error:
            if error.kind != "missing":
                raise
            self._gcloud.say(f"{self._name} does not exist; was it created with the other --how?")

    def wait(self) -> SliceState:
        """Wait until the slice is ready, and return its state; raises LaunchError if it will never be ready."""
        before = ""
        while True:
            state = self.look()
            if state.description != before:
                self._gcloud.say(f"{self._name}: {state.description}")
                before = state.description
            if state.condition == "ready":
                return state
            if state.condition != "waiting":
                raise LaunchError(
                    f"{self._name} must become ready, got: {state.description}; delete it, create it anew"
                )
            time.sleep(POLL_SECONDS)

    def require_ready(self) -> SliceState:
        """Return the slice's state; raises LaunchError unless it is ready."""
        state = self.look()
        if state.condition != "ready":
            remedy = "wait, `status` shows its state" if state.condition == "waiting" else "`create` it first"
            raise LaunchError(f"{self._name} must be ready, got: {state.description}; {remedy}")
        return state


def _nodes_asked(request: Any) -> int:
    """Return the number of nodes that a queued resource asks for; 0 if gcloud does not say.

    The API has it as nodeCount in a part of a node's specification whose name has changed over its versions.
    """
    asked = 0
    for spec in request.get("tpu", {}).get("nodeSpec", []):
        parts = [part for part in spec.values() if isinstance(part, dict) and "nodeCount" in part]
        asked += int(parts[0]["nodeCount"]) if parts else 1
    return asked
