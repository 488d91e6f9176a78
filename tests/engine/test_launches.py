"""Several decode steps in one launch: the same tokens and log-probabilities, bit for bit, as one step at a time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sgl_jax.srt.managers.schedule_batch import global_config
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.radix_cache import RadixCache

from tests.engine.building import SAMPLED, build_engine, policy, requests, tokens
from tests.engine.interpreter import interpreted_kernels
from tests.models.random_checkpoint import write_random, write_random_qwen3
from tpu_grpo.engine.attention import NativeMode
from tpu_grpo.engine.decode_loop import (
    LaunchInputs,
    LaunchRows,
    Sampled,
    StepInputs,
    StepOutput,
    decode_loop,
    pack_rows,
    unpack_rows,
)
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.launches import Programs
from tpu_grpo.engine.reservation import give_back, keep, reserve, reserve_ahead
from tpu_grpo.engine.sampling import SamplingColumns
from tpu_grpo.engine.scheduler import SteppedScheduler, total_use
from tpu_grpo.records.stages import Completion, Request, SamplingParams

SMALL = {"batch_paddings": (8,), "prefill_tokens": 64}
LONGEST = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_qwen3(tmp_path_factory.mktemp("launches") / "model", layers=1, kv_heads=2)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nnx.Module:
    return policy(checkpoint)


def uneven(group: int = 6, **sampling: Any) -> list[Request]:
    """Requests of 1 to 40 tokens, every length about as often."""
    return [
        replace(request, sampling=replace(SAMPLED, max_new_tokens=1 + 7 * index % LONGEST, **sampling))
        for index, request in enumerate(requests(group=group))
    ]


def sampled_by(engine: Engine, asked: Sequence[Request]) -> list[tuple[list[int], bytes, str, int]]:
    """Everything that a completion says, with the bits of its log-probabilities."""
    return [
        (c.token_ids.tolist(), c.logprobs.tobytes(), c.finish_reason, c.cached_tokens) for c in engine.generate(asked)
    ]


# --- whole engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"page_size": 4},
                {"page_size": 16, "max_running_requests": 4, "batch_paddings": None},
                {"max_running_requests": 32, "batch_paddings": None},  # rows that fit a smaller program get it
                {"prefix_cache": False, "prefill_tokens": 16},
                {"attention": "native", "page_size": 4},
                {"tensor": 2},  # with the vocabulary split
                {"tensor": 2, "shard_vocab": False},
                {"dtype": "bfloat16"},
            )
        ),
    ],
    ids=str,
)
def test_completions_do_not_depend_on_the_steps_of_a_launch(checkpoint: Path, options: dict[str, Any]) -> None:
    """Prompts are prefilled in chunks of 64 or 16 tokens, and requests wait for a place."""
    options = {key: value for key, value in (SMALL | options).items() if value is not None}
    model = policy(checkpoint, options.get("dtype", "float32"))
    found, asked = {}, uneven()
    for steps in (1, 3, 16, 64):
        engine = build_engine(checkpoint, model, steps_per_launch=steps, **options)
        found[steps] = sampled_by(engine, asked), engine.use.steps
        assert engine.use.launches >= engine.use.steps / steps
    assert found[3] == found[16] == found[64] == found[1]
    assert engine.use.launches < found[1][1] / 3


@pytest.mark.slow
def test_four_devices_sample_the_same_tokens_and_the_same_bits_in_the_same_places(
    checkpoint: Path, model: nnx.Module
) -> None:
    """A sum over more than two devices is added up in an order that depends on where in the batch a row is.

    Single steps let the others move up as soon as a row has ended; rows of a launch stay where they are until it ends.
    """
    alike, other = requests(group=2), uneven()
    engines = [
        build_engine(checkpoint, model, steps_per_launch=steps, tensor=4, page_size=4, **SMALL) for steps in (1, 3, 16)
    ]
    single, *others = [sampled_by(engine, alike) for engine in engines]
    assert others == [single, single]
    moved, *stayed = [engine.generate(other) for engine in engines]
    for completions in stayed:
        assert tokens(completions) == tokens(moved)
        for a, b in zip(completions, moved, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)  # measured 1e-6
    assert len({engine.use.steps for engine in engines}) == 1


@pytest.mark.slow  # stop tokens and lengths end rows of a launch by default
@pytest.mark.parametrize("page", [1, 4])
def test_scheduling_under_pressure_is_that_of_single_steps(checkpoint: Path, model: nnx.Module, page: int) -> None:
    """The cache is so small that rows are put back and prefixes evicted, the same ones, and prompts are cut."""
    asked, found = uneven(ignore_stop=False), []
    optimistic = mock.patch.object(global_config, "default_init_new_token_ratio", 0.01)  # so that memory runs out
    for steps in (1, 3, 64):
        evicted, evict = [], RadixCache.evict

        def counted(self: Any, params: Any, evicted: list[int] = evicted, evict: Any = evict) -> Any:
            result = evict(self, params)
            evicted.append(result.num_tokens_evicted)
            return result

        sizes = {"kv_tokens": 136 + 8 * page, "page_size": page, "prefill_tokens": 16, "batch_paddings": (8,)}
        with optimistic, mock.patch.object(RadixCache, "evict", counted):
            engine = build_engine(checkpoint, model, steps_per_launch=steps, stop_token_ids=frozenset(), **sizes)
            found.append((sampled_by(engine, asked), engine.use.retracted, evicted, engine.use.steps))
    assert found[0] == found[1] == found[2]
    _, retractions, evicted, steps = found[0]
    assert retractions > 0
    assert sum(evicted) > 0
    assert engine.use.launches < steps / 2


def test_stop_tokens_at_every_place_of_a_launch(checkpoint: Path, model: nnx.Module) -> None:
    """Launches have 8 steps; the second token is that of the first step, because a prefill samples the first."""
    sizes = {"max_running_requests": 48, "batch_paddings": (48,), "prefill_tokens": 256, "steps_per_launch": 8}
    asked = requests(sampling=SamplingParams(LONGEST), group=12)
    whole = tokens(build_engine(checkpoint, model, **sizes).generate([_unstopped(request) for request in asked]))
    stops = frozenset({1, *range(20, 60)})
    engine = build_engine(checkpoint, model, stop_token_ids=stops, **sizes)
    places = set()
    for completion, full in zip(engine.generate(asked), whole, strict=True):
        end = next((index for index, token in enumerate(full) if token in stops), LONGEST - 1)
        assert completion.token_ids.tolist() == full[: end + 1]
        assert completion.finish_reason == ("stop" if full[end] in stops else "length")
        if 0 < end < LONGEST - 1:
            places.add((end - 1) % 8)
    assert places == set(range(8))


def test_devices_have_the_next_launch_before_this_one_has_ended(checkpoint: Path, model: nnx.Module) -> None:
    """But not while a request waits, of which there are 12 for 8 places, nor with single steps."""
    asked, happened = requests(sampling=SamplingParams(24, ignore_stop=True), group=4), []
    launch, take_in = Programs.launch, SteppedScheduler._take_in

    def launched(self: Any, *args: Any) -> Any:
        happened.append("launch")
        return launch(self, *args)

    def taken_in(self: Any, batch: Any, reservation: Any, output: Any) -> None:
        happened.append("tokens" if reservation is not None else "prefill")
        take_in(self, batch, reservation, output)

    found = {}
    with mock.patch.object(Programs, "launch", launched), mock.patch.object(SteppedScheduler, "_take_in", taken_in):
        for steps in (1, 8):
            happened.clear()
            found[steps] = (
                sampled_by(build_engine(checkpoint, model, steps_per_launch=steps, **SMALL), asked),
                [*happened],
            )
    assert found[1][0] == found[8][0]
    order = ",".join(found[8][1])
    alone, _, together = order.rpartition("prefill,")
    assert "launch,tokens" in alone
    assert "launch,launch" not in alone
    assert together == "launch,launch,tokens,launch,tokens,tokens"
    assert "launch,launch" not in ",".join(found[1][1])


def _unstopped(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, ignore_stop=True))


@pytest.mark.slow  # stop tokens at every place are tested without flash
def test_flash_rows_that_have_ended_disturb_nobody(tmp_path: Path) -> None:
    """Its kernel writes the key and value of every row that it counts, in the middle of others, too."""
    checkpoint = write_random_qwen3(tmp_path / "model", layers=1, head_dim=64)
    model, sizes = policy(checkpoint), {"max_running_requests": 4, "prefill_tokens": 64}
    asked = [
        replace(request, sampling=SamplingParams(new, ignore_stop=True))
        for request, new in zip(requests(), (6, 2, 8, 1), strict=True)
    ]
    expected = tokens(build_engine(checkpoint, model, **sizes).generate(asked))
    with interpreted_kernels():
        engine = build_engine(checkpoint, model, attention="flash", page_size=4, **sizes)
        assert tokens(engine.generate(asked)) == expected
        again = engine.generate(asked)  # what the first ones left in the cache is right
    assert tokens(again) == expected
    assert all(completion.cached_tokens for completion in again[:2])


@pytest.mark.slow
def test_experts_do_not_depend_on_the_steps_of_a_launch(tmp_path: Path) -> None:
    checkpoint = write_random("qwen3_moe", tmp_path / "model", scale=0.3)
    model, asked = policy(checkpoint), [replace(request, return_experts=True) for request in uneven(3)]
    found: list[list[Completion]] = []
    for steps in (1, 3, 16):
        engine = build_engine(checkpoint, model, steps_per_launch=steps, return_experts=True, **SMALL)
        found.append(engine.generate(asked))
    for single, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(other.token_ids, single.token_ids)
            np.testing.assert_array_equal(other.experts, single.experts)
            assert other.logprobs.tobytes() == single.logprobs.tobytes()


def test_what_an_engine_says_of_its_use(checkpoint: Path, model: nnx.Module) -> None:
    """Two rows of 1 and 11 tokens; of the second, 10 are decoded, in launches of 4 steps, with 8 places in each."""
    engine = build_engine(checkpoint, model, steps_per_launch=4, **SMALL)
    asked = requests()[:2]
    engine.generate(
        [replace(r, sampling=replace(SAMPLED, max_new_tokens=n)) for r, n in zip(asked, (1, 11), strict=True)]
    )
    use = engine.use
    assert (use.prefills, use.launches, use.steps, use.tokens, use.places) == (1, 3, 10, 10, 80)
    figures = dict(engine.figures)
    assert figures.pop("rollout/wait_seconds") == use.wait > 0
    assert figures == {
        "rollout/prefills": 1,
        "rollout/accepted_rows": 2,
        "rollout/tokens_per_launch": 10 / 3,
        "rollout/occupied_rows": 1 / 8,
    }
    engine.generate(asked[:1])
    assert total_use([use, use]).tokens == 20
    assert engine.figures["rollout/tokens_per_launch"] == 15 / 4  # 16 tokens, one of them by the prefill
    before = engine.use
    engine.forget_prefixes()
    engine.generate(requests())  # prompts of 10, 37 and 3 tokens and 14 of 31, then the other 17
    spent = engine.use - before
    assert (spent.prefills, spent.accepted) == (2, 4)
    assert engine.figures["rollout/accepted_rows"] == 2


# --- the loop, with a model whose next token is the last one plus one ------------------------------------------------


class Counting:
    """A decode step that writes each row's length into its slot, and samples token + 1 with log-probability -length."""

    def at_step(self, metadata: Any, seq_lens: Any) -> Any:
        return metadata, jnp.zeros(0, jnp.int32)

    def __call__(self, cache: list[jax.Array], inputs: StepInputs) -> tuple[StepOutput, list[jax.Array]]:
        np.testing.assert_array_equal(inputs.sampling.position, inputs.seq_lens)
        slots = jnp.where(inputs.out_cache_loc >= 0, inputs.out_cache_loc, len(cache[0]))
        written = cache[0].at[slots].set(inputs.seq_lens, mode="drop")
        return StepOutput(inputs.input_ids + 1, -inputs.seq_lens.astype(jnp.float32), None), [written]


def count_up(
    slots: list[list[int]],
    steps: int,
    left: int = 0,
    stop: frozenset[int] = frozenset(),
    before: list[list[int]] | None = None,
    what_follows: bool = False,
) -> Any:
    """Rows start with tokens 10, 20, ..., of lengths 5, 6, ...; the last row takes no stop token for an end."""
    rows = len(slots)
    columns = SamplingColumns(
        *(np.ones(rows, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)),
        key=np.ones((rows, 4), np.uint32),
        position=np.zeros(rows, np.int32),
    )
    lengths = np.arange(5, 5 + rows, dtype=np.int32)
    given = LaunchRows(10 * np.arange(1, rows + 1, dtype=np.int32), lengths, np.arange(rows) < rows - 1, columns, None)
    packed = pack_rows(given._replace(slots=np.array(slots, np.int32)))
    control = jnp.array([steps, left, before is not None])
    given_before = jnp.array([[99] * rows, [1] * rows] if before is None else before)
    model: Any = Counting()
    with jax.disable_jit():
        output, cache = decode_loop(
            model,
            [jnp.zeros(12, jnp.int32)],
            LaunchInputs(jnp.asarray(packed), control, None, given_before),
            attention=model,
            stop_token_ids=stop,
            experts=None,
        )
    if what_follows:
        return np.asarray(output.after)
    found = Sampled.of_launch(np.asarray(output.results), np.arange(rows))
    return (
        [column[:n].tolist() for column, n in zip(found.tokens.T, found.count, strict=True)],
        [column[:n].tolist() for column, n in zip(found.logprobs.T, found.count, strict=True)],
        cache[0].tolist(),
    )


def test_rows_end_with_their_slots_and_by_stop_tokens() -> None:
    slots = [[0, 1, 2, 3], [4, 5, -1, -1], [6, 7, 8, -1], [-1, -1, -1, -1]]
    found, logprobs, cache = count_up(slots, steps=4, stop=frozenset({13, 31}))
    assert found == [[11, 12, 13], [21, 22], [31], []]
    assert logprobs == [[-5, -6, -7], [-6, -7], [-7], []]
    assert cache == [5, 6, 7, 0, 6, 7, 7, 0, 0, 0, 0, 0]
    found, _, cache = count_up(slots[:3], steps=4, stop=frozenset({31}))
    assert found == [[11, 12, 13, 14], [21, 22], [31, 32, 33]]  # the last row does not stop
    assert cache == [5, 6, 7, 8, 6, 7, 7, 8, 9, 0, 0, 0]


@pytest.mark.parametrize(("steps", "left", "counts"), [(4, 0, [4, 2, 1]), (3, 0, [3, 2, 1]), (4, 1, [2, 2, 1])])
def test_a_launch_ends_after_its_steps_or_with_few_rows(steps: int, left: int, counts: list[int]) -> None:
    found, _, _ = count_up([[0, 1, 2, 3], [4, 5, -1, -1], [6, -1, -1, -1]], steps, left)
    assert [len(row) for row in found] == counts


def test_a_launch_takes_up_the_rows_that_go_on() -> None:
    """The second has stopped in the launch before, the third has no more slots; 2 rows are no more than 2."""
    slots = [[0, 1], [2, 3], [-1, -1], [4, 5]]
    before = [[70, 80, 90, 60], [0, 1, 0, 0]]
    found, logprobs, cache = count_up(slots, steps=2, before=before)
    assert found == [[71, 72], [], [], [61, 62]]
    assert logprobs == [[-5, -6], [], [], [-8, -9]]
    assert cache == [5, 6, 0, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert count_up(slots, steps=2, left=2, before=before)[0] == [[], [], [], []]


def test_a_launch_says_what_the_next_needs() -> None:
    """The first row ends by its slots, the second by a stop token, and the third goes on."""
    slots = [[0, 1, -1], [4, 5, 6], [7, 8, 9], [-1, -1, -1]]
    after = count_up(slots, steps=3, stop=frozenset({22}), what_follows=True)
    assert after[1].tolist() == [0, 1, 0, 0]
    assert after[0, 2] == 33


def test_rows_survive_being_packed() -> None:
    rng = np.random.default_rng(0)
    given = LaunchRows(
        rng.integers(0, 9, 3).astype(np.int32),
        np.array([5, 0, 7], np.int32),
        np.array([True, False, True]),
        SamplingColumns(
            temperature=rng.random(3).astype(np.float32),
            top_k=np.array([0, 5, 2**31 - 1], np.int32),
            top_p=rng.random(3).astype(np.float32),
            min_p=rng.random(3).astype(np.float32),
            key=rng.integers(0, 2**32, (3, 4), np.uint32),
            position=np.array([5, 0, 7], np.int32),
        ),
        rng.integers(-1, 99, (3, 4)).astype(np.int32),
    )
    for before, after in zip(
        jax.tree.leaves(given), jax.tree.leaves(unpack_rows(jnp.asarray(pack_rows(given)))), strict=True
    ):
        np.testing.assert_array_equal(after, before)
        assert after.dtype == before.dtype


def test_native_slots_of_a_step_are_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    runner: Any = SimpleNamespace(page_size=4)
    mode, slots = NativeMode(runner), rng.integers(1, 99, (3, 16)).astype(np.int32)
    metadata = mode.launch_metadata(slots, np.array([16, 16, 16, 0]))
    assert metadata.shape == (4, 16)
    for lengths in ([5, 1, 16, 0], [4, 0, 8, 0], [0, 0, 0, 0]):
        _, found = mode.at_step(jnp.asarray(metadata), jnp.asarray(lengths, jnp.int32))
        np.testing.assert_array_equal(found, mode.cache_loc(slots, np.array(lengths)))


# --- reserving cache slots -------------------------------------------------------------------------------------------


def batch_of(lengths: list[int], new: list[int], free: int, page: int) -> Any:
    """A decode batch that has slots for its first token; ``new`` tokens may be sampled, and ``free`` slots are free."""
    pages = [-(-length // page) for length in lengths]
    size = (sum(pages) + free // page) * page
    kind: Any = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
    allocator = kind(size, kvcache=None, **({} if page == 1 else {"page_size": page}))
    table = ReqToTokenPool(len(lengths), 32)
    for row, count in enumerate(pages):
        table.req_to_token[row, : count * page] = allocator.alloc(count * page)
    table.req_to_token *= np.arange(32) < np.array(lengths)[:, None]
    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(max_new_tokens=n),
            output_ids=[],
            kv_allocated_len=length,
            kv_committed_len=length,
        )
        for length, n in zip(lengths, new, strict=True)
    ]
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=np.array(lengths),
        seq_lens_sum=sum(lengths),
        req_pool_indices=np.arange(len(lengths)),
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
    )


@pytest.mark.parametrize(("page", "steps"), [(1, 5), (4, 5)])
def test_slots_are_reserved_and_given_back(page: int, steps: int) -> None:
    batch = batch_of([6, 3], new=[9, 2], free=64, page=page)
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    before = allocator.available_size()
    reservation = reserve(batch, steps, left=0)
    assert reservation.steps == steps
    assert reservation.ends.tolist() == [10, 4]
    np.testing.assert_array_equal(reservation.slots[0], table[0, 5:10])
    np.testing.assert_array_equal(reservation.slots[1], [*table[1, 2:4], -1, -1, -1])
    taken = reservation.slots[reservation.slots >= 0].tolist()
    assert len(set(taken)) == len(taken) == 7
    assert before - allocator.available_size() == {1: 5, 4: 4}[page]  # tokens 7 to 10 and 4, or one page
    assert [req.kv_allocated_len for req in batch.reqs] == [10, 4]
    keep(batch, reservation, np.array([3, 1]))
    assert batch.seq_lens.tolist() == [8, 3]
    assert batch.seq_lens_sum == 11
    assert [(req.kv_allocated_len, req.kv_committed_len) for req in batch.reqs] == [(8, 8), (3, 3)]
    assert before - allocator.available_size() == {1: 2, 4: 0}[page]


@pytest.mark.parametrize("page", [1, 4])
def test_slots_for_the_next_launch_are_reserved_before_this_one_has_ended(page: int) -> None:
    """Rows of 6, 3 and 5 tokens; the second ends with this launch of 4 steps, the third after 2 more."""
    batch = batch_of([6, 3, 5], new=[20, 4, 6], free=64, page=page)
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    now = reserve(batch, 4, left=1)
    known, free = [req.kv_allocated_len for req in batch.reqs], allocator.available_size()
    ahead = reserve_ahead(batch, now, 4)
    assert ahead is not None
    assert (ahead.lengths.tolist(), ahead.ends.tolist(), ahead.left) == ([10, 7, 9], [13, 6, 10], 1)
    np.testing.assert_array_equal(ahead.slots, [table[0, 9:13], [-1] * 4, [*table[2, 8:10], -1, -1]])
    assert [req.kv_allocated_len for req in batch.reqs] == known  # the library is not told
    assert free - allocator.available_size() == {1: 6, 4: 8}[page]  # 4 and 2 tokens, or the last page of two rows
    taken = [slot for part in (now, ahead) for slot in part.slots[part.slots >= 0].tolist()]
    assert len(set(taken)) == len(taken)

    keep(batch, now, np.array([4, 4, 2]))  # the third has stopped after 6 tokens
    give_back(batch, ahead.of(np.array([False, True, True])))
    assert allocator.available_size() == free - {1: 6 - 2 - 2, 4: 8 - 4}[page]  # of both launches; page 2 stays its own
    give_back(batch, ahead.of(np.array([True, False, False])))
    assert allocator.available_size() == free + {1: 2, 4: 0}[page]
    again = allocator.alloc(allocator.available_size()).tolist()
    assert len(set(again)) == len(again)  # nothing was given back twice


@pytest.mark.parametrize(("new", "free", "given"), [(4, 64, 4), (20, 64, 3), (20, 14, 4)])
def test_nothing_is_reserved_ahead_without_use_or_room(new: int, free: int, given: int) -> None:
    """All rows end with this launch; it has fewer steps than others; or 8 more slots leave none for each row."""
    batch = batch_of([6, 3], new=[new, new], free=free, page=1)
    now = reserve(batch, given, left=0)
    assert now.steps == given
    assert reserve_ahead(batch, now, 4) is None


@pytest.mark.parametrize(
    ("page", "free", "steps"),
    [
        (1, 0, 1),
        (1, 1, 1),  # a second step needs two
        (1, 2, 2),
        (1, 5, 3),
        (1, 64, 9),
        (4, 4, 1),  # the library evicts when fewer pages are free than rows
        (4, 8, 4),  # at the 4th step the first row has 9 tokens and takes one of the two pages
        (4, 12, 5),  # at the 5th the second row does
        (4, 16, 8),  # at the 8th the first row takes the third of four
    ],
)
def test_a_launch_ends_before_the_library_would_evict(page: int, free: int, steps: int) -> None:
    """Rows of 6 and 5 tokens, with 9 to come."""
    batch = batch_of([6, 5], new=[9, 9], free=free, page=page)
    assert reserve(batch, 16, left=0).steps == steps
