"""A stand-in for kubectl, and for the JobSet controller behind it.

Found as ``kubectl`` on the PATH of a test. Objects are kept in a file; tests set what the pods and the events say, in
the API's words. ``Kubernetes.start`` runs the pods of a JobSet as local processes, with the variables of their
container, and ``Kubernetes.settle`` does after their end what Job and JobSet do. What the real ones do and this does
not: nodes, images, volumes, services, admission.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STATE = "KUBERNETES_STATE"
FLAGS = {
    "apply": {"server-side", "filename", "context", "namespace"},
    "delete": {"ignore-not-found", "cascade", "context", "namespace"},
    "get": {"ignore-not-found", "output", "selector", "sort-by", "field-selector", "watch", "context", "namespace"},
    "logs": {"container", "tail", "follow", "context", "namespace"},
    "patch": {"type", "patch", "context", "namespace"},
    "wait": {"selector", "field-selector", "for", "timeout", "context", "namespace"},
}
"""The verbs and flags that are used; each is in the help of kubectl 1.32."""


class Kubernetes:
    """The state of the cluster, in a directory."""

    def __init__(self, root: Path):
        self.root = root
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def install(cls, root: Path) -> "Kubernetes":
        """Make the directory, with ``bin/kubectl``."""
        (root / "bin").mkdir(parents=True)
        program = root / "bin/kubectl"
        program.write_text(f'#!/bin/bash\nexec "{sys.executable}" -I "{Path(__file__).resolve()}" "$@"\n')
        program.chmod(0o755)
        made = cls(root)
        made.save({"objects": {}, "pods": [], "events": [], "faults": {}})
        return made

    def environment(self) -> dict[str, str]:
        return {STATE: str(self.root), "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}

    def load(self) -> dict[str, Any]:
        return json.loads((self.root / "state.json").read_text())

    def save(self, state: dict[str, Any]) -> None:
        new = self.root / f"state.{os.getpid()}.json"
        new.write_text(json.dumps(state))
        new.replace(self.root / "state.json")

    def calls(self) -> list[list[str]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def jobset(self, name: str = "grpo") -> dict[str, Any]:
        return self.load()["objects"][f"jobset/{name}"]

    # --- the controllers ---------------------------------------------------------------------------------------------

    def pods(self, name: str = "grpo", *, restart: int = 0) -> None:
        """Make a running pod for every host."""
        state = self.load()
        replicated = state["objects"][f"jobset/{name}"]["spec"]["replicatedJobs"][0]
        each = replicated["template"]["spec"]["completions"]
        state["pods"] = [
            {
                "metadata": {
                    "name": f"{name}-slice-{at}-{host}-r{restart}",
                    "labels": {
                        "jobset.sigs.k8s.io/jobset-name": name,
                        "jobset.sigs.k8s.io/job-index": str(at),
                        "batch.kubernetes.io/job-completion-index": str(host),
                    },
                    "creationTimestamp": f"2026-11-27T00:00:{restart:02}Z",
                },
                "spec": {"nodeName": f"node-{at}-{host}"},
                "status": {"phase": "Running", "containerStatuses": [{"name": "tpu-grpo", "state": {"running": {}}}]},
            }
            for at in range(replicated["replicas"])
            for host in range(each)
        ]
        self.save(state)

    def say(self, hosts: tuple[int, ...], status: dict[str, Any], *, node: bool = True) -> None:
        """Change what the pods of some hosts say; ``node``: whether they have one."""
        state = self.load()
        for host in hosts:
            state["pods"][host]["status"] |= status
            if not node:
                del state["pods"][host]["spec"]["nodeName"]
        self.save(state)

    def fail(self, reason: str, message: str, restarts: int) -> None:
        """Have the JobSet end, as its controller does."""
        condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
        self.status({"terminalState": "Failed", "restarts": restarts, "conditions": [condition]})

    def status(self, status: dict[str, Any], name: str = "grpo") -> None:
        state = self.load()
        state["objects"][f"jobset/{name}"]["status"] = status
        self.save(state)

    def variables(self, pod: dict[str, Any], name: str = "grpo") -> dict[str, str]:
        """The variables of a pod's container, as the kubelet makes them."""
        template = self.jobset(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        container = template["spec"]["containers"][0]
        secret = container["envFrom"][0]["secretRef"]["name"]
        found = dict(self.load()["objects"][f"secret/{secret}"]["stringData"])
        annotations = pod["metadata"]["labels"]  # the same keys as annotations
        for variable in container["env"]:
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                found[variable["name"]] = annotations[re.fullmatch(r"metadata\.annotations\['(.*)'\]", path)[1]]
            else:
                found[variable["name"]] = expanded(variable["value"], found)
        return found

    def start(self, python: str, extra: dict[str, list[str]], name: str = "grpo", *, restart: int = 0) -> None:
        """Run the pods of a JobSet as processes: ``python scripts/run.py`` with the container's arguments, the config's
        file and ``extra`` words for each host, and the variables of its container."""
        self.pods(name, restart=restart)
        template = self.jobset(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        config = self.root / "config.yaml"
        config.write_text(self.load()["objects"][f"configmap/{name}-config"]["data"]["config.yaml"])
        for pod in self.load()["pods"]:
            pod_name = pod["metadata"]["name"]
            words = [expanded(word, {}) for word in template["spec"]["containers"][0]["args"][2:]]
            command = [python, "scripts/run.py", str(config), *words, *extra[pod_name.rpartition("-r")[0]]]
            (self.root / "logs").mkdir(exist_ok=True)
            with open(self.root / "logs" / pod_name, "wb") as log:
                self.processes[pod_name] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | self.variables(pod, name)
                )

    def settle(self, name: str = "grpo", seconds: float = 500) -> str:
        """Wait until the pods have ended, and do what Job and JobSet then do: "completed", "failed" or "restarts"."""
        codes = {pod: process.wait(seconds) for pod, process in self.processes.items()}
        self.processes = {}
        spec = self.jobset(name)["spec"]
        final = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
        restarts = self.jobset(name).get("status", {}).get("restarts", 0)
        if not any(codes.values()):
            self.status({"terminalState": "Completed", "restarts": restarts})
            return "completed"
        if any(code in final for code in codes.values()):
            self.fail("FailJobSetFailurePolicyAction", f"codes {codes}", restarts)
            return "failed"
        if restarts == spec["failurePolicy"]["maxRestarts"]:
            self.fail("ReachedMaxRestarts", f"codes {codes}", restarts)
            return "failed"
        self.status({"restarts": restarts + 1})
        return "restarts"

    def log(self, pod: str) -> str:
        return (self.root / "logs" / pod).read_text()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    # --- the program -------------------------------------------------------------------------------------------------

    def main(self, words: list[str]) -> int:
        with open(self.root / "calls.jsonl", "a") as calls:
            calls.write(json.dumps(["kubectl", *words]) + "\n")
        verb, *rest = words
        flags = {word[2:].partition("=")[0]: word.partition("=")[2] for word in rest if word.startswith("--")}
        names = [word for word in rest if not word.startswith("--")]
        if verb not in FLAGS or set(flags) - FLAGS[verb]:
            return complain(f"unknown flag: {sorted(set(flags) - FLAGS.get(verb, set()))}")
        state = self.load()
        if said := state["faults"].pop(verb, None):
            self.save(state)
            return complain(said)
        return getattr(self, f"_{verb}")(state, names, flags)

    def _apply(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        for item in json.loads(Path(flags["filename"]).read_text())["items"]:
            item["metadata"]["uid"] = "u-1"
            state["objects"][f"{item['kind'].lower()}/{item['metadata']['name']}"] = item
        self.save(state)
        return 0

    def _get(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        if "watch" in flags:
            return self._watch(flags["output"])
        match names:
            case ["pods"]:
                assert flags["sort-by"] == ".metadata.creationTimestamp"
                found: Any = {"items": sorted(state["pods"], key=lambda pod: pod["metadata"]["creationTimestamp"])}
            case ["events"]:
                found = {"items": state["events"]}
            case ["workload"]:
                found = {"items": [{"metadata": {"name": "jobset-grpo-1"}}]}
            case [kind, name]:
                found = state["objects"].get(f"{kind}/{name}")
            case _:
                return complain(f"cannot get {names}")
        if found is not None:
            print(json.dumps(found))
        return 0

    def _watch(self, output: str) -> NoReturn:
        """Print a line for every pod, and again when its container ends."""
        assert output == (
            "jsonpath={.metadata.name} {.status.containerStatuses[?(@.name=='tpu-grpo')].state.terminated.exitCode}"
            "{'\\n'}"
        ), output
        seen: dict[str, str] = {}
        (self.root / "watching").touch()
        while True:
            for pod in self.load()["pods"]:
                ended = pod["status"]["containerStatuses"][0]["state"].get("terminated", {})
                line = f"{pod['metadata']['name']} {ended.get('exitCode', '')}"
                if seen.get(pod["metadata"]["name"]) != line:
                    print(line, flush=True)
                seen[pod["metadata"]["name"]] = line
            time.sleep(0.02)

    def _patch(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        kind, name = names
        change = json.loads(flags["patch"])
        if kind == "workload":
            state["objects"][f"workload/{name}"] = change
            self.save(state)
            return 0
        found = state["objects"].get(f"{kind}/{name}")
        if found is None:
            return complain(f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{name}" not found')
        found["metadata"]["annotations"] = found["metadata"].get("annotations", {}) | change["metadata"]["annotations"]
        found["spec"] |= change["spec"]
        self.save(state)
        return 0

    def _wait(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        """Stands for the time in which a suspended JobSet's pods end: here, with the code of state["ends"]."""
        if (code := state.get("ends")) is None:
            return complain("error: timed out waiting for the condition on pods/grpo-slice-0-0-r0")
        while not (self.root / "watching").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        for pod in state["pods"]:
            pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code}}
        self.save(state)
        time.sleep(0.2)
        self.save({**state, "pods": []})
        return 0

    def _logs(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        log = self.root / "logs" / names[0]
        if not log.exists():
            return complain(f'Error from server (BadRequest): container "tpu-grpo" in pod "{names[0]}" is waiting')
        lines = log.read_text().splitlines()[-int(flags["tail"]) :]
        for line in lines:
            print(line, flush=True)
            time.sleep(0.02 if "follow" in flags else 0)
        return 0

    def _delete(self, state: dict[str, Any], names: list[str], flags: dict[str, str]) -> int:
        for name in names:
            if state["objects"].pop(name, None) is not None and name.startswith("jobset/"):
                state["pods"] = []
        self.save(state)
        return 0


def expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: $$ stands for $, and what is unknown stays."""
    known = re.compile(r"\$\$|\$\((\w+)\)")
    return known.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


def complain(said: str) -> int:
    print(said, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(Kubernetes(Path(os.environ[STATE])).main(sys.argv[1:]))
