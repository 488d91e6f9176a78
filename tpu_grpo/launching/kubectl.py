"""Runs a job on Kubernetes Engine with kubectl: applies its JobSet (jobset.py), looks at its pods, and stops it."""

import json
import re
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from tpu_grpo.launching.gcloud import Command, Gcloud, GcloudError
from tpu_grpo.launching.jobs import Job, checked_config
from tpu_grpo.launching.jobset import CONTAINER, HOST, MOUNT, QUEUE, SLICE, STOPPED, manifests
from tpu_grpo.launching.launch_options import Options
from tpu_grpo.launching.launcher import merged, show
from tpu_grpo.records.errors import LaunchError

AGAIN = "all pods start again, and the run goes on from its newest checkpoint"
WRONG = (
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
        ("invalid", r"is invalid|webhook|not declared", "Kubernetes refuses it for the reason above; correct it"),
    )
    unknown = "unknown", "look at what kubectl printed above"


class Cluster(Gcloud):
    """Controls the JobSet that the options name, with kubectl."""

    error, common, always = KubectlError, ("context", "namespace"), ()
    absent = "kubectl must be on the PATH, got no such program; `gcloud components install kubectl` brings it"

    def __init__(self, options: Options):
        super().__init__(options)
        self._name, self._pods_of_it = options.name, f"--selector=jobset.sigs.k8s.io/jobset-name={options.name}"

    def _kubectl(self, verb: str, *words: str) -> Command:
        return ["kubectl", verb, *self.flags(), *words]

    def _get(self, *words: str) -> Any:
        """Return the object or the list that ``kubectl get WORDS`` finds; {} if there is none, or in a dry run."""
        return self.read(self._kubectl("get", *words, "--ignore-not-found", "--output=json")) or {}

    def apply(self, job: Job) -> None:
        """Apply the JobSet, in place of one that has ended or was stopped.

        Raises:
            ConfigError: the job or the options do not fit GKE.
            LaunchError: the JobSet goes on, or kubectl failed.
        """
        config = checked_config(job, self._options.slices)
        *shown, secret = manifests(job, self._options)
        if config is not None and not (self._options.bucket and config.run_dir.is_relative_to(MOUNT)):
            self.say(
                f"careful: run.dir={config.run_dir} is lost with its pod, and every restart begins anew; give --bucket "
                f"NAME and run.dir={MOUNT}/mine"
            )
        found = self._get("jobset", self._name)
        if found and (state := _state(found)) not in ("completed", "failed", "stopped"):
            raise LaunchError(f"{self._name} must be free for a run, got one {state}; `stop` it, or wait for its end")
        if kind := self._options.slice:
            pools = f"{self._options.slices} node pool{'s' * (self._options.slices > 1)}"
            self.say(f"needs {pools} of {kind.hosts} x {kind.machine_type}, topology {kind.topology()}")
        self.delete()  # much of a JobSet cannot be changed
        self.say(f"passing on {', '.join(job.secrets)}, by the secret {self._name}-secrets")
        if self.dry_run:
            print(yaml.safe_dump_all(shown, sort_keys=False, width=120), end="")
        with NamedTemporaryFile("w", suffix=".json") as file:  # which only its owner can read
            json.dump({"apiVersion": "v1", "kind": "List", "items": [*shown, secret]}, file)
            file.flush()
            self.run(self._kubectl("apply", "--server-side", f"--filename={file.name}"))
        self.say(f"started {self._name}; `logs --follow` shows it, `status` says how it stands")

    def status(self) -> list[str]:
        """Return the state of the JobSet and of every host's pod, and a line with a remedy for all that is wrong."""
        jobset, pods = self._look()
        if not jobset:
            return [f"there is no JobSet {self._name}"]
        status, most = jobset.get("status", {}), jobset["spec"]["failurePolicy"]["maxRestarts"]
        slices, state = jobset["spec"]["replicatedJobs"][0]["replicas"], _state(jobset)
        hosts = f"{slices * _hosts(jobset)} hosts"
        lines = [f"{self._name}, {hosts}: {state}, {status.get('restarts', 0)} of {most} restarts"]
        said = {"": _said(status)}
        for host, pod in pods.items():
            container, at = _container(pod), pod["spec"].get("nodeName", "no node")
            state = container.get("waiting", {}).get("reason") or pod["status"]["phase"]
            code = f", exit code {container['terminated']['exitCode']}" if "terminated" in container else ""
            lines.append(f"[{host}] {pod['metadata']['name']}: {state}{code}  ({at})")
            said[f"[{host}]"] = _said([pod["status"], pod["events"]])
        for what, pattern, remedy in WRONG:
            if hits := [host for host, text in said.items() if re.search(pattern, text, re.I)]:
                said = {host: text for host, text in said.items() if host not in hits}
                lines.append(f"{what}{' on ' * any(hits)}{', '.join(hits)}: {remedy}")
        return lines

    def logs(self, lines: int, *, follow: bool) -> None:
        """Print the end of every host's log, slice by slice; or logs as they grow, until the pods have ended."""
        words = f"--container={CONTAINER}", f"--tail={lines}", *(["--follow"] if follow else [])
        pods = self._look()[1]
        begun = {host: pod for host, pod in pods.items() if _container(pod).keys() & {"running", "terminated"}}
        commands = {host: self._kubectl("logs", pod["metadata"]["name"], *words) for host, pod in begun.items()}
        if follow:
            show(self, commands)
        else:
            print(merged({host: self.run(command) for host, command in commands.items()}))

    def stop(self, seconds: int) -> list[str]:
        """Suspend the JobSet, so that it stays stopped, and return a line for the end of every host.

        Suspending deletes the pods, which save a checkpoint first; so they are watched from before it.

        Raises:
            LaunchError: there is no JobSet, or a host has not ended after ``seconds``.
        """
        jobset, pods = self._look()
        code = f"{{.status.containerStatuses[?(@.name=='{CONTAINER}')].state.terminated.exitCode}}"
        output = f"--output=jsonpath={{.metadata.name}} {code}{{'\\n'}}"
        watching = self._kubectl("get", "pods", self._pods_of_it, "--watch", output)
        self.announce(watching)
        watch = None if self.dry_run else self.start(watching)
        seen = ""
        try:
            if QUEUE in jobset.get("metadata", {}).get("labels", {}):
                selector = f"--selector=kueue.x-k8s.io/job-uid={jobset['metadata']['uid']}"
                for workload in self._get("workload", selector).get("items", []):  # else Kueue would resume it
                    self._patch("workload", workload["metadata"]["name"], {"spec": {"active": False}})
            stopped = {"annotations": {STOPPED: "true"}}
            self._patch("jobset", self._name, {"metadata": stopped, "spec": {"suspend": True}})
            waiting = "--field-selector=status.phase=Running", "--for=delete", f"--timeout={seconds}s"
            self.run(self._kubectl("wait", "pods", self._pods_of_it, *waiting))
        finally:
            if watch is not None:
                watch.terminate()
                seen = watch.communicate()[0]
        codes = dict(line.split() for line in seen.splitlines() if len(line.split()) == 2)
        names = {host: pod["metadata"]["name"] for host, pod in pods.items()}
        return [f"[{host}] ended, exit code {codes.get(name, 'unknown')}" for host, name in names.items()]

    def delete(self) -> None:
        """Remove the JobSet with its pods, its config and its secrets."""
        parts = f"jobset/{self._name}", f"configmap/{self._name}-config", f"secret/{self._name}-secrets"
        words = "--ignore-not-found", "--cascade=foreground"  # the pods first
        self.run(self._kubectl("delete", *parts, *words), show=True)

    def _patch(self, kind: str, name: str, change: Any) -> None:
        self.run(self._kubectl("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}"))

    def _look(self) -> tuple[Any, dict[int, Any]]:
        """Return the JobSet, and the newest pod of every host with its events, by the hosts' numbers, which run on from
        slice to slice; nothing in a dry run."""
        jobset, found = self._get("jobset", self._name), dict[int, Any]()
        pods = self._get("pods", self._pods_of_it, "--sort-by=.metadata.creationTimestamp") if jobset else {}
        events = self._get("events", "--field-selector=involvedObject.kind=Pod") if pods else {}
        for pod in pods.get("items", []):
            labels, waits = pod["metadata"]["labels"], pod["status"]["phase"] == "Pending"  # events stay for an hour
            all_events = events.get("items", []) if waits else []
            of_it = [each for each in all_events if each["involvedObject"].get("name") == pod["metadata"]["name"]]
            found[int(labels[SLICE]) * _hosts(jobset) + int(labels[HOST])] = {**pod, "events": of_it}
        return jobset, dict(sorted(found.items()))


def _container(pod: Any) -> Any:
    """Return the state of a pod's container; {} if it has none yet."""
    found = {each["name"]: each["state"] for each in pod["status"].get("containerStatuses", [])}
    return found.get(CONTAINER, {})


def _hosts(jobset: Any) -> int:
    """Return the number of hosts of one slice."""
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]


def _state(jobset: Any) -> str:
    if ended := jobset.get("status", {}).get("terminalState"):
        return ended.lower()
    stopped = STOPPED in jobset["metadata"].get("annotations", {})
    return "running" if not jobset["spec"].get("suspend") else "stopped" if stopped else "waiting in its queue"


def _said(status: Any) -> str:
    """Return the reasons and messages in a status."""
    return " ".join(re.findall(r'"(?:reason|message)": "((?:\\.|[^"\\])*)"', json.dumps(status)))
