"""The experts that an engine returns, against a float64 router in NumPy, under every way that a token is computed."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flax import nnx
from sgl_jax.srt.managers.schedule_batch import global_config

from tests.engine.building import SAMPLED, build_engine, engine_options, install, policy, requests
from tests.engine.test_replicas import build
from tests.models.random_checkpoint import write_random
from tests.models.reference import reference_experts
from tpu_grpo.engine.exchange import Exchange
from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.records.errors import RequestError
from tpu_grpo.records.stages import Completion, Request, routing_dtype

SMALL = {"batch_paddings": (8,), "prefill_tokens": 64, "return_experts": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 experts, 3 for a token."""
    return write_random("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", scale=0.3)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nnx.Module:
    return policy(checkpoint)


def asking(group: int = 3, **sampling: Any) -> list[Request]:
    return [replace(r, return_experts=True) for r in requests(sampling=replace(SAMPLED, **sampling), group=group)]


def sets(experts: np.ndarray) -> np.ndarray:
    return np.sort(experts, axis=-1)


def check_experts(checkpoint: Path, asked: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Every token that was computed has the experts of the float64 router, and the last sampled one has none."""
    for request, completion in zip(asked, completions, strict=True):
        ids = [*request.token_ids, *completion.token_ids][:-1]
        assert completion.experts is not None
        assert completion.experts.dtype == np.uint8
        np.testing.assert_array_equal(sets(completion.experts), sets(reference_experts(checkpoint, np.array([ids]))[0]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"prefill_tokens": 16, "page_size": 4},  # prompts of 37 and 31 tokens are cut
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
        pytest.param({"page_size": 16, "max_running_requests": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_are_those_of_a_float64_router(checkpoint: Path, model: nnx.Module, options: dict[str, Any]) -> None:
    engine = build_engine(checkpoint, model, **(SMALL | options))
    asked = asking()
    completions = engine.generate(asked)
    assert (max(c.cached_tokens for c in completions) > 0) == options.get("prefix_cache", True)
    check_experts(checkpoint, asked, completions)
    again = engine.generate(asked)  # whole prompts are cached now
    for before, after in zip(completions, again, strict=True):
        np.testing.assert_array_equal(before.experts, after.experts)


@pytest.mark.slow  # test_engine.py retracts
def test_retraction_changes_no_experts(checkpoint: Path, model: nnx.Module) -> None:
    with mock.patch.object(global_config, "default_init_new_token_ratio", 0.01):  # so that memory runs out
        engine = build_engine(checkpoint, model, **SMALL, kv_tokens=120, stop_token_ids=frozenset())
    asked = asking(ignore_stop=False)
    completions = engine.generate(asked)
    assert engine.use.retracted
    check_experts(checkpoint, asked, completions)


def test_new_weights_bring_their_own_experts(checkpoint: Path, model: nnx.Module, tmp_path: Path) -> None:
    """And a table that kept those of the old weights would not go unnoticed."""
    other = write_random("qwen3_moe", tmp_path / "other", scale=0.3, seed=5)
    engine = build_engine(checkpoint, model, **SMALL)
    asked = asking(1)
    engine.generate(asked)
    install(engine, policy(other))
    check_experts(other, asked, engine.generate(asked))
    table = engine._scheduler._experts
    assert table is not None
    table.forget()
    with pytest.raises(AssertionError, match="never computed since the cache was emptied"):
        engine.generate(asked)


def test_who_does_not_ask_gets_none(checkpoint: Path, model: nnx.Module) -> None:
    engine = build_engine(checkpoint, model, **SMALL)
    mixed = [replace(request, return_experts=index % 2 == 0) for index, request in enumerate(asking(1))]
    completions = engine.generate(mixed)
    assert [c.experts is None for c in completions] == [False, True, False, True]
    check_experts(checkpoint, mixed[::2], completions[::2])


def test_an_engine_that_keeps_no_experts_refuses(checkpoint: Path, model: nnx.Module) -> None:
    engine = build_engine(checkpoint, model, batch_paddings=(8,))
    assert engine.expert_layout is None
    with pytest.raises(RequestError, match="request 0: this engine keeps no experts"):
        engine.generate(asking())


@pytest.mark.slow  # tokens of a replica depend on nobody else
def test_two_replicas_return_the_same(checkpoint: Path, model: nnx.Module) -> None:
    replicas, _ = build(checkpoint, model, 2, engine_options(**SMALL))
    asked = asking(2)
    check_experts(checkpoint, asked, replicas.generate(asked))


# --- passing experts between hosts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_the_smallest_type_has_room_for_none(experts: int, dtype: type) -> None:
    assert routing_dtype(experts) == dtype
    assert np.iinfo(dtype).max >= experts  # experts are counted from 0, so that this one is none


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_experts_reach_every_host(experts: int, piece_bytes: int) -> None:
    """Replica 0 and 2 are host 0's, and replica 1 is host 1's, which sends 5 of 8 rows: in pieces of 4, and of one."""
    rng = np.random.default_rng(0)
    layout = ExpertLayout(layers=3, per_token=5, dtype=routing_dtype(experts))
    asked = [replace(request, token_ids=tuple(range(2, 3 + i))) for i, request in enumerate(asking(2))]
    lengths = rng.integers(1, 17, len(asked))
    made = [
        Completion(
            rng.integers(0, 99, n).astype(np.int32),
            np.zeros(n, np.float32),
            "stop",
            0,
            rng.integers(0, experts, (len(r.token_ids) + n - 1, 3, 5)).astype(layout.dtype),
        )
        for r, n in zip(asked, lengths, strict=True)
    ]
    assigned, senders = [[0, 3], [1, 4, 5, 6, 7], [2]], [0, 1, 0]
    own = [{i: made[i] for i in (0, 2, 3)}, {i: made[i] for i in assigned[1]}]
    found = _exchanged(asked, assigned, senders, own, layout, piece_bytes)
    for completions in found:
        for before, after in zip(made, completions, strict=True):
            np.testing.assert_array_equal(before.token_ids, after.token_ids)
            np.testing.assert_array_equal(before.experts, after.experts)
            assert after.experts is not None
            assert after.experts.dtype == layout.dtype


def _exchanged(
    asked: Sequence[Request],
    assigned: Sequence[Sequence[int]],
    senders: Sequence[int],
    own: Sequence[dict[int, Completion]],
    layout: ExpertLayout,
    piece_bytes: int,
) -> list[list[Completion]]:
    """Both hosts' exchanges, on two threads that meet at every ``gather_array``."""
    barrier, slots, shapes = threading.Barrier(2), {}, set()

    def gather(host: int) -> Any:
        def gather_array(name: str, array: np.ndarray) -> np.ndarray:
            slots[host] = name, array
            shapes.add((name, array.shape))
            barrier.wait(timeout=30)
            assert slots[0][0] == slots[1][0]
            gathered = np.stack([slots[0][1], slots[1][1]])  # of one shape, or this raises
            barrier.wait(timeout=30)
            return gathered

        return gather_array

    def run(host: int) -> list[Completion]:
        hosts: Any = SimpleNamespace(index=host, count=2, gather_array=gather(host))
        exchange = Exchange(asked, assigned, senders, hosts)
        return exchange.with_experts(exchange.completions(own[host]), own[host], layout, context_tokens=32)

    with mock.patch("tpu_grpo.engine.exchange.PIECE_BYTES", piece_bytes), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert len(shapes) == 2  # one for completions and one for experts, whatever hosts send
    return found
