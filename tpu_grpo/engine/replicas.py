"""The engines of a run: the sampler's devices are divided into replicas, each with its own scheduler, cache and mesh.

    replicas = Replicas.build(checkpoint, devices, tensor=2, options, hosts)   # 8 devices: 4 replicas of 2
    replicas.install_weights(weights)           # arrays on all replicas, as replicas.weight_specs says
    completions = replicas.generate(requests)   # all completions, on every host

For 8 devices on 2 hosts (4 each) and three groups of requests a, b, c with equal expected lengths:

    tensor 2    host 0: replicas 0 and 1 sample a and b     host 1: replica 2 samples c, replica 3 has nothing to do
    tensor 8    one replica over both hosts samples a, b and c, both hosts making the same decisions

A `Dealer` decides which replica serves which group (requests with one prompt). While any group waits to be started, all
replicas stop at synchronization points, after equally many decode steps. At a point, hosts exchange the loads of their
replicas, and each computes the same new assignment. Once no group waits, replicas inside one host run on without
waiting for other hosts; only with a `Cutoff` do all replicas keep stopping at the points. A single replica needs no
synchronization points. At the end, the hosts of each replica compare its decisions and tokens, and every host
receives all completions. Tokens do not depend on the assignment: see sampling.py.

If trainer and sampler are on different hosts, the trainer's hosts drive no replica, and wait for the completions.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tpu_grpo.config.plugins import addition
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.engine.exchange import exchange_completions, share_bytes
from tpu_grpo.engine.generation import Finished, advance_all
from tpu_grpo.engine.load_balancing import (
    Dealer,
    Load,
    divided_places,
    expected_tokens,
    make_groups,
    places_for,
    reporting_host,
    steps_between_points,
)
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.partial_rollouts import Cutoff
from tpu_grpo.engine.scheduler import EngineUse, total_use
from tpu_grpo.engine.turns import Conversations, Limits, Turns
from tpu_grpo.hosts import Hosts, devices_per_host, hosts_of, progress
from tpu_grpo.records.errors import ConfigError, LockstepError
from tpu_grpo.records.stages import Completion, Request

SECONDS = "seconds"
"""The name under which a host tells how long it sampled, among its figures."""
Served = tuple[str, dict[int, str], dict[int, tuple[int, int]], dict[str, float]]
"""What a host sends to all hosts after a batch: the digest of the assignment, the digest and (steps, clock) of each of
its replicas, and the metrics of its engines. A host without engines sends empty values."""
AtPoint = tuple[dict[int, Load], dict[int, int]]
"""What a host sends at a synchronization point: its replicas' loads, and the token counts of requests that ended."""


@dataclass(frozen=True)
class Replica:
    """Where an engine runs: its number, its devices, and the hosts that drive it."""

    number: int
    devices: tuple[Any, ...]
    hosts: tuple[int, ...]


def make_replicas(devices: Sequence[Any], tensor: int) -> tuple[Replica, ...]:
    """Divide devices, in order, into replicas of ``tensor`` devices, each inside one host or made of whole hosts. A
    device that is listed twice has two replicas, with ``tensor`` 1.

    Raises:
        ConfigError: if this is impossible; the message lists the sizes that fit.
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


def of_slice(replicas: Sequence[Replica], slices: int, own: int) -> Sequence[Replica]:
    """Return the replicas of slice ``own``; every slice has equally many, in order."""
    share = len(replicas) // slices
    return replicas[own * share : (own + 1) * share]


def replicated_specs(
    engine_specs: Mapping[str, jax.ShapeDtypeStruct], replicas: Sequence[Replica]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Extend the specs of one engine's parameters to all replicas, along the axis "data" of their mesh. Replicas on the
    same device use the same arrays."""
    placed = dict.fromkeys(replica.devices for replica in replicas)
    mesh = engine_mesh([device for devices in placed for device in devices], len(placed))
    return {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, _partition(spec)))
        for name, spec in engine_specs.items()
    }


class Replicas:
    """All replicas of a run; this process drives those that include one of its devices.

    ``described`` is an engine with the replicas' specs, for a process that drives no replica. ``synced`` are the
    replicas of this process's slice, to which the weight sync moves parameters; by default all.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        engines: Mapping[int, Engine],
        hosts: Hosts,
        described: Engine | None = None,
        synced: Sequence[Replica] = (),
    ):
        self.replicas = tuple(replicas)
        self._synced = synced or self.replicas
        self.engines = dict(engines)
        self.hosts = hosts
        self.drivers = tuple(sorted({host for replica in self.replicas for host in replica.hosts}))
        """The hosts that drive a replica, ascending."""
        self._like = described or next(iter(self.engines.values()))
        self.partners = {
            replica.number: hosts.among(replica.hosts)
            for replica in self.replicas
            if replica.number in self.engines and len(replica.hosts) > 1
        }
        """For each of this host's replicas that span several hosts, the hosts that drive it."""
        self.figures: dict[str, float] = {}
        """The metrics of the engines of the first replica's host in the last ``generate``, by name."""
        self.seconds = 0.0
        """The seconds that the slowest host sampled in the last ``generate``."""
        self.reporting_hosts: Sequence[int] = ()
        """For each request of the last ``generate``, the host that reported its completion."""

    @classmethod
    def build(
        cls,
        checkpoint: Path,
        devices: Sequence[Any],
        tensor: int,
        options: EngineOptions,
        hosts: Hosts,
        slices: tuple[int, int] = (1, 0),
    ) -> "Replicas":
        """Build this host's engines, without weights.

        ``checkpoint`` is a directory whose config.json describes the model. ``devices`` are the sampler's, host by
        host; a replica has ``tensor`` of them. ``slices`` is (number of slices, index of this process's slice).
        """
        replicas = make_replicas(devices, tensor)
        mine = [replica for replica in replicas if hosts.index in replica.hosts]
        engines, first = dict[int, Engine](), dict[tuple[Any, ...], Engine]()
        for replica in mine:
            engine = engines[replica.number] = Engine.build(checkpoint, engine_mesh(replica.devices), options)
            if (other := first.setdefault(replica.devices, engine)) is not engine:
                engine.share_device(other)
            if len(replica.hosts) > 1:
                engines[replica.number].before_every_launch(_launch_hook(replica.number))
        described = None if mine else Engine.build(checkpoint, engine_mesh(replicas[0].devices), options)
        return cls(replicas, engines, hosts, described, of_slice(replicas, *slices))

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape, dtype and sharding over all replicas of this host's slice of every parameter, by name."""
        return replicated_specs(self._like.weight_specs, self._synced)

    def check_every_launch(self) -> None:
        """Let the hosts that share a replica compare its digest before each of its launches."""
        for number, partners in self.partners.items():
            self.engines[number].before_every_launch(_launch_hook(number, partners))

    def install_weights(self, weights: Mapping[str, Array]) -> None:
        """Store the parameters to sample with. The arrays are replicated over the replicas, and each engine uses its
        own copy.

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
        """Return the largest difference between ``expected`` and the parameter ``name`` in this host's engines.

        ``expected`` is replicated over all replicas. NaN counts as an infinite difference. A host without engines
        returns 0.
        """
        gaps = [
            float(_largest_gap(engine.weights[name], _copy_on_engine(expected, engine, name)))
            for engine in self.engines.values()
        ]
        return float("inf") if any(np.isnan(gaps)) else max(gaps, default=0.0)

    def compile_all(self, tell: Callable[[], None] = lambda: None) -> int:
        """Compile every shape of every engine now, engines in parallel, and return the number of programs.

        Engines on the same device have the same programs. ``tell`` is called after each program, on any thread.
        """
        apart = {engine.mesh: engine for engine in self.engines.values()}.values()
        with ThreadPoolExecutor(max(1, len(apart))) as pool:
            return sum(pool.map(lambda engine: engine.compile_all(tell), apart))

    def generate(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        known: Sequence[float | None] | None = None,
        conversations: Conversations | None = None,
        make_cut: Callable[[], Cutoff] | None = None,
    ) -> list[Completion]:
        """Sample a completion for every request; every host passes the same requests and gets all completions.

        The arguments and errors are those of ``begin``.
        """
        return self.begin(requests, finished, known, conversations, make_cut)()

    def begin(
        self,
        requests: Sequence[Request],
        finished: Finished | None = None,
        known: Sequence[float | None] | None = None,
        conversations: Conversations | None = None,
        make_cut: Callable[[], Cutoff] | None = None,
    ) -> Callable[[], list[Completion]]:
        """Sample with this host's engines, and return a function with which all hosts exchange the completions.

        Only hosts with engines wait for each other before the exchange; a host without engines returns immediately.

        Args:
            requests: what to sample.
            finished: called with the index and the completion of each request as it ends, on one of the hosts that
                drive the request's replica.
            known: the expected number of tokens of each request (None: unknown); changes scheduling, not tokens.
            conversations: the requests' conversations with environments; None: no environments. Each host runs the
                conversations of the groups whose completions it reports.
            make_cut: makes the `Cutoff` of an engine, which stops its rows after L tokens or later.

        Raises:
            RequestError: if no engine can serve a request; raised before any starts, or when a later turn makes it.
            LockstepError: if hosts decided differently, or sampled differently in a replica that they share.
        """
        self._like.check(requests)
        started = time.perf_counter()
        served: Served = "", {}, {}, {}
        sent: dict[int, Completion] = {}
        if self.engines:
            before = total_use(engine.use for engine in self.engines.values())
            serving = Serving(self, requests, known, finished, conversations, make_cut)
            waited = serving.run()
            spent = total_use([waited, *(engine.use for engine in self.engines.values())]) - before
            figures = {**spent.figures, SECONDS: time.perf_counter() - started}
            if spent.steps:  # one thread drives the engines in turn
                figures["rollout/decode_step_seconds"] = len(self.engines) * spent.decode / spent.steps
            dealt = hashlib.sha256(json.dumps(serving.dealer.assigned).encode()).hexdigest()
            steps = {number: (g.steps, g.clock) for number, g in serving.generations.items()}
            digests = {number: engine.digest for number, engine in self.engines.items()}
            served, host_of = (dealt, digests, steps, figures), serving.dealer.reporting_hosts
            for generation in serving.generations.values():  # has only the conversations that this host reports
                sent |= {i: whole for i, whole in generation.completions.items() if host_of[i] == self.hosts.index}

        def exchange() -> list[Completion]:
            self.figures = self._compare(served)
            room = None
            if conversations is None:
                layout = self._like.expert_layout if any(request.return_experts for request in requests) else None
                room = share_bytes(requests, len(self.drivers), self._like.options.context_tokens, layout)
            completions, self.reporting_hosts = exchange_completions(sent, len(requests), self.hosts, room)
            return completions

        return exchange

    def _compare(self, served: Served) -> dict[str, float]:
        """Compare the assignments of all hosts with engines, and the digests of each replica's hosts.

        Returns the metrics of the first replica's host, with the idle share. All hosts see all digests, so if any of
        them differ, LockstepError is raised on all hosts.
        """
        answers = self.hosts.share("scheduling and tokens", served, Served)
        all_dealt, all_digests, all_steps, all_figures = zip(*answers, strict=True)
        _check_alike("deal requests alike", {host: all_dealt[host] for host in self.drivers})
        for replica in self.replicas:
            found = {host: all_digests[host].get(replica.number, "") for host in replica.hosts}
            _check_alike(f"schedule and sample alike in replica {replica.number}, which they share", found)
        steps = [all_steps[replica.hosts[0]].get(replica.number, (0, 0)) for replica in self.replicas]
        self.seconds = max(all_figures[host].pop(SECONDS, 0.0) for host in self.drivers)
        return {**all_figures[self.drivers[0]], **idle_share(steps)}


class Serving:
    """Serves a batch of requests with all replicas, from one synchronization point to the next.

    See ``Replicas.generate`` for the arguments; ``dealer.reporting_hosts`` names the host that reports each completion.
    """

    def __init__(
        self,
        replicas: Replicas,
        requests: Sequence[Request],
        known: Sequence[float | None] | None,
        finished: Finished | None = None,
        conversations: Conversations | None = None,
        make_cut: Callable[[], Cutoff] | None = None,
    ):
        self._hosts, self._finished = replicas.hosts.among(replicas.drivers), finished
        self._cuts = {number: make_cut() for number in replicas.engines} if make_cut is not None else {}
        """The `Cutoff` of each of this host's engines. It learns of other engines' rows only at synchronization points,
        so that no clock decides which rows an engine runs together."""
        self._drivers = [replica.hosts for replica in replicas.replicas]
        """For every replica the hosts that drive it; the first of them reports its load."""
        expected = expected_tokens(requests, known)
        like = next(iter(replicas.engines.values())).options
        self._as_answered = conversations is not None and like.tool_steps == 0
        """Whether rows return once they are answered; then no engine may wait for another at agreed points."""
        groups = make_groups(requests, expected, converse=conversations is not None)
        self._group_of = {index: group.number for group in groups for index in group.members}
        self.dealer = Dealer(groups, self._drivers)
        self._interval = steps_between_points(requests)
        shares = divided_places(None if conversations is None else conversations.places, self._drivers)
        self.generations = {
            number: engine.begin(
                requests,
                expected,
                self._turns(number, conversations, engine.limits(requests, expected, shares[number]), replicas),
                self._tell(number),
                self._cuts.get(number),
            )
            for number, engine in replicas.engines.items()
        }
        """The generations of this host's engines, by the replica's number."""
        places = places_for(requests, expected, like)
        self._loads = [
            Load(0, places if share is None else min(places, share * len(driven)))
            for share, driven in zip(shares, self._drivers, strict=True)
        ]

    def _turns(self, number: int, conversations: Conversations | None, limits: Limits, replicas: Replicas) -> Turns:
        if conversations is None:
            return Turns(limits)
        host_of, partners = functools.partial(self._reporting_host, number), replicas.partners.get(number)
        scheduler = addition("turn_scheduler").TurnScheduler
        return scheduler(conversations, limits, host_of=host_of, here=self._hosts.index, partners=partners)

    def run(self) -> EngineUse:
        """Sample all completions; returns the seconds in which no engine was ready, as `advance_all` does."""
        point, waited, generations = 0, EngineUse(), list(self.generations.values())
        while self._deal() or (self._tells_ends and (not point or any(load.rows or load.held for load in self._loads))):
            point += self._interval
            waited = total_use([waited, advance_all(generations, point)])
            self._loads = self._gather(point)
        return total_use([waited, advance_all(generations)])

    def _deal(self) -> bool:
        """Deal the groups that have not been started; returns whether to deal again at a synchronization point."""
        dealt = self.dealer.deal(self._loads)
        for number, generation in self.generations.items():
            generation.hold(dealt[number])
        return self.dealer.waits and len(self._drivers) > 1 and not self._as_answered

    @property
    def _tells_ends(self) -> bool:
        """Whether engines tell each other, at synchronization points, which requests have ended."""
        return bool(self._cuts) and len(self._drivers) > 1

    def _gather(self, point: int) -> list[Load]:
        """Share the loads of this host's replicas at a synchronization point, and return the loads of all replicas."""

        def read(host: int, answer: AtPoint) -> AtPoint:
            if answer[0].keys() != (driven := {n for n, drivers in enumerate(self._drivers) if host in drivers}):
                raise ValueError(f"host {host} drives the replicas {driven}, got {answer[0].keys()}")
            if not answer[1].keys() <= self._group_of.keys():
                raise ValueError(f"host {host} tells of requests that there are not: {answer[1].keys()}")
            return answer

        mine = {number: generation.pause(point) for number, generation in self.generations.items()}
        ends = {index: tokens for cut in self._cuts.values() for index, tokens in cut.untold().items()}
        answers = self._hosts.share("what replicas have to do", (mine, ends), AtPoint, read)
        for cut in self._cuts.values():
            for _, others in answers:
                cut.merge(others)
        everyone = dict(zip(self._hosts.members, answers, strict=True))
        return [everyone[drivers[0]][0][number] for number, drivers in enumerate(self._drivers)]

    def _tell(self, number: int) -> Finished | None:
        """Make the callback for a replica's completions; it passes on only those that this host reports."""
        if (finished := self._finished) is None:
            return None

        def tell(index: int, completion: Completion) -> None:
            if self._reporting_host(number, index) == self._hosts.index:
                finished(index, completion)

        return tell

    def _reporting_host(self, number: int, index: int) -> int:
        """Return the host that reports a request's completion if this replica serves the request."""
        return reporting_host(self._group_of[index], self._drivers[number], len(self._drivers))


def _check_alike(what: str, found: Mapping[int, str]) -> None:
    if len(set(found.values())) > 1:
        raise LockstepError(
            f"hosts {', '.join(map(str, found))} must {what}, got "
            f"{', '.join(f'{digest[:12]} on host {host}' for host, digest in found.items())}; set "
            "hosts.check=step to find the first step that differs"
        )


def _launch_hook(number: int, partners: Hosts | None = None) -> Callable[[int, str], None]:
    """Make the callback that runs before each launch of a replica that spans hosts.

    The callback records the launch as progress, from which hosts detect lost hosts, and compares digests with
    ``partners``.
    """

    def note(launch: int, digest: str) -> None:
        progress.note(f"replica {number}", launch, digest)
        if partners is not None:
            partners.agree(f"scheduling of launch {launch} of replica {number}", digest)

    return note


@jax.jit
def _largest_gap(held: Array, expected: Array) -> Array:
    return jnp.abs(held.astype(jnp.float32) - expected.astype(jnp.float32)).max()


def _partition(spec: jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(spec.sharding, NamedSharding)
    return spec.sharding.spec


def _copy_on_engine(array: Array, engine: Engine, name: str) -> Array:
    """Take the copy of a parameter that lies on an engine's devices, without moving anything."""
    if name not in engine.weight_specs:
        return array  # unknown: the engine will raise
    devices = list(engine.mesh.devices.flat)
    if array.sharding.device_set == set(devices):
        return array
    on = {shard.device: shard.data for shard in array.addressable_shards}
    sharding = NamedSharding(engine.mesh, _partition(engine.weight_specs[name]))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [on[d] for d in devices if d in on])


def idle_share(steps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return, as a metric, the share of decode time in which replicas were idle while another worked.

    ``steps`` has each replica's decode steps, and its clock at the end. Time is counted in decode steps, up to
    the latest of these clocks. The result is empty for a single replica, or if no replica made a decode step.
    """
    end = max(clock for _, clock in steps)
    if len(steps) == 1 or not end:
        return {}
    return {"rollout/idle_share": 1 - sum(count for count, _ in steps) / (len(steps) * end)}
