"""Several decode steps in one launch: the same tokens and log-probabilities, bit for bit, as one step at a time."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flax import nnx
from sgl_jax.srt.managers.schedule_batch import global_config
from sgl_jax.srt.mem_cache.radix_cache import RadixCache

from tests.engine.building import SAMPLED, assert_alike, build_engine, policy, requests, tokens
from tests.engine.interpreter import interpreted_kernels
from tests.models.random_checkpoint import write_random, write_random_qwen3
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.launches import Programs
from tpu_grpo.engine.scheduler import SteppedScheduler, total_use
from tpu_grpo.records.stages import Completion, Request, SamplingParams

SMALL = {"batch_paddings": (8,), "prefill_tokens": 64}
LONGEST = 40


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


@pytest.mark.full
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
                {"tensor": 2},  # with the vocabulary split
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
    for steps in (1, 3, 64):
        engine = build_engine(checkpoint, model, steps_per_launch=steps, **options)
        found[steps] = sampled_by(engine, asked), engine.use.steps
        assert engine.use.launches >= engine.use.steps / steps
    assert found[3] == found[64] == found[1]
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
        assert_alike(completions, moved)  # measured 1e-6
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


@pytest.mark.full
def test_stop_tokens_at_every_place_of_a_launch(checkpoint: Path, model: nnx.Module) -> None:
    """Launches have 8 steps; the second token is that of the first step, because a prefill samples the first."""
    sizes = {"max_running_requests": 48, "batch_paddings": (48,), "prefill_tokens": 256, "steps_per_launch": 8}
    asked = requests(sampling=SamplingParams(LONGEST), group=12)
    stops = frozenset({1, *range(20, 60)})
    engine = build_engine(checkpoint, model, stop_token_ids=stops, **sizes)
    whole = tokens(engine.generate([_unstopped(request) for request in asked]))
    assert any(token in stops for row in whole for token in row[:-1])
    engine.forget_prefixes()
    places = set()
    for completion, full in zip(engine.generate(asked), whole, strict=True):
        end = next((index for index, token in enumerate(full) if token in stops), LONGEST - 1)
        assert completion.token_ids.tolist() == full[: end + 1]
        assert completion.finish_reason == ("stop" if full[end] in stops else "length")
        if 0 < end < LONGEST - 1:
            places.add((end - 1) % 8)
    assert places == set(range(8))


@pytest.mark.full
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


@pytest.mark.full
def test_what_an_engine_says_of_its_use(checkpoint: Path, model: nnx.Module) -> None:
    """Two rows of 1 and 11 tokens; of the second, 10 are decoded, in launches of 4 steps, with 8 places in each."""
    engine = build_engine(checkpoint, model, steps_per_launch=4, **SMALL)
    asked = requests()[:2]
    engine.generate(
        [replace(r, sampling=replace(SAMPLED, max_new_tokens=n)) for r, n in zip(asked, (1, 11), strict=True)]
    )
    use = engine.use
    assert (use.prefills, use.launches, use.steps, use.tokens, use.places) == (1, 3, 10, 10, 80)
    figures = use.figures
    assert figures.pop("rollout/wait_seconds") == use.wait > 0
    assert figures == {
        "rollout/prefills": 1,
        "rollout/accepted_rows": 2,
        "rollout/tokens_per_launch": 10 / 3,
        "rollout/occupied_rows": 1 / 8,
    }
    engine.generate(asked[:1])
    assert total_use([use, use]).tokens == 20
    before = engine.use
    assert (before - use).figures["rollout/tokens_per_launch"] == 15 / 4  # 16 tokens, one of them by the prefill
    engine.forget_prefixes()
    engine.generate(requests())  # prompts of 10, 37 and 3 tokens and 14 of 31, then the other 17
    spent = engine.use - before
    assert (spent.prefills, spent.accepted) == (2, 4)
    assert spent.figures["rollout/accepted_rows"] == 2
