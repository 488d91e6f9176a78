"""Runs a job on Kubernetes Engine with kubectl: applies its JobSet (jobset.py), looks at its pods, and stops it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from tpu_grpo.launching.gcloud import Command, Explanations, Gcloud, GcloudError
from tpu_grpo.launching.jobs import Job
from tpu_grpo.launching.jobset import CONTAINER, MOUNT, STOPPED, manifests
from tpu_grpo.launching.launch_options import Options
from tpu_grpo.launching.launcher import follow, merged
from tpu_grpo.records.errors import LaunchError
from tpu_grpo.records.untrusted_input import parse_json

AGAIN = "all pods start again, and the run goes on from its newest checkpoint"
WRONG: Explanations = (
    ("restarts exhausted", r"ReachedMaxRestarts", "read the `logs`, mend it, and `run` again; --restarts allows more"),
    ("final error", r"FailJobSetFailurePolicy", "exit codes 1 and 2 are final: read the `logs`, mend it, `run` again"),
    ("no image", r"ErrImagePull|ImagePullBackOff|InvalidImageName", "push it, or correct --image; nodes must read it"),
    ("no bucket", r"FailedMount|MountVolume", "correct --bucket, or let the --service-account use it"),
    ("no quota", r"quota", "free chips, or ask for more on the console's quota page, or of who runs the --queue"),
    ("no nodes", r"google\.com/tpu|node affinity|stockout", "wait, or make a node pool of this type and topology"),
    ("out of memory", r"OOMKilled", f"the host's memory did not suffice; {AGAIN}"),
    ("displaced", r"PreemptionByScheduler", f"by a workload of higher priority; once there is room, {AGAIN}"),
    ("preempted", r"TerminationByKubelet|NodeShutdown|DeletionByTaint|NodeLost", f"its node is gone; {AGAIN}"),
    ("evicted", r"Evicted|EvictionByEvictionAPI", f"the node needed its room; {AGAIN}"),
)
"""What can be wrong with a JobSet or a pod: (what, pattern, remedy). Patterns are searched in what Kubernetes says."""


class KubectlError(GcloudError):
    """kubectl failed; the arguments are those of `GcloudError`."""

    explanations = (
        ("JobSet", r"no matches for kind|have a resource type", "install JobSet in the cluster (docs/pod_guide.md)"),
        ("permission", r"\(Forbidden\)|Unauthorized", "your account needs the role Kubernetes Engine Developer"),
        ("cluster", r"refused|no such host|Unable to connect|context", "log in to the cluster (docs/pod_guide.md)"),
        ("time", r"timed out waiting", "some pods have not ended yet; `status` shows them"),
        ("missing", r"\(NotFound\)", "check --name, --namespace and --context"),
        ("invalid", r"is invalid|admission webhook", "Kubernetes refuses it for the reason above; correct that flag"),
    )
    unknown = "unknown", "look at what kubectl printed above"


class Kubectl(Gcloud):
    """Runs kubectl as `Gcloud` runs gcloud."""

    error = KubectlError
    absent = "kubectl must be on the PATH, got no such program; `gcloud components install kubectl` brings it"

    def command(self, *words: str) -> Command:
        """Return a command for the cluster and the namespace that the options name."""
        given = {name: getattr(self._options, name) for name in ("context", "namespace")}
        return ["kubectl", words[0], *(f"--{name}={value}" for name, value in given.items() if value), *words[1:]]

    def get(self, *words: str) -> Any:
        """Return the object or the list that ``kubectl get WORDS`` finds; {} if there is none, or in a dry run."""
        text = self.run(self.command("get", *words, "--ignore-not-found", "--output=json"), repeated=True)
        return parse_json(text) if text.strip() else {}


@dataclass(frozen=True)
class Pod:
    """The newest pod of a host."""

    name: str
    state: str
    """Its phase, or why its container waits."""
    node: str
    exit_code: int | None
    said: str
    """What Kubernetes says that may be wrong."""


def read_pods(jobset: Any, items: Any, events: Any = ()) -> dict[int, Pod]:
    """Return the newest pod of every host, by the hosts' numbers, which run on from slice to slice."""
    found: dict[int, Pod] = {}
    for pod in sorted(items, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        labels, status, name = pod["metadata"]["labels"], pod.get("status", {}), pod["metadata"]["name"]
        containers = {each["name"]: each["state"] for each in status.get("containerStatuses", [])}
        waits, ended = (containers.get(CONTAINER, {}).get(key, {}) for key in ("waiting", "terminated"))
        bad = {"DisruptionTarget": "True", "PodScheduled": "False"}
        wrong = [each for each in status.get("conditions", []) if bad.get(each["type"]) == each["status"]]
        wrong += [event for event in events if event["involvedObject"].get("name") == name and not ended]
        said = " ".join(part.get(key, "") for part in (status, waits, ended, *wrong) for key in ("reason", "message"))
        state, node = waits.get("reason") or status.get("phase", "Unknown"), pod["spec"].get("nodeName", "no node")
        host = int(labels["jobset.sigs.k8s.io/job-index"]) * _hosts(jobset)
        host += int(labels["batch.kubernetes.io/job-completion-index"])
        found[host] = Pod(name, state, node, ended.get("exitCode"), said)
    return dict(sorted(found.items()))


def _hosts(jobset: Any) -> int:
    """Return the number of hosts of one slice."""
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]


def _state(jobset: Any) -> str:
    if ended := jobset.get("status", {}).get("terminalState"):
        return ended.lower()
    stopped = jobset["metadata"].get("annotations", {}).get(STOPPED)
    return "running" if not jobset["spec"].get("suspend") else "stopped" if stopped else "waiting in its queue"


class Cluster:
    """Controls the JobSet that the options name."""

    def __init__(self, options: Options):
        self._options, self._name = options, options.name
        self._pods_of_it = f"--selector=jobset.sigs.k8s.io/jobset-name={options.name}"
        self.gcloud = Kubectl(options)

    def run(self, job: Job, run_dir: Path | None) -> None:
        """Apply the JobSet, in place of one that has ended or was stopped. ``run_dir`` is that of the job's config.

        Raises:
            ConfigError: the job or the options do not fit GKE.
            LaunchError: the JobSet goes on, or kubectl failed.
        """
        *shown, secret = manifests(job, self._options)
        if run_dir is not None and not (self._options.bucket and run_dir.is_relative_to(MOUNT)):
            self.gcloud.say(
                f"careful: run.dir={run_dir} is lost with its pod, and every restart begins anew; give --bucket "
                f"NAME and run.dir={MOUNT}/mine"
            )
        found = self.gcloud.get("jobset", self._name)
        if found and (state := _state(found)) not in ("completed", "failed", "stopped"):
            raise LaunchError(f"{self._name} must be free for a run, got one {state}; `stop` it, or wait for its end")
        self.delete()  # much of a JobSet cannot be changed
        self.gcloud.say(f"passing on {', '.join(job.secrets)}, by the secret {self._name}-secrets")
        if self.gcloud.dry_run:
            print(yaml.safe_dump_all(shown, sort_keys=False, width=120), end="")
        with NamedTemporaryFile("w", suffix=".json") as file:  # which only its owner can read
            json.dump({"apiVersion": "v1", "kind": "List", "items": [*shown, secret]}, file)
            file.flush()
            self.gcloud.run(self.gcloud.command("apply", "--server-side", f"--filename={file.name}"))
        self.gcloud.say(f"started {self._name}; `logs --follow` shows it, `status` says how it stands")

    def status(self) -> list[str]:
        """Return the state of the JobSet and of every host's pod, and a line with a remedy for all that is wrong."""
        jobset, pods = self._look()
        if not jobset:
            return [f"there is no JobSet {self._name}"]
        status, most = jobset.get("status", {}), jobset["spec"]["failurePolicy"]["maxRestarts"]
        hosts = jobset["spec"]["replicatedJobs"][0]["replicas"] * _hosts(jobset)
        lines = [f"{self._name}, {hosts} hosts: {_state(jobset)}, {status.get('restarts', 0)} of {most} restarts"]
        for host, pod in pods.items():
            code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
            lines.append(f"[{host}] {pod.name}: {pod.state}{code}  ({pod.node})")
        failed = (each.get("reason", "") for each in status.get("conditions", []) if each["type"] == "Failed")
        said = {"": " ".join(failed), **{f"[{host}]": pod.said for host, pod in pods.items()}}
        for what, pattern, remedy in WRONG:
            if hits := [host for host, text in said.items() if re.search(pattern, text, re.I)]:
                said = {host: text for host, text in said.items() if host not in hits}
                lines.append(f"{what}{' on ' * any(hits)}{', '.join(hits)}: {remedy}")
        return lines

    def logs(self, lines: int) -> str:
        """Return the end of every host's log, slice by slice."""
        return merged({host: self.gcloud.run(command) for host, command in self._logs(lines).items()})

    def follow(self, lines: int) -> None:
        """Print logs as they grow, with the host's number before every line, until the pods have ended."""
        follow(self.gcloud, {host: [*command, "--follow"] for host, command in self._logs(lines).items()})

    def stop(self, seconds: int) -> list[str]:
        """Suspend the JobSet, so that it stays stopped, and return a line for the end of every host.

        Suspending deletes the pods, which save a checkpoint first; so they are watched from before it.

        Raises:
            LaunchError: there is no JobSet, or a host has not ended after ``seconds``.
        """
        jobset, pods = self._look()
        each = "{.metadata.name} {.status.containerStatuses[*].state.terminated.exitCode}{'\\n'}"
        pods_of_it, seen = self._pods_of_it, ""
        watching = self.gcloud.command("get", "pods", pods_of_it, "--watch", f"--output=jsonpath={each}")
        self.gcloud.announce(watching)
        watch = None if self.gcloud.dry_run else self.gcloud.start(watching)
        try:
            self._take_from_queue(jobset)
            change = json.dumps({"metadata": {"annotations": {STOPPED: "true"}}, "spec": {"suspend": True}})
            self.gcloud.run(self.gcloud.command("patch", "jobset", self._name, "--type=merge", f"--patch={change}"))
            waiting = "--field-selector=status.phase=Running", "--for=delete", f"--timeout={seconds}s"
            self.gcloud.run(self.gcloud.command("wait", "pods", pods_of_it, *waiting))
        finally:
            if watch is not None:
                watch.terminate()
                seen = watch.communicate()[0]
        ends = [line.split() for line in seen.splitlines()]
        codes = {words[0]: words[1] for words in ends if len(words) > 1}
        return [f"[{host}] ended, exit code {codes.get(pod.name, 'unknown')}" for host, pod in pods.items()]

    def delete(self) -> None:
        """Remove the JobSet with its pods, its config and its secrets."""
        parts = f"jobset/{self._name}", f"configmap/{self._name}-config", f"secret/{self._name}-secrets"
        words = "--ignore-not-found", "--cascade=foreground"  # the pods first
        self.gcloud.run(self.gcloud.command("delete", *parts, *words), show=True)

    def _look(self) -> tuple[Any, dict[int, Pod]]:
        """Return the JobSet and the newest pods of its hosts; nothing in a dry run."""
        jobset, pods = self.gcloud.get("jobset", self._name), self.gcloud.get("pods", self._pods_of_it)
        events = self.gcloud.get("events", "--field-selector=involvedObject.kind=Pod") if pods else {}
        return jobset, read_pods(jobset, pods.get("items", []), events.get("items", [])) if jobset else {}

    def _take_from_queue(self, jobset: Any) -> None:
        """Deactivate the workload of a queued JobSet; else Kueue would resume what it has admitted."""
        if not jobset.get("metadata", {}).get("labels", {}).get("kueue.x-k8s.io/queue-name"):
            return
        selector = f"--selector=kueue.x-k8s.io/job-uid={jobset['metadata']['uid']}"
        for workload in self.gcloud.get("workload", selector).get("items", []):
            words = ("patch", "workload", workload["metadata"]["name"], "--type=merge")
            self.gcloud.run(self.gcloud.command(*words, '--patch={"spec":{"active":false}}'))

    def _logs(self, lines: int) -> dict[int, Command]:
        words = f"--container={CONTAINER}", f"--tail={lines}"
        begun = {
            host: pod for host, pod in self._look()[1].items() if pod.state == "Running" or pod.exit_code is not None
        }
        return {host: self.gcloud.command("logs", pod.name, *words) for host, pod in begun.items()}
