"""A stand-in for gcloud: TPU VMs are directories, and their workers local processes.

Found as ``gcloud`` on the PATH of a test. Each worker has a home directory and an environment of its own; ssh gives its
command to ``bash -c`` there, as one string, like sshd does with a login shell; scp copies into the home directory. The
nodes of a queued resource of several slices know each other as such machines do: they have one coordinator. What the
real program does and this one does not: quotas, networks, time.

``python stand_in.py ...`` is the program; class StandIn is what tests hold.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.launching import gcloud_syntax, local_processes

MARK = "STAND_IN_WORKER"
"""In the environment of every process of a worker, which is found by it: state directory, slice, life of the slice."""
STATE = "STAND_IN_STATE"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Stands in for `uv sync`: an environment that is there already, whose Python tells training runs who they are. On a
# slice they ask the metadata server instead.
UV = """#!/bin/bash
echo "$*" >> "$HOME/uv_calls"
[ "$1 $2" != "pip install" ] || exit 0
[ "$1" = sync ] || exit 2
[ ! -e "$HOME/uv_fails" ] || { echo "error: No solution found when resolving dependencies"; exit 1; }
mkdir -p .venv/bin
cat > .venv/bin/python <<'EOF'
#!/bin/bash
export PYTHONPATH=$PWD
case $1 in
*run.py) exec {python} "$@" hosts.coordinator=127.0.0.1:$WORKER_PORT hosts.count=$WORKERS hosts.index=$WORKER ;;
*) exec {python} "$@" ;;
esac
EOF
chmod +x .venv/bin/python
"""


class StandIn:
    """The state of the stand-in, in a directory."""

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def install(cls, root: Path, *, hosts: int = 2, waits: int = 1, python: str = sys.executable) -> "StandIn":
        """Make the directory, with ``bin/gcloud``; every slice gets ``hosts`` workers whatever its type says."""
        (root / "bin").mkdir(parents=True)
        (root / "worker_bin").mkdir()
        program = f'#!/bin/bash\nexec "{sys.executable}" -I -S "{Path(__file__).resolve()}" "$@"\n'
        for path, text in ((root / "bin/gcloud", program), (root / "worker_bin/uv", UV.replace("{python}", python))):
            path.write_text(text)
            path.chmod(0o755)
        stand_in = cls(root)
        stand_in.save({"hosts": hosts, "waits": waits, "requests": {}, "nodes": {}, "faults": [], "made": 0})
        return stand_in

    # --- for tests ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Variables with which ``gcloud`` is this one."""
        return {STATE: str(self.root), "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}

    def home(self, worker: int, name: str = "grpo") -> Path:
        return self.root / "nodes" / name / str(worker)

    def calls(self) -> list[list[str]]:
        """Every command so far, gcloud first."""
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """The same, in short: "tpu-vm create"."""
        return [" ".join(call[call.index("tpus") + 1 :][:2]) for call in self.calls()]

    def fail(self, verb: str, message: str, times: int = 1) -> None:
        """Have the next ``times`` commands of a kind ("tpu-vm create") end with an error."""
        state = self.load()
        state["faults"] += [{"verb": verb, "message": message}] * times
        self.save(state)

    def preempt(self, name: str = "grpo") -> None:
        """Take a machine away, as a spot one is: at once, whatever is going on there.

        The request of a single slice is suspended at once, that of several (``grpo-1``) still says ACTIVE.
        """
        state = self.load()
        generation = state["nodes"][name]["generation"]
        state["nodes"][name]["state"] = "PREEMPTED"
        if name in state["requests"]:
            state["requests"][name]["state"] = "SUSPENDED"
        self.save(state)
        (self.root / "nodes" / name).rename(self.root / f"gone_{name}_{generation}")
        self.kill(name, generation)

    def processes(self, name: str = "", generation: int | str = "") -> list[int]:
        """Processes of workers that are alive; of all slices, or of one in its nth life."""
        mark = "".join(f"{part}:" for part in (f"{MARK}={self.root}", name, str(generation)) if part)
        return local_processes.alive(mark.encode())

    def kill(self, name: str = "", generation: int | str = "") -> None:
        """End all processes of workers."""
        local_processes.kill(lambda: self.processes(name, generation))

    # --- state -------------------------------------------------------------------------------------------------------

    def load(self) -> dict:
        return json.loads((self.root / "state.json").read_text())

    def save(self, state: dict) -> None:
        new = self.root / f"state.{os.getpid()}.json"
        new.write_text(json.dumps(state))
        new.replace(self.root / "state.json")

    # --- the program -------------------------------------------------------------------------------------------------

    def main(self, words: list[str]) -> int:
        with open(self.root / "calls.jsonl", "a") as calls:
            calls.write(json.dumps(["gcloud", *words]) + "\n")
        try:
            gcloud_syntax.check(["gcloud", *words])
        except AssertionError as error:
            return complain("gcloud", f"unrecognized arguments: {error}", 2)
        command, positionals, flags = gcloud_syntax.split(words)
        verb = f"{command[-2]} {command[-1]}"
        where = "gcloud." + ".".join(command)
        state = self.load()
        if fault := next((f for f in state["faults"] if f["verb"] == verb), None):
            state["faults"].remove(fault)
            self.save(state)
            return complain(where, fault["message"])
        if verb == "storage rsync":
            return self.rsync(where, positionals, flags["--exclude"])
        kind = state["requests" if command[-2] == "queued-resources" else "nodes"]
        match command[-1]:
            case "create":
                return self.create(where, positionals[0], flags, state, kind, verb)
            case "describe":
                return self.describe(where, positionals[0], state, kind)
            case "delete":
                return self.delete(where, positionals[0], state, kind)
            case "ssh":
                return self.ssh(where, positionals[0], flags, state)
        return self.scp(where, positionals, state)

    def bucket(self, address: str) -> Path:
        """The directory that stands for gs://..."""
        return self.root / "buckets" / address.removeprefix("gs://")

    def rsync(self, where: str, positionals: list[str], exclude: str) -> int:
        source, target = self.bucket(positionals[0]), Path(positionals[1])
        if not source.is_dir():
            return complain(where, f"Did not find existing container at: {positionals[0]}")
        for file in source.iterdir():
            if file.is_file() and not re.match(exclude, file.name):
                shutil.copyfile(file, target / file.name)
        return 0

    def create(self, where: str, name: str, flags: dict, state: dict, kind: dict, verb: str) -> int:
        if name in kind:
            return complain(where, f"ALREADY_EXISTS: Resource '{name}' already exists")
        node = {"state": "READY", "acceleratorType": flags["--accelerator-type"], "health": "HEALTHY"}
        if verb == "queued-resources create":
            several = [f"{flags.get('--node-prefix', name)}-{n}" for n in range(int(flags.get("--node-count", 0)))]
            nodes = several or [flags["--node-id"]]
            kind[name] = {"state": "WAITING_FOR_RESOURCES", "waits": state["waits"], "node": node, "nodes": nodes}
        else:
            self.boot([name], node, state)
        state["made"] += 1
        self.save(state)
        return 0

    def boot(self, names: list[str], node: dict, state: dict) -> None:
        """Start the machines of slices that know each other."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            node |= {"port": probe.getsockname()[1], "generation": state["made"], "slices": len(names)}
        for number, name in enumerate(names):
            state["nodes"][name] = {**node, "number": number}
            for worker in range(state["hosts"]):
                self.home(worker, name).mkdir(parents=True)

    def describe(self, where: str, name: str, state: dict, kind: dict) -> int:
        if name not in kind:
            return missing(where, name)
        if kind is state["requests"]:
            request = kind[name]
            if request["state"] == "WAITING_FOR_RESOURCES":
                request["waits"] -= 1
                if request["waits"] < 0:
                    request["state"] = "ACTIVE"
                    self.boot(request["nodes"], request["node"], state)
                self.save(state)
            count = len(request["nodes"])
            spec = {"nodeId": name} if request["nodes"] == [name] else {"multisliceParams": {"nodeCount": count}}
            shown = {"name": f"projects/p/locations/z/queuedResources/{name}", "tpu": {"nodeSpec": [spec]}}
            print(json.dumps({**shown, "state": {"state": request["state"]}}))
        else:
            ends = [{"ipAddress": f"10.0.0.{n}", "port": 8470} for n in range(state["hosts"])]
            print(json.dumps({"name": name, **kind[name], "networkEndpoints": ends}))
        return 0

    def delete(self, where: str, name: str, state: dict, kind: dict) -> int:
        if name not in kind:
            return missing(where, name)
        for node in kind.pop(name).get("nodes", [name]):
            self.kill(node)
            shutil.rmtree(self.root / "nodes" / node, ignore_errors=True)
            state["nodes"].pop(node, None)
        self.save(state)
        return 0

    def reachable(self, where: str, name: str, state: dict) -> dict | int:
        node = state["nodes"].get(name)
        if node is None:
            return missing(where, name)
        if node["state"] in ("PREEMPTED", "TERMINATED"):
            return complain(where, f'This TPU has terminal state "{node["state"]}", so it cannot be used anymore.')
        return node

    def ssh(self, where: str, target: str, flags: dict, state: dict) -> int:
        name = target.rpartition("@")[2]
        node = self.reachable(where, name, state)
        if isinstance(node, int):
            return node
        chosen = range(state["hosts"]) if flags["--worker"] == "all" else [int(flags["--worker"])]
        codes: dict[int, int] = {}

        def one(worker: int) -> None:
            print(f"SSH: Attempting to connect to worker {worker}...", file=sys.stderr)
            directory = flags.get("--output-directory")
            output = os.open(f"{directory}/{worker}.log", os.O_WRONLY | os.O_CREAT, 0o644) if directory else None
            line = " ".join(flags["--command"].split(" "))  # the words that gcloud makes of it, and ssh joins again
            home = self.home(worker, name)
            try:
                done = subprocess.Popen(
                    ["bash", "-c", line],
                    cwd=home,
                    env=self.login(worker, home, node, state),
                    stdout=output,
                    stderr=output,
                )
                codes[worker] = done.wait()
            except FileNotFoundError:  # taken away in this moment
                print("[/usr/bin/ssh] exited with return code [255].", file=sys.stderr)
                codes[worker] = 255
            if codes[worker] and len(chosen) > 1:
                said = (
                    f"##### Command execution on worker {worker} failed with exit status {codes[worker]}. Continuing."
                )
                print(said, file=sys.stderr)

        threads = [threading.Thread(target=one, args=(worker,)) for worker in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return next((code for _, code in sorted(codes.items()) if code), 0)

    def login(self, worker: int, home: Path, node: dict, state: dict) -> dict[str, str]:
        """What a login has, what a slice's machine would know, and last how the test compiles, on two devices."""
        return {
            "HOME": str(home),
            "USER": "somebody",
            "LANG": "C.UTF-8",
            "PATH": f"{self.root / 'worker_bin'}:{SYSTEM_PATH}",
            MARK: f"{self.root}:{home.parent.name}:{node['generation']}:",
            "WORKER": str(node["number"] * state["hosts"] + worker),
            "WORKERS": str(node["slices"] * state["hosts"]),
            "WORKER_PORT": str(node["port"]),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "false"),
        }

    def scp(self, where: str, positionals: list[str], state: dict) -> int:
        *files, target = positionals
        login, _, directory = target.partition(":")
        name = login.rpartition("@")[2]
        node = self.reachable(where, name, state)
        if isinstance(node, int):
            return node
        for worker in range(state["hosts"]):
            destination = self.home(worker, name) / directory
            if not destination.is_dir():
                return complain(where, f"[/usr/bin/scp] exited with return code [1]. {destination}: Is a directory")
            for file in files:
                new = destination / Path(file).name
                shutil.copyfile(file, new)  # not its times; the mode as scp does it
                new.chmod(Path(file).stat().st_mode & 0o777)
        return 0


def complain(where: str, message: str, code: int = 1) -> int:
    print(f"ERROR: ({where}) {message}", file=sys.stderr)
    return code


def missing(where: str, name: str) -> int:
    resource = f"projects/p/locations/z/nodes/{name}"
    return complain(where, f"NOT_FOUND: Resource '{resource}' was not found. This command is authenticated as somebody")


if __name__ == "__main__":
    sys.exit(StandIn(Path(os.environ[STATE])).main(sys.argv[1:]))
