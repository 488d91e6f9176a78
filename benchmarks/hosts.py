"""Measures the cost of several hosts: python -m benchmarks.hosts [--rounds N] [--passes N] [--protocol HOSTS...]

Four CPU devices are spread over 1, 2 and 4 processes of this machine. On them is one model (4-layer, 256-wide Qwen3,
random weights, float32) in replicas of tensor 1, 2 and 4 devices. Processes of one group sample the same workload (8
prompts of 30 tokens x 8 samples x 32 tokens) in replicas of each size in turn, round after round; groups of processes
take turns, pass after pass. Shown are medians over all rounds.

    tokens/s   of a whole rollout, completions gathered on every host included
    checked    the same with hosts.check=step: the hosts of a replica compare before every step of their engine
    agree      milliseconds of one agreement of all hosts, through the coordination service
    gather     milliseconds of exchanging the completions of a rollout

With --protocol 2 4 8 16 nothing is sampled. The given numbers of hosts, which are threads of one process with a client
of the coordination service each, agree on a digest and gather 1 KiB from each host. Shown is what one such exchange
sends through host 0's service: requests and bytes of keys and values, of one host and of all hosts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # otherwise the service logs every client

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tpu_grpo.engine.replicas import Replicas
    from tpu_grpo.hosts import Hosts

DEVICES = 4
PROCESSES = (1, 2, 4)
TENSORS = (1, 2, 4)
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 30, 32
Figures = dict[str, list[float]]
"""Name of a measurement -> its values."""


def work(arguments: list[str]) -> None:
    """Measure in one process of a group; host 0 prints the figures as JSON."""
    own = dict(word.split("=", 1) for word in arguments if "=" in word)
    from tpu_grpo.hosts import start

    hosts = start(own["hosts.coordinator"], int(own["hosts.count"]), int(own["hosts.index"]))
    contenders = build_contenders(Path(own["model"]), hosts)
    figures: Figures = {name: [] for name in contenders}
    for number in range(int(own["rounds"]) + 1):
        for name, replicas in contenders.items():
            speed = rollout(replicas, number)
            if number:  # the first round is not counted
                figures[name].append(speed)
    table = np.zeros((PROMPTS * GROUP // hosts.count, 3 + 2 * NEW_TOKENS), np.int32)
    figures["agree"] = milliseconds(lambda: hosts.agree("a digest", "0" * 64), times=100)
    figures["gather"] = milliseconds(lambda: hosts.gather_array("completions", table), times=30)
    hosts.barrier("the end")
    if hosts.is_first:
        print(json.dumps(figures), flush=True)


def build_contenders(directory: Path, hosts: "Hosts") -> "dict[str, Replicas]":
    """Build and compile replicas of each size, and replicas with hosts.check=step of the sizes that span hosts."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import Mesh

    from tests.engine.building import engine_options
    from tpu_grpo.engine.replicas import Replicas
    from tpu_grpo.hosts import by_host
    from tpu_grpo.models.checkpoint import read_checkpoint
    from tpu_grpo.models.tunix_model import load_model
    from tpu_grpo.weights.plan import named_leaves
    from tpu_grpo.weights.sync import WeightSync

    devices, checkpoint = by_host(jax.devices()), read_checkpoint(directory)
    mesh = Mesh(np.asarray(devices).reshape(DEVICES, 1), ("fsdp", "tp"))
    leaves = named_leaves(nnx.state(load_model(checkpoint, mesh, dtype=jnp.float32, remat="none"), nnx.Param))

    def build(tensor: int, *, checked: bool = False) -> Replicas:
        options = engine_options(
            context_tokens=PROMPT_TOKENS + NEW_TOKENS,
            max_running_requests=-(-PROMPTS // (DEVICES // tensor)) * GROUP,
            prefill_tokens=256,
        )
        replicas = Replicas.build(directory, devices, tensor, options, hosts)
        replicas.install_weights(WeightSync(checkpoint.weight_rules, leaves, replicas.weight_specs)(leaves)[0])
        if checked:
            replicas.check_every_launch()
        replicas.compile_all()
        return replicas

    spanning = [tensor for tensor in TENSORS if tensor > DEVICES // hosts.count]
    plain = {f"tensor {tensor}": build(tensor) for tensor in TENSORS}
    return plain | {f"tensor {tensor} checked": build(tensor, checked=True) for tensor in spanning}


def rollout(replicas: "Replicas", number: int) -> float:
    """Clear the prefix cache, and sample the workload of a round; returns tokens per second."""
    from tpu_grpo.records.stages import Request, SampleKey, SamplingParams

    replicas.forget_prefixes()
    requests = [
        Request(
            tuple(range(10 + prompt, 10 + prompt + PROMPT_TOKENS)),
            SamplingParams(NEW_TOKENS, ignore_stop=True),
            SampleKey(0, number, prompt, sample),
        )
        for prompt in range(PROMPTS)
        for sample in range(GROUP)
    ]
    began = time.perf_counter()
    tokens = sum(len(completion.token_ids) for completion in replicas.generate(requests))
    return tokens / (time.perf_counter() - began)


def milliseconds(call: Callable[[], object], times: int) -> list[float]:
    """Return the milliseconds of each of ``times`` calls, after one call that is not counted."""
    call()
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - began))
    return spent


class CountedClient:
    """A client of the coordination service that counts its requests, and the bytes of keys and values."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.requests = self.bytes = 0

    def _count(self, *sent: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, sent))

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        self._count(key, value)
        self._client.key_value_set_bytes(key, value, allow_overwrite=allow_overwrite)

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        found = self._client.blocking_key_value_get_bytes(key, milliseconds)
        self._count(key, found)
        return found

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        found = self._client.key_value_dir_get_bytes(key)
        self._count(key, *(part for pair in found for part in pair))
        return found

    def key_value_delete(self, key: str) -> None:
        self._count(key)
        self._client.key_value_delete(key)


def protocol(counts: Sequence[int], times: int = 20) -> Table:
    """For each count, let that many hosts (threads) exchange values; returns a table of time, requests and bytes."""
    from tests.hosts.processes import free_port
    from tpu_grpo.hosts import Hosts
    from tpu_grpo.hosts.coordination_service import Service, _client, _service

    columns = ("ms", "requests a host", "requests of all", "KiB a host", "KiB of all")
    table = Table("hosts", "exchange", *columns, title="one exchange through the coordination service")
    for count in counts:
        address = f"127.0.0.1:{free_port()}"
        service = _service(address, count, 60)
        made = [_client(address, index, 60) for index in range(count)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda client: client.connect(), made))
            clients = [CountedClient(client) for client in made]
            hosts = [Hosts(index, count, Service(client, b"a key")) for index, client in enumerate(clients)]
            list(threads.map(lambda host: host.barrier("the start"), hosts))
            for name, size in (("an agreement on a digest", 64), ("a gather of 1 KiB", 1024)):
                before = [(client.requests, client.bytes) for client in clients]
                began = time.perf_counter()
                for _ in range(times):
                    list(threads.map(lambda host, size=size: host.gather("a value", b"x" * size), hosts))
                spent = 1e3 * (time.perf_counter() - began) / times
                requests, sent = (
                    sum(now - old[place] for now, old in zip(figures, before, strict=True)) / times
                    for place, figures in enumerate(([c.requests for c in clients], [c.bytes for c in clients]))
                )
                kib = sent / 1024
                shown = (spent, requests / count, requests, kib / count, kib)
                table.add_row(str(count), name, *(f"{value:,.1f}" for value in shown))
            list(threads.map(lambda client: client.shutdown(), made))
        service.shutdown()
    return table


def measure(model: Path, processes: int, rounds: int) -> Figures:
    """Run one group of processes; returns host 0's figures."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "local_hosts.py"
    command = [sys.executable, str(script), "--hosts", str(processes)]
    command += ["--devices-per-host", str(DEVICES // processes)]
    command += ["--command", f"{sys.executable} -m benchmarks.hosts --work", "--", f"model={model}", f"rounds={rounds}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{processes} processes ended with {done.returncode}: {done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("[0] {"))
    return json.loads(line.removeprefix("[0] "))


def main() -> None:
    """Measure every group of processes in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="per pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--protocol", type=int, nargs="+", help="numbers of hosts whose exchanges alone are measured")
    options = parser.parse_args()
    if options.protocol:
        Console(width=120).print(protocol(options.protocol))
        return
    from tests.models.random_checkpoint import write_random_qwen3

    found: dict[int, Figures] = {processes: {} for processes in PROCESSES}
    with tempfile.TemporaryDirectory() as temporary:
        model = write_random_qwen3(
            Path(temporary) / "model",
            layers=4,
            hidden=256,
            heads=8,
            kv_heads=4,
            head_dim=32,
            intermediate=768,
            vocab=512,
        )
        for _ in range(options.passes):
            for processes in PROCESSES:
                for name, values in measure(model, processes, options.rounds).items():
                    found[processes].setdefault(name, []).extend(values)
    Console(width=120).print(report(found))


def report(found: dict[int, Figures]) -> Table:
    """Return a table of medians, with a row per measurement and a column per number of processes."""
    table = Table("", *(f"{count} x {DEVICES // count}" for count in found), title="processes x devices of each")
    names = dict.fromkeys(name for figures in found.values() for name in figures)
    for name in sorted(names, key=lambda name: (not name.startswith("tensor"), name)):
        unit = "tokens/s" if name.startswith("tensor") else "ms"
        values = [figures.get(name) for figures in found.values()]
        table.add_row(f"{name}, {unit}", *("" if value is None else f"{median(value):,.2f}" for value in values))
    return table


if __name__ == "__main__":
    if "--work" in sys.argv:
        work(sys.argv)
    else:
        main()
