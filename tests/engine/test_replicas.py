"""Replicas on four devices: how devices are divided, and that it changes no token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.engine.building import CONTEXT, PROMPTS, build_replicas, engine_options, install, requests, tokens
from tpu_grpo.engine.load_balancing import Group
from tpu_grpo.engine.replicas import Replica, Replicas, idle_share, make_replicas
from tpu_grpo.engine.scheduler import EngineUse
from tpu_grpo.engine.turns import Limits
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.process_metrics import CompilationCounter
from tpu_grpo.records.errors import ConfigError, RequestError
from tpu_grpo.records.stages import Completion, Request, SamplingParams

OPTIONS = engine_options()


def slice_of(hosts: int, per_host: int) -> list[Any]:
    """Devices of several hosts, of which only number and host are read."""
    numbers = range(hosts * per_host)
    return [SimpleNamespace(id=number, process_index=number // per_host) for number in numbers]


# --- dividing devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "hosts"),
    [
        (1, [(0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,)]),
        (2, [(0,), (0,), (1,), (1,)]),
        (4, [(0,), (1,)]),
        (8, [(0, 1)]),
    ],
)
def test_replicas_lie_inside_hosts_or_over_whole_hosts(tensor: int, hosts: list[tuple[int, ...]]) -> None:
    replicas = make_replicas(slice_of(2, 4), tensor)
    assert [replica.hosts for replica in replicas] == hosts
    assert [replica.number for replica in replicas] == list(range(8 // tensor))
    assert [device.id for replica in replicas for device in replica.devices] == list(range(8))


@pytest.mark.parametrize("tensor", [3, 5, 6, 16])
def test_a_size_that_cuts_hosts_otherwise_is_refused_with_those_that_do_not(tensor: int) -> None:
    with pytest.raises(ConfigError, match=rf"must divide the 4 devices.*8 devices, got {tensor}; use one of \[1, 2, 4"):
        make_replicas(slice_of(2, 4), tensor)


def test_three_hosts_of_two_make_no_replica_of_two_hosts() -> None:
    with pytest.raises(ConfigError, match=r"got 4; use one of \[1, 2, 6\]"):
        make_replicas(slice_of(3, 2), 4)


# --- what replicas did ----------------------------------------------------------------------------------------------


def test_idle_shares_count_decode_steps_up_to_the_latest_end() -> None:
    """The second replica worked 30 of 60 steps, the third had nothing to do in 10 of its first 40."""
    assert idle_share([(60, 60), (30, 30), (30, 40)]) == {"rollout/idle_share": 1 - 120 / 180}
    assert idle_share([(5, 5), (5, 5)]) == {"rollout/idle_share": 0.0}
    assert idle_share([(5, 5)]) == idle_share([(0, 0), (0, 0)]) == {}


# --- real engines ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_replica_tokens(checkpoint: Path, model: nnx.Module) -> list[list[int]]:
    return tokens(build_replicas(checkpoint, model, 4)[0].generate(requests(group=4)))


@pytest.mark.slow  # what is expected and what waits changes the assignment, too, below
@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_do_not_depend_on_the_assignment(
    checkpoint: Path, model: nnx.Module, one_replica_tokens: list[list[int]], tensor: int
) -> None:
    replicas, weights = build_replicas(checkpoint, model, tensor)
    assert len(replicas.engines) == 4 // tensor
    told: list[tuple[int, list[int]]] = []
    found = replicas.generate(requests(group=4), lambda index, ended: told.append((index, ended.token_ids.tolist())))
    assert tokens(found) == one_replica_tokens
    assert sorted(told) == list(enumerate(one_replica_tokens))  # each once, with its own tokens
    assert tokens(replicas.generate(requests(group=4)[::-1])) == one_replica_tokens[::-1]
    assert len({engine.digest for engine in replicas.engines.values()}) == 4 // tensor  # each did something else
    for engine in replicas.engines.values():  # one sync reached all, and no replica holds a copy of its copy
        assert list(engine.weights) == list(engine.weight_specs)
        for name, weight in engine.weights.items():
            there = {s.device: s.data.unsafe_buffer_pointer() for s in weights[name].addressable_shards}
            for shard in weight.addressable_shards:
                assert shard.data.unsafe_buffer_pointer() == there[shard.device], name


@pytest.mark.slow  # test_engine.py changes the schedule of one replica
def test_tokens_do_not_depend_on_what_is_expected_nor_on_what_waits(checkpoint: Path, model: nnx.Module) -> None:
    """Eight groups of two; two replicas with four places each, so that groups wait and are dealt again."""
    prompts = [tuple(range(10 * p, 10 * p + 9)) for p in range(1, 9)]
    asked = [
        replace(request, sampling=SamplingParams(4 + 9 * (i // 2), ignore_stop=True))
        for i, request in enumerate(requests(prompts, group=2))
    ]
    options = replace(OPTIONS, max_running_requests=4, batch_paddings=None)
    replicas, _ = build_replicas(checkpoint, model, 2, options)
    known = [float(request.sampling.max_new_tokens) for request in asked]
    blind = replicas.generate(asked)
    assert [len(completion.token_ids) for completion in blind] == known
    assert sorted({*replicas.reporting_hosts}) == [0]
    assert tokens(replicas.generate(asked, None, known)) == tokens(blind)
    assert 0 <= replicas.figures["rollout/idle_share"] < 0.2
    half = [value if i % 4 < 2 else None for i, value in enumerate(known)]
    assert tokens(replicas.generate(asked, None, half)) == tokens(blind)


def test_two_engines_on_one_device_share_weights_and_programs(checkpoint: Path, model: nnx.Module) -> None:
    options = replace(OPTIONS, prefill_tokens=64)
    one, _ = build_replicas(checkpoint, model, 1, options, 1)
    two = Replicas.build(checkpoint, jax.devices()[:1] * 2, 1, options, Hosts())
    installed = install(two, model, checkpoint)
    first, second = two.engines.values()
    assert all(first.weights[name] is second.weights[name] is array for name, array in installed.items())
    assert two.compile_all() == len(options.shapes.batch) + len(options.shapes.prefill)
    with CompilationCounter() as compilations:
        found = two.generate(requests(group=4))
    assert compilations.count == 0
    assert tokens(found) == tokens(one.generate(requests(group=4)))
    assert min(engine.use.steps for engine in two.engines.values()) > 0


def test_a_request_nobody_can_serve_is_refused_with_its_place_in_the_batch(checkpoint: Path, model: nnx.Module) -> None:
    replicas, _ = build_replicas(checkpoint, model, 4)
    asked = requests()
    asked[2] = Request(PROMPTS[0], SamplingParams(CONTEXT), asked[2].key)
    with pytest.raises(RequestError, match="request 2: 10 prompt tokens"):
        replicas.generate(asked)


# --- replicas work at the same time ----------------------------------------------------------------------------------


class RecordingEngine:
    """An engine of two launches that notes what it is asked; ``slow`` looks find its devices still at the first."""

    use = EngineUse()
    options, digest = OPTIONS, ""

    def __init__(self, name: str, log: list[str], slow: int = 0):
        self._name, self._log, self._slow = name, log, slow

    def check(self, asked: Sequence[Request]) -> None:
        del asked

    def limits(self, asked: Sequence[Request], expected: Sequence[int], places: int | None = None) -> Limits:
        del asked, expected
        return Limits(tool_steps=self.options.tool_steps, places=places)

    def begin(self, asked: Sequence[Request], expected: Sequence[int], turns: Any, finished: Any, cut: Any) -> Any:
        del asked, expected, finished, cut
        assert not turns.converses
        return RecordingGeneration(self._name, self._log, self._slow)


class RecordingGeneration:
    steps = clock = 0

    def __init__(self, name: str, log: list[str], slow: int):
        self._name, self._log, self._slow = name, log, slow
        self._steps = ["launch 1", "collect 1, launch 2", "collect 2"]

    def hold(self, groups: Sequence[Group]) -> None:
        token = np.zeros(1, np.int32), np.zeros(1, np.float32)
        self.completions = {index: Completion(*token, "stop", 0) for group in groups for index in group.members}

    @property
    def ready(self) -> bool:
        waits = len(self._steps) == 2 and self._slow > 0
        self._slow -= waits
        return not waits

    @property
    def computing(self) -> bool:
        return True

    def advance(self, until: int | None, *, wait: bool = True) -> bool:
        del wait  # for environments
        assert until is None, "all requests fit at once, so that nothing is dealt later"
        step = self._steps.pop(0)
        self._log.append(f"{self._name} {step}")
        return "launch" in step


@pytest.mark.parametrize(
    ("slow", "order"),
    [
        (0, "a launch 1; b launch 1; a collect 1, launch 2; b collect 1, launch 2; a collect 2; b collect 2"),
        (9, "a launch 1; b launch 1; b collect 1, launch 2; b collect 2; a collect 1, launch 2; a collect 2"),
    ],
)
def test_replicas_of_one_process_overlap_and_do_not_wait_for_each_other(slow: int, order: str) -> None:
    """Every replica has a launch under way while the others' tokens are taken in; a slow one holds up none."""
    log: list[str] = []
    engines: Any = {0: RecordingEngine("a", log, slow), 1: RecordingEngine("b", log)}
    replicas = Replicas([Replica(0, (), (0,)), Replica(1, (), (0,))], engines, Hosts())
    assert len(replicas.generate(requests())) == len(PROMPTS)
    assert log == order.split("; ")
