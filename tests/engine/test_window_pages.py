"""The pool of layers with a window: by hand, on devices that only remember what was written where, and by numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch

from tests.engine.building import CONTEXT, PROMPTS, assert_alike, build_engine, engine_options, policy, requests, tokens
from tests.engine.interpreter import interpreted_kernels
from tests.engine.test_turn_scheduler import assert_that_prefixes_are_kept, converse
from tests.models import gemma3, gemma4
from tests.models.random_checkpoint import write_random
from tpu_grpo.engine.decode_loop import LaunchOutput, StepInputs, StepOutput
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.engine.launches import Programs
from tpu_grpo.engine.window_pages import Rows, WindowPages
from tpu_grpo.records.stages import Completion, Request, SamplingParams

STOP = 1
SMALL: dict[str, Any] = {"batch_paddings": (8,), "prefill_tokens": 64, "steps_per_launch": 4}
whole_cache = mock.patch.object(WindowPages, "of", return_value=None)
"""Layers with a window keep all tokens, too."""


# --- by hand ----------------------------------------------------------------------------------------------------------


def windows_of(window: int, page: int, **sizes: int) -> WindowPages:
    windows = WindowPages(window, page, **({"pages": 30, "window_pages": 9, "rows": 2} | sizes))
    windows.live = lambda: Rows(np.zeros((0, 6), np.int32), np.zeros(0, int), np.zeros(0, int))
    windows.unowned = lambda: np.zeros(0, np.int32)
    return windows


def test_a_row_keeps_its_window_as_it_moves_on() -> None:
    """A window of 6 tokens in pages of 4: the 5 tokens before a page lie in the 2 pages before it."""
    windows, pages = windows_of(6, 4), np.array([[21, 11, 12, 13, 14, 15]])

    def take(first: int, end: int, own: int = 8) -> list[int]:
        taken = windows.take(Rows(pages, np.array([first]), np.array([end])), np.array([own]))[0]
        assert np.array_equal(taken, np.where(taken, windows.page_of[pages[0]], 0))
        return taken.tolist()

    assert take(0, 9) == [1, 2, 3, 0, 0, 0]  # a prompt of 9 tokens, of which the prefix tree owns 8
    assert take(9, 13) == [1, 2, 3, 4, 0, 0]  # the page of token 9 is the third
    assert take(13, 17) == [0, 2, 3, 4, 5, 0]  # the first is left to the prefix tree
    assert take(17, 21) == [0, 0, 3, 4, 5, 6]
    assert take(20, 24) == [0, 0, 0, 4, 5, 6]  # the third is taken back
    assert windows.page_of[pages[0]].tolist() == [1, 2, 0, 4, 5, 6]
    assert take(20, 24, own=0) == [0, 0, 0, 4, 5, 6]  # without a prefix tree the row owns all
    assert np.flatnonzero(windows.page_of).tolist() == [13, 14, 15]


def test_free_pages_are_taken_back_first_then_the_least_recently_used() -> None:
    """The pool has 9 pages; page 8 is still read by a row that is not in the launch."""
    windows = windows_of(5, 4)
    for first in (1, 4, 7):
        table = np.array([[first, first + 1, first + 2]])
        windows.take(Rows(table, np.array([0]), np.array([12])), np.array([12]))
    windows.live = lambda: Rows(np.array([[7, 8, 0]]), np.array([7]), np.array([8]))
    windows.unowned = lambda: np.array([9, 5, 20])

    def take(first: int) -> list[int]:
        table = np.array([[first, first + 1]])
        windows.take(Rows(table, np.array([0]), np.array([8])), np.array([8]))
        return np.flatnonzero(windows.page_of).tolist()

    assert take(10) == [1, 2, 3, 4, 6, 7, 8, 10, 11]
    windows.unowned = lambda: np.array([20])
    assert take(12) == [3, 4, 6, 7, 8, 10, 11, 12, 13]  # the end of a prompt is kept longer than its beginning
    with pytest.raises(AssertionError, match="must be free"):
        windows.take(Rows(np.arange(14, 30)[None], np.array([0]), np.array([64])), np.array([64]))


@pytest.mark.parametrize(
    ("mapped", "window", "usable"),
    [
        ("111", 6, 3),
        ("110", 6, 2),
        ("011", 6, 3),
        ("0101", 6, 0),
        ("0101", 5, 4),
        ("1000", 5, 1),
        ("00", 1, 2),
        ("", 6, 0),
    ],
)
def test_a_prefix_is_found_up_to_its_last_whole_window(mapped: str, window: int, usable: int) -> None:
    """Of pages of 4 tokens, a window of 6 needs two before its end, one of 5 one, and one of 1 none."""
    assert windows_of(window, 4)._usable(np.array([each == "1" for each in mapped], bool)) == usable


def test_the_pool_of_gemma_3_1b_for_64_rows_of_8k() -> None:
    """8 + 1 + 2 pages for each of 64 rows and 9 prompts, and a prefill of 2,048 tokens: 10% of the pages."""
    options = engine_options(
        context_tokens=8192, max_running_requests=64, page_size=64, prefill_tokens=2048, prefixes=9
    )
    windows = WindowPages.of([512] * 5 + [None], options)
    assert windows is not None
    assert windows.window_pages == (64 + 9) * (8 + 1 + 2) + 32
    assert len(windows.page_of) - 1 == options.cache_tokens // 64 == 64 * 129  # with the scheduler's margin
    assert WindowPages.of([None] * 6, options) is None
    assert WindowPages.of([512], replace(options, context_tokens=768)) is None  # it would save nothing
    assert WindowPages.of([2**31 - 1], options) is None


# --- the scheduler, with devices that remember ------------------------------------------------------------------------


class Device:
    """Stands in for the programs of an engine: keys are numbers that say which tokens a row had up to there.

    The token that follows is a function of this number and of the request's key. It is an error if a token sees another
    number in the pool of windows than in the whole cache.
    """

    def __init__(self, engine: Engine, window: int):
        self.windows, self.page, self.window = engine._runner.windows, engine.options.page_size, window
        self.whole = np.zeros(engine.options.cache_tokens + self.page, np.int64)
        pages = 0 if self.windows is None else self.windows.window_pages
        self.own = np.zeros((pages + 1) * self.page, np.int64)
        self.launches = 0

    def run(self, inputs: Any) -> Any:
        self.launches += 1
        self._check_pages()
        return self._prefill(inputs) if isinstance(inputs, StepInputs) else self._launch(inputs)

    def _check_pages(self) -> None:
        """Every page of the pool is free, or belongs to one page of the scheduler."""
        if self.windows is not None:
            taken = self.windows.page_of[self.windows.page_of > 0]
            assert np.sort([*taken, *self.windows._free]).tolist() == list(range(1, self.windows.window_pages + 1))

    def _prefill(self, inputs: StepInputs) -> StepOutput:
        tokens, rows = np.zeros(len(inputs.seq_lens), np.int32), np.flatnonzero(inputs.seq_lens)
        starts = np.cumsum(inputs.extend_lens) - inputs.extend_lens
        keys = [0] * len(tokens)
        for row in rows:
            for place in range(inputs.prefix_lens[row], inputs.seq_lens[row]):
                index = starts[row] + place - inputs.prefix_lens[row]
                assert inputs.out_cache_loc[index] == self._slot(inputs.attention.pages_BN, row, place)
                keys[row] = self._write(inputs.attention, row, place, int(inputs.input_ids[index]))
        for row in rows:
            for place in range(inputs.prefix_lens[row], inputs.seq_lens[row]):
                self._look_back(inputs.attention, row, place)
            tokens[row] = _next(keys[row], inputs.sampling.key[row])
        return StepOutput(jnp.asarray(tokens), jnp.zeros(len(tokens)), None)

    def _launch(self, inputs: Any) -> LaunchOutput:
        steps, left, follows = inputs.control.tolist()
        before = np.asarray(inputs.before) if follows else np.zeros((2, len(inputs.rows)), np.int32)
        token, stopped = (before[0] if follows else inputs.rows[:, 0]).copy(), before[1] > 0
        length, stops, slots = inputs.rows[:, 1], inputs.rows[:, 2] > 0, inputs.rows[:, 11:]
        running, count = (slots[:, 0] >= 0) & ~stopped, np.zeros(len(token), np.int32)
        sampled, step = np.zeros((slots.shape[1], len(token)), np.int32), 0
        while step < steps and running.sum() > left:
            rows, keys = np.flatnonzero(running), {}
            for row in rows:
                place = length[row] + step - 1
                assert slots[row, step] == self._slot(inputs.attention.pages_BN, row, place)
                keys[row] = self._write(inputs.attention, row, place, int(token[row]))
            for row in rows:
                self._look_back(inputs.attention, row, length[row] + step - 1)
                token[row] = sampled[step, row] = _next(keys[row], inputs.rows[row, 7:11])
            token[~running] = 0
            count += running
            stopped |= running & stops & (token == STOP)
            step += 1
            running &= ~stopped & (slots[:, step] >= 0 if step < slots.shape[1] else False)
        results = np.concatenate([count[None], sampled, np.zeros_like(sampled)])
        return LaunchOutput(jnp.asarray(results), None, jnp.asarray(np.stack([token, stopped.astype(np.int32)])))

    def _slot(self, pages_BN: np.ndarray, row: int, place: int) -> int:
        return int(pages_BN[row, place // self.page] * self.page + place % self.page)

    def _write(self, attention: Any, row: int, place: int, token: int) -> int:
        before = self.whole[self._slot(attention.pages_BN, row, place - 1)] if place else 0
        key = hash((int(before), place, token)) % 2**62
        self.whole[self._slot(attention.pages_BN, row, place)] = key
        if self.windows is not None:
            self.own[self._slot(attention.windows_BN, row, place)] = key
        return key

    def _look_back(self, attention: Any, row: int, place: int) -> None:
        for seen in range(max(0, place - self.window + 1), place + 1) if self.windows is not None else ():
            slot = self._slot(attention.windows_BN, row, seen)
            assert slot >= self.page, "page 0 is nobody's"
            assert self.own[slot] == self.whole[self._slot(attention.pages_BN, row, seen)]


def _next(key: int, sample: np.ndarray) -> int:
    drawn = hash((key, *sample.tolist()))
    return STOP if drawn % 30 == 0 else 10 + drawn % 100


@contextmanager
def device(engine: Engine, window: int) -> Iterator[Device]:
    """Let the engine run on such a device; it needs no weights."""
    made = Device(engine, window)
    engine._runner.weights = []
    with mock.patch.object(Programs, "_run", lambda _, inputs: made.run(inputs)):
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with a window of 6 tokens, and one without."""
    return write_random("gemma2", tmp_path_factory.mktemp("model") / "model", layers=2, sliding_window=6)


def draw(seed: int, count: int, shared: int, lengths: tuple[int, int] = (1, 40)) -> list[Request]:
    """Requests of random lengths in groups of random sizes; prompts begin with parts of so many beginnings."""
    rng, asked = np.random.default_rng(seed), []
    begins = [tuple(rng.integers(10, 110, 24).tolist()) for _ in range(shared)] or [()]
    while len(asked) < count:
        own = tuple(rng.integers(10, 110, int(rng.integers(1, 20))).tolist())
        prompt = begins[rng.integers(len(begins))][: int(rng.integers(0, 25))] + own
        sampling = SamplingParams(int(rng.integers(*lengths)), ignore_stop=bool(rng.integers(4)))
        asked += requests([prompt], sampling, group=int(rng.integers(1, 7)), step=len(asked))
    return asked


def on_device(
    model: Path, asked: Sequence[Request], window: int = 6, **options: Any
) -> tuple[list[Completion], str, list[Completion], Engine]:
    """The completions, the digest of what the scheduler decided, and completions that continue halves of those."""
    engine = Engine.build(
        model, engine_mesh(jax.devices()[:1]), engine_options(**(SMALL | {"batch_paddings": (2, 4, 8)} | options))
    )
    with device(engine, window):
        completions = engine.generate(asked)
        digest, halves = engine.digest, [_continued(*pair) for pair in zip(asked, completions, strict=True)]
        return completions, digest, engine.generate(halves), engine


def _continued(request: Request, completion: Completion) -> Request:
    """The request goes on from half of its completion, as a conversation does, and a partial rollout."""
    ids = (*request.token_ids, *completion.token_ids[: -(-len(completion.token_ids) // 2)].tolist())
    new = min(request.sampling.max_new_tokens, CONTEXT - len(ids))
    return replace(request, token_ids=ids, sampling=replace(request.sampling, max_new_tokens=new))


@contextmanager
def sometimes_short(seed: int) -> Iterator[None]:
    """At random, the scheduler finds too little memory for all of its rows, and puts one back into the queue."""
    rng, enough = np.random.default_rng(seed), ScheduleBatch._is_available_size_sufficient
    short: list[int] = []

    def rarely(self: Any, needed: Any) -> bool:
        if not short and self.batch_size() > 1 and rng.random() < 0.4:
            short.extend([1, 1, 0])  # it asks again before it takes a row, and after
        return not short.pop(0) if short else enough(self, needed)

    with mock.patch.object(ScheduleBatch, "_is_available_size_sufficient", rarely):
        yield


OPTIONS = pytest.mark.parametrize(
    ("page", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (4, {"max_running_requests": 6, "batch_paddings": (3, 6)}),
        pytest.param(6, {"steps_per_launch": 1}, marks=pytest.mark.full),  # a window of one page
        pytest.param(4, {"prefix_cache": False}, marks=pytest.mark.full),
        pytest.param(1, {"kv_tokens": 360, "prefill_tokens": 16}, marks=pytest.mark.full),
        pytest.param(4, {"kv_tokens": 460, "prefill_tokens": 16, "steps_per_launch": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)


@pytest.mark.full
@OPTIONS
def test_groups_are_scheduled_as_without_the_pool(model: Path, page: int, options: dict[str, Any]) -> None:
    """Whatever is admitted, ends or is put back: the same slots, launches and tokens, and the same prompts shared."""
    asked, options = draw(page, 24, shared=0), {"page_size": page} | options
    with sometimes_short(page):
        found, digest, _, engine = on_device(model, asked, **options)
    with sometimes_short(page), whole_cache:
        expected, other_digest, *_ = on_device(model, asked, **options)
    assert tokens(found) == tokens(expected)
    assert digest == other_digest
    shared = sum(each.cached_tokens for each in found)
    assert (shared > 0) == engine.options.prefix_cache
    assert engine.use.retracted > 2
    _assert_none_is_lost(engine)


@OPTIONS
def test_every_token_finds_its_window_in_the_smallest_pool(model: Path, page: int, options: dict[str, Any]) -> None:
    """The pool holds the windows of running rows only, while prompts begin alike and completions are continued.

    So prefixes lose their windows, and what continues them computes more, with the same tokens.
    """
    asked, options, lost = draw(10 + page, 24, shared=3), {"page_size": page} | options, []
    usable = WindowPages._usable

    def counted(self: WindowPages, mapped_n: np.ndarray) -> int:
        lost.append(len(mapped_n) - (kept := usable(self, mapped_n)))
        return kept

    with sometimes_short(page), mock.patch.object(WindowPages, "_usable", counted):
        found, _, continued, engine = on_device(model, asked, prefixes=0, **options)
    with sometimes_short(page), whole_cache:
        expected, _, others, _ = on_device(model, asked, **options)
    assert tokens([*found, *continued]) == tokens([*expected, *others])
    assert (sum(lost) > 0) == engine.options.prefix_cache
    assert engine.use.retracted > 2
    _assert_none_is_lost(engine)


def _assert_none_is_lost(engine: Engine) -> None:
    windows = engine._runner.windows
    assert windows is not None
    engine.forget_prefixes()
    assert not windows.page_of.any()
    assert len(windows._free) == windows.window_pages < 0.85 * engine.options.cache_tokens / windows.page_size


@pytest.mark.full
@pytest.mark.parametrize("page", [1, 4])
def test_a_conversation_finds_its_earlier_turns(model: Path, page: int) -> None:
    """Of 12 conversations 8 run at once, and each turn continues where the one before ended; tokens stay the same."""
    found = []
    for patch in (nullcontext(), whole_cache):
        sizes = SMALL | {"context_tokens": 160, "page_size": page}
        with patch:
            engine = Engine.build(model, engine_mesh(jax.devices()[:1]), engine_options(**sizes))
        with device(engine, 6):
            completions, conversations = converse(engine)
        assert_that_prefixes_are_kept(engine, conversations.played)
        found.append((tokens(completions), engine.use.later_cached, engine.digest))
    assert found[0] == found[1]


# --- whole engines ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tensor", "options"),
    [
        ("gemma2", 1, {"page_size": 1}),
        ("gemma2", 2, {"page_size": 4, "kv_dtype": "fp8"}),
        ("gemma3", 1, {"page_size": 6, "dtype": "bfloat16"}),
        ("gemma4", 2, {"page_size": 4, "return_experts": True}),
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_a_whole_cache(
    tmp_path: Path, family: str, tensor: int, options: dict[str, Any]
) -> None:
    """Bit for bit, sampled and greedy, with rows put back, on one device and two."""
    if family == "gemma2":
        directory = write_random("gemma2", tmp_path / "model", layers=2, sliding_window=6)
    else:
        writer, shape = {"gemma3": (gemma3, "1b"), "gemma4": (gemma4, "26b")}[family]
        directory = writer.write_shape(tmp_path / "model", shape, **gemma4.TWO_KINDS)
    trained, options = policy(directory, options.get("dtype", "float32")), SMALL | options
    asked = [
        replace(request, return_experts=options.get("return_experts", False))
        for sampling in (SamplingParams(30, ignore_stop=True), SamplingParams(20, temperature=0.0, ignore_stop=True))
        for request in requests(PROMPTS[:3], sampling, group=4 if sampling.temperature else 1)
    ]

    def run() -> tuple[list[Completion], Engine]:
        engine = build_engine(directory, trained, tensor, **options)
        with sometimes_short(1):
            return engine.generate(asked), engine

    found, engine = run()
    with whole_cache:
        expected, other = run()
    assert engine.use.retracted > 0
    assert [layer.shape[0] for layer in engine.cache_specs] != [layer.shape[0] for layer in other.cache_specs]
    assert engine.digest == other.digest
    for one, another in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == another.token_ids.tolist()
        assert one.logprobs.tobytes() == another.logprobs.tobytes()
        np.testing.assert_equal(one.experts, another.experts)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "tensor"), [(1, 1), (4, 2)])
def test_the_kernel_reads_the_pool_of_windows(tmp_path: Path, page: int, tensor: int) -> None:
    """Interpreted on a CPU; prompts are prefilled in chunks, and rows end within launches."""
    directory = write_random("gemma2", tmp_path / "model", layers=2, sliding_window=6, head_dim=64)
    trained, found = policy(directory), []
    asked = requests([PROMPTS[1][:13]], SamplingParams(4, ignore_stop=True), group=2)
    asked[1] = replace(asked[1], sampling=SamplingParams(2, ignore_stop=True))
    for attention in ("flash", "flash", "gather"):
        interpreted = interpreted_kernels() if attention == "flash" else nullcontext()
        with interpreted, whole_cache if found else nullcontext():
            sizes = {"max_running_requests": 2, "prefixes": 2, "batch_paddings": (2,), "prefill_tokens": 8}
            options = SMALL | sizes | {"page_size": page, "attention": attention}
            engine = build_engine(directory, trained, tensor, **options)
            assert (engine._runner.windows is None) == bool(found)
            found.append(engine.generate(asked))
    assert [c.logprobs.tobytes() for c in found[0]] == [c.logprobs.tobytes() for c in found[1]]
    assert tokens(found[0]) == tokens(found[1])
    assert_alike(found[0], found[2], atol=1e-4)
