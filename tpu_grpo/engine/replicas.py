"""The engines of a run: the sampler's devices are divided into replicas, each with its own scheduler, cache and mesh.

    replicas = Replicas.build(checkpoint, devices, tensor=2, options, hosts)   # 8 devices: 4 replicas of 2
    replicas.install_weights(weights)           # arrays on all replicas, as replicas.weight_specs says
    completions = replicas.generate(requests)   # all of them, on every host

For 8 devices on 2 hosts (4 each) and three groups of requests a, b, c, all expected to be as long:

    tensor 2    host 0: replicas 0 and 1 sample a and b     host 1: replica 2 samples c, replica 3 has nothing to do
    tensor 8    one replica over both hosts samples a, b and c, both hosts making the same decisions

Which replica serves what: see dealing.py. A replica inside one host waits for no other host while it samples, but where
groups are dealt at agreed points. Afterwards the hosts that drive one replica together compare what it decided and
sampled, and every host receives the whole batch. Tokens do not depend on which replica serves a request: see
sampling.py.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from tpu_grpo.engine.conversing import Conversations
from tpu_grpo.engine.engine import Engine, engine_mesh, partition_spec
from tpu_grpo.engine.exchange import Exchange, exchange_conversations
from tpu_grpo.engine.generation import Finished
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.serving import Served, Serving
from tpu_grpo.engine.use import EngineUse, total_use
from tpu_grpo.hosts import Hosts, devices_per_host, hosts_of, progress
from tpu_grpo.records.errors import ConfigError, LockstepError
from tpu_grpo.records.stages import Completion, Request


@dataclass(frozen=True)
class Replica:
    """Where an engine runs: its number, its devices, and the hosts that drive it."""

    number: int
    devices: tuple[Any, ...]
    hosts: tuple[int, ...]


def make_replicas(devices: Sequence[Any], tensor: int) -> tuple[Replica, ...]:
    """Divide devices, in order, into replicas of ``tensor`` devices, each inside one host or over whole hosts.

    Raises:
        ConfigError: if ``tensor`` allows neither; it lists the sizes that do.
    """
    per_host, total = devices_per_host(devices), len(devices)
    fitting = [t for t in range(1, total + 1) if total % t == 0 and (per_host % t == 0 or t % per_host == 0)]
    if tensor not in fitting:
        raise ConfigError(
            f"meshes.sampler.tensor must divide the {per_host} devices of a host, or be whole hosts of the {total} "
            f"devices, got {tensor}; use one of {fitting}"
        )
    parts = [tuple(devices[start : start + tensor]) for start in range(0, total, tensor)]
    return tuple(Replica(number, part, hosts_of(part)) for number, part in enumerate(parts))


def replicated_specs(
    engine_specs: Mapping[str, jax.ShapeDtypeStruct], replicas: Sequence[Replica]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Extend the specs of one engine's parameters to all replicas, over which the axis "data" of their mesh runs."""
    mesh = engine_mesh([device for replica in replicas for device in replica.devices], len(replicas))
    return {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, partition_spec(spec)))
        for name, spec in engine_specs.items()
    }


class Replicas:
    """All replicas of a run; this process drives those that include one of its devices."""

    def __init__(self, replicas: Sequence[Replica], engines: Mapping[int, Engine], hosts: Hosts):
        self.replicas = tuple(replicas)
        self.engines = dict(engines)
        self._hosts = hosts
        self._partners = {
            replica.number: hosts.among(replica.hosts)
            for replica in self.replicas
            if replica.number in self.engines and len(replica.hosts) > 1
        }
        self.figures: Mapping[str, float] = {}
        """What the last ``generate`` took of this host's engines, under the metrics' names."""
        self.told: Sequence[int] = ()
        """The host that was told of the end of each request of the last ``generate``."""

    @classmethod
    def build(
        cls, checkpoint: Path, devices: Sequence[Any], tensor: int, options: EngineOptions, hosts: Hosts
    ) -> "Replicas":
        """Build this host's engines.

        Args:
            checkpoint: directory whose config.json describes the model; no weights are read.
            devices: the sampler's devices, host by host.
            tensor: number of devices of a replica.
            options: sizes and settings of every engine.
            hosts: the processes of the run.
        """
        replicas = make_replicas(devices, tensor)
        mine = [replica for replica in replicas if hosts.index in replica.hosts]
        engines = {r.number: Engine.build(checkpoint, engine_mesh(r.devices), options) for r in mine}
        for replica in mine:
            if len(replica.hosts) > 1:
                engines[replica.number].before_every_launch(_launch_hook(replica.number))
        return cls(replicas, engines, hosts)

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding over all replicas of every parameter, by name."""
        return replicated_specs(next(iter(self.engines.values())).weight_specs, self.replicas)

    @property
    def digests(self) -> dict[int, str]:
        """The digest of decisions and tokens of each replica that this host drives, by the replica's number."""
        return {number: engine.digest for number, engine in self.engines.items()}

    def check_every_launch(self) -> None:
        """Let hosts that drive a replica together compare its digest before each of its launches."""
        for number, partners in self._partners.items():
            self.engines[number].before_every_launch(_launch_hook(number, partners))

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Sample with these parameters from now on. They lie on all replicas, and each engine takes its copy as it is.

        Raises:
            WeightsError: if names, shapes or types are not those of ``weight_specs``.
        """
        for engine in self.engines.values():
            engine.install_weights({name: _copy_on_engine(array, engine, name) for name, array in weights.items()})

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values."""
        for engine in self.engines.values():
            engine.forget_prefixes()

    def release(self) -> None:
        """Free all caches and drop the parameters until ``install_weights``."""
        for engine in self.engines.values():
            engine.release()

    def differs_by(self, name: str, expected: Array) -> float:
        """Return the largest difference between ``expected`` and the parameter in this host's engines.

        ``expected`` lies on all replicas. A NaN counts as an infinite difference.
        """
        gaps = [
            float(_largest_gap(engine.weights[name], _copy_on_engine(expected, engine, name)))
            for engine in self.engines.values()
        ]
        return float("inf") if any(np.isnan(gaps)) else max(gaps)

    def compile_all(self, tell: Callable[[], None] = lambda: None) -> int:
        """Compile every shape of every engine now, engines in parallel, and return the number of programs.

        ``tell`` is called after each, by any thread.
        """
        with ThreadPoolExecutor(len(self.engines)) as pool:
            return sum(pool.map(lambda engine: engine.compile_all(tell), self.engines.values()))

    def generate(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        known: Sequence[float | None] | None = None,
        conversations: Conversations | None = None,
    ) -> list[Completion]:
        """Sample a completion for every request; every host passes the same requests and gets all completions.

        Args:
            requests: what to sample.
            finished: is called with the index and the completion of each request as it ends, on one host: one of those
                that drive the replica which serves it.
            known: the tokens that are expected of each request, where something is known; no token depends on them.
            conversations: those of the requests, if their answers are conversations. A host is asked for those of the
                groups that it is told of.

        Raises:
            RequestError: if no engine can ever serve one of them; none is started then. In the middle, if a turn is
                more than an engine can serve.
            LockstepError: if hosts decided differently, or sampled differently in a replica that they share.
        """
        next(iter(self.engines.values())).check(requests)
        before, drivers = self._use(), [replica.hosts for replica in self.replicas]
        serving = Serving(requests, known, self.engines, drivers, self._hosts, finished, conversations, self._partners)
        served = serving.run()
        self.told, spent, waited = served.told, self._use() - before, served.waited
        spent = replace(spent, wait=spent.wait + waited.devices, environments=spent.environments + waited.environments)
        self.figures = {**spent.figures, **self._compare(served)}
        if conversations is not None:
            return exchange_conversations(served.completions, len(requests), self._hosts)
        return self._exchange(served, requests)

    def _use(self) -> EngineUse:
        return total_use(engine.use for engine in self.engines.values())

    def _compare(self, served: Served) -> dict[str, float]:
        """Check that hosts dealt alike, and decided and sampled alike in the replicas they share; returns idle shares.

        All hosts take part, so all raise.
        """
        dealt = hashlib.sha256(json.dumps(served.assigned).encode()).hexdigest()
        mine = {"dealt": dealt, "digests": self.digests, "steps": served.steps}
        answers = self._hosts.gather("scheduling and tokens", json.dumps(mine).encode())
        everyone = [json.loads(part) for part in answers]
        self._check_alike("deal requests alike", dict(enumerate(answer["dealt"] for answer in everyone)))
        for replica in self.replicas:
            found = {host: everyone[host]["digests"][str(replica.number)] for host in replica.hosts}
            what = f"schedule and sample alike in replica {replica.number}, which they share"
            self._check_alike(what, found)
        steps = [everyone[replica.hosts[0]]["steps"][str(replica.number)] for replica in self.replicas]
        return idle_share(steps)

    def _check_alike(self, what: str, found: Mapping[int, str]) -> None:
        if len(set(found.values())) > 1:
            raise LockstepError(
                f"hosts {', '.join(map(str, found))} must {what}, got "
                f"{', '.join(f'{digest[:12]} on host {host}' for host, digest in found.items())}; set "
                "hosts.check=step to find the first step that differs"
            )

    def _exchange(self, served: Served, requests: Sequence[Request]) -> list[Completion]:
        """Gather the completions of all replicas; the first host that drives a replica sends its completions."""
        own = served.completions
        if self._hosts.count == 1:
            return [own[index] for index in range(len(requests))]
        engine, senders = next(iter(self.engines.values())), [replica.hosts[0] for replica in self.replicas]
        exchange = Exchange(requests, served.assigned, senders, self._hosts, engine.options.filtered)
        completions = exchange.completions(own)
        if any(request.return_experts for request in requests):
            assert engine.expert_layout is not None, "Engine.check refuses such a request"
            completions = exchange.with_experts(completions, own, engine.expert_layout, engine.options.context_tokens)
        return completions


def _launch_hook(number: int, partners: Hosts | None = None) -> Callable[[int, str], None]:
    """Make the call before each launch of a replica that spans hosts.

    It notes the launch for the watch over lost hosts, and compares its digest with those of ``partners``, if given.
    """

    def note(launch: int, digest: str) -> None:
        progress.note(f"replica {number}", launch, digest)
        if partners is not None:
            partners.agree(f"scheduling of launch {launch} of replica {number}", digest)

    return note


@jax.jit
def _largest_gap(held: Array, expected: Array) -> Array:
    return jnp.abs(held.astype(jnp.float32) - expected.astype(jnp.float32)).max()


def _copy_on_engine(array: Array, engine: Engine, name: str) -> Array:
    """Take the copy of a parameter that lies on an engine's devices, without moving anything."""
    if name not in engine.weight_specs:
        return array  # unknown: the engine will raise
    devices = list(engine.mesh.devices.flat)
    if array.sharding.device_set == set(devices):
        return array
    on = {shard.device: shard.data for shard in array.addressable_shards}
    sharding = NamedSharding(engine.mesh, partition_spec(engine.weight_specs[name]))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [on[d] for d in devices if d in on])


def idle_share(steps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the share of their time in which replicas had nothing to do while another worked, as a metric.

    Args:
        steps: for every replica its decode steps, and its clock at the end. Time is counted in decode steps, up to the
            latest end. Nothing is returned for one replica, or if nobody made a decode step.
    """
    end = max(clock for _, clock in steps)
    if len(steps) == 1 or not end:
        return {}
    return {"rollout/idle_share": 1 - sum(count for count, _ in steps) / (len(steps) * end)}
