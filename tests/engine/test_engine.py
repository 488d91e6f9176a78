"""The engine against Tunix's forward pass on the same tokens, and against itself under other schedules."""

import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import psutil
import pytest
from flax import nnx
from sgl_jax.srt.managers.schedule_batch import global_config
from sgl_jax.srt.managers.scheduler import Scheduler

from tests.engine.building import (
    CONTEXT,
    GREEDY,
    PROMPTS,
    SAMPLED,
    alone,
    build_engine,
    disagreement,
    engine_options,
    install,
    policy,
    requests,
    tokens,
    trainer_logprobs,
)
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.records.errors import RequestError, WeightsError
from tpu_grpo.records.stages import Request, SampleKey, SamplingParams

AGREE = 1e-4  # float32, the contract's bound; measured 1e-6 to 5e-6


@pytest.fixture(scope="module")
def engine(checkpoint: Path, model: nnx.Module) -> Engine:
    return build_engine(checkpoint, model)


@pytest.fixture(scope="module")
def reference_tokens(engine: Engine) -> list[list[int]]:
    engine.forget_prefixes()
    return tokens(engine.generate(requests(group=4)))


def test_greedy_tokens_are_the_trainers_argmax(engine: Engine, model: nnx.Module) -> None:
    asked = requests(sampling=GREEDY)
    completions = engine.generate(asked)
    for full, completion in zip(trainer_logprobs(model, asked, completions), completions, strict=True):
        assert full.argmax(-1).tolist() == completion.token_ids.tolist()
    assert disagreement(model, asked, completions) <= AGREE


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_the_trainers_at_the_temperature(engine: Engine, model: nnx.Module, temperature: float) -> None:
    asked = requests(sampling=SamplingParams(16, temperature=temperature, top_p=0.9, ignore_stop=True))
    assert disagreement(model, asked, engine.generate(asked)) <= AGREE


@pytest.mark.full
def test_the_likeliest_tokens_are_the_trainers(engine: Engine, model: nnx.Module) -> None:
    """Only requests that ask get them; whether a request asks changes no token."""
    asked = requests(PROMPTS[:1], sampling=SamplingParams(16, temperature=0.7, ignore_stop=True), group=2)
    asking = [replace(request, return_likeliest=index % 2 == 0) for index, request in enumerate(asked)]
    completions = engine.generate(asking)
    assert tokens(completions) == tokens(engine.generate(asked))
    full = trainer_logprobs(model, asked, completions)
    for request, completion, rows in zip(asking, completions, full, strict=True):
        assert len(completion.likeliest) == (16 if request.return_likeliest else 0)
        for found, row in zip(completion.likeliest, rows, strict=bool(completion.likeliest)):
            np.testing.assert_allclose(list(found.values()), np.sort(row)[::-1][:20], atol=AGREE, rtol=0)
            np.testing.assert_allclose(list(found.values()), row[list(found)], atol=AGREE, rtol=0)


@pytest.mark.slow  # an engine of its own for one repair
def test_bfloat16_rotates_in_float32(tmp_path: Path) -> None:
    """Far positions agree as well as near ones; with rounded frequencies they are off by more than 0.5."""
    directory = write_random_qwen3(tmp_path / "m")
    model = policy(directory, "bfloat16")
    engine = build_engine(directory, model, dtype="bfloat16", context_tokens=1024)
    far = requests([tuple(np.random.default_rng(0).integers(2, 300, 960).tolist())])
    near = requests([PROMPTS[1]])
    assert disagreement(model, near, engine.generate(near)) <= 0.05
    assert disagreement(model, far, engine.generate(far)) <= 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        pytest.param({"max_running_requests": 3}, marks=pytest.mark.slow),
        pytest.param({"max_running_requests": 16, "batch_paddings": (1, 2, 5)}, marks=pytest.mark.slow),
        pytest.param({"prefill_tokens": 16}, marks=pytest.mark.slow),  # test_families.py cuts a prompt of 110
        pytest.param({"page_size": 4}, marks=pytest.mark.slow),
        pytest.param({"page_size": 16, "max_running_requests": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, marks=pytest.mark.slow),  # test_families.py compares such engines with a reference
    ],
    ids=str,
)
def test_tokens_depend_on_no_schedule(
    checkpoint: Path, model: nnx.Module, reference_tokens: list[list[int]], options: dict[str, Any]
) -> None:
    engine = build_engine(checkpoint, model, **options)
    asked = requests(group=4)
    completions = engine.generate(asked)
    assert tokens(completions) == reference_tokens
    assert disagreement(model, asked, completions) <= AGREE


def test_tokens_depend_on_no_order(engine: Engine, reference_tokens: list[list[int]]) -> None:
    asked = requests(group=4)
    order = np.random.default_rng(0).permutation(len(asked))
    engine.forget_prefixes()
    shuffled = tokens(engine.generate([asked[i] for i in order]))
    assert [shuffled[i] for i in np.argsort(order)] == reference_tokens


def test_each_completion_is_told_once_as_soon_as_it_ends(engine: Engine) -> None:
    """The long one is still being sampled when the short ones are told."""
    lengths = [16, 1, 50, 2]
    asked = [replace(r, sampling=replace(SAMPLED, max_new_tokens=n)) for r, n in zip(requests(), lengths, strict=True)]
    told: list[tuple[int, int, int]] = []
    steps = engine.use.steps
    replicas = alone(engine)
    completions = replicas.generate(asked, lambda i, c: told.append((i, len(c.token_ids), engine.use.steps - steps)))
    assert [len(c.token_ids) for c in completions] == lengths
    assert [entry[:2] for entry in told] == [(1, 1), (0, 16), (3, 2), (2, 50)]  # two end in the same launch
    assert told[2][2] <= engine.steps_per_launch < told[3][2]  # decode steps until then


def test_a_group_prefills_its_prompt_once(engine: Engine) -> None:
    engine.forget_prefixes()
    completions = engine.generate(requests([PROMPTS[1]], group=8))
    assert [c.cached_tokens for c in completions] == [0] + [len(PROMPTS[1]) - 1] * 7
    assert len({tuple(t) for t in tokens(completions)}) > 1  # the keys differ by sample


def test_steps_and_samples_have_their_own_tokens(engine: Engine) -> None:
    first, again, next_step = (tokens(engine.generate(requests(step=s))) for s in (0, 0, 1))
    assert first == again
    assert all(a != b for a, b in zip(first, next_step, strict=True))


@pytest.mark.full
def test_retraction_under_pressure_changes_nothing(
    checkpoint: Path, model: nnx.Module, reference_tokens: list[list[int]]
) -> None:
    """A cache of two long rows for eight running ones: rows are put back and prefilled again with what they had."""
    optimistic = mock.patch.object(global_config, "default_init_new_token_ratio", 0.01)  # so that memory runs out
    with optimistic:
        engine = build_engine(checkpoint, model, kv_tokens=120, stop_token_ids=frozenset())
    asked = requests(sampling=replace(SAMPLED, ignore_stop=False), group=4)  # else room for all tokens is kept free
    completions = engine.generate(asked)
    assert engine.use.retracted
    assert tokens(completions) == reference_tokens
    assert disagreement(model, asked, completions) <= AGREE


@pytest.mark.full
def test_a_token_that_the_library_drops_is_noticed(checkpoint: Path, model: nnx.Module) -> None:
    """It drops those of all rows from ``per_dp_bs_size`` on without a word."""
    engine, process = build_engine(checkpoint, model), Scheduler.process_batch_result_decode

    def forgetful(self: Any, batch: Any, *args: Any) -> None:
        batch.per_dp_bs_size = 2
        process(self, batch, *args)

    dropping = mock.patch.object(Scheduler, "process_batch_result_decode", forgetful)
    with dropping, pytest.raises(AssertionError, match="lost a token of request 2"):
        engine.generate(requests())


def test_stop_tokens_end_a_completion_and_limits_cut_it(
    checkpoint: Path, model: nnx.Module, engine: Engine, reference_tokens: list[list[int]]
) -> None:
    stop = reference_tokens[0][5]
    first = reference_tokens[0].index(stop)
    request = requests(sampling=SamplingParams(16))[0]
    free = build_engine(checkpoint, model, stop_token_ids=frozenset({stop}))
    stopped = free.generate([request])[0]
    assert stopped.token_ids.tolist() == reference_tokens[0][: first + 1]
    assert stopped.finish_reason == "stop"
    exactly = Request(request.token_ids, SamplingParams(first + 1), request.key)
    assert free.generate([exactly])[0].finish_reason == "stop"  # the stop token is the last one allowed
    limits = [1, 3, 16]
    cut = engine.generate(
        [Request(request.token_ids, SamplingParams(n, ignore_stop=True), request.key) for n in limits]
    )
    assert tokens(cut) == [reference_tokens[0][:n] for n in limits]
    assert {c.finish_reason for c in cut} == {"length"}


@pytest.mark.full
def test_new_weights_forget_stale_prefixes(checkpoint: Path, tmp_path: Path, model: nnx.Module) -> None:
    other = policy(write_random_qwen3(tmp_path / "other", layers=1, seed=5))
    engine = build_engine(checkpoint, model)
    asked = requests()
    engine.generate(asked)
    install(engine, other)
    completions = engine.generate(asked)
    assert [c.cached_tokens for c in completions] == [0] * len(asked)
    assert disagreement(other, asked, completions) <= AGREE


@pytest.mark.slow
def test_stale_prefixes_would_be_wrong(checkpoint: Path, tmp_path: Path, model: nnx.Module) -> None:
    """An engine that does not forget prefixes uses the old keys and values under new weights."""
    other = policy(write_random_qwen3(tmp_path / "other", layers=1, seed=5))
    engine = build_engine(checkpoint, model)
    asked = requests(sampling=GREEDY)
    engine.generate(asked)
    with mock.patch.object(engine, "forget_prefixes"):
        install(engine, other)
    assert disagreement(other, asked, engine.generate(asked)) > 0.05


def test_requests_that_cannot_be_served(engine: Engine, checkpoint: Path, model: nnx.Module) -> None:
    key = SampleKey(0, 0, 0, 0)
    with pytest.raises(RequestError, match="request 0: the prompt must not be empty"):
        engine.generate([Request((), SAMPLED, key)])
    with pytest.raises(RequestError, match=f"request 1: 90 prompt tokens and max_new_tokens=16 exceed .*{CONTEXT}"):
        engine.generate([*requests()[:1], Request(tuple([2] * 90), SAMPLED, key)])
    with pytest.raises(RequestError, match=r"token ids must be in \[0, 300\)"):
        engine.generate([Request((300,), SAMPLED, key)])
    with pytest.raises(RequestError, match="max_new_tokens must be >= 1, got 0"):
        engine.generate([Request((5,), SamplingParams(0), key)])
    small = build_engine(checkpoint, model, kv_tokens=48)
    with pytest.raises(RequestError, match=r"37 prompt tokens and max_new_tokens=16 need 55 cache tokens.*has 48"):
        small.generate(requests())
    assert len(engine.generate(requests([PROMPTS[0]]))[0].token_ids) == 16  # still serves what fits


def test_wrong_weights_are_refused(engine: Engine) -> None:
    weights = engine.weights
    name = "model.norm.scale"
    with pytest.raises(WeightsError, match=rf"missing \['{name}'\], unknown \['nonsense'\]"):
        engine.install_weights({("nonsense" if k == name else k): v for k, v in weights.items()})
    with pytest.raises(WeightsError, match=rf"{name} must be float32\[64\], got float32\[63\]"):
        engine.install_weights({**weights, name: weights[name][1:]})


def test_building_leaves_the_process_alone(checkpoint: Path) -> None:
    """No thread, signal handler, socket or reseeded generator."""

    def state() -> tuple[Any, ...]:
        handlers = [signal.getsignal(s) for s in signal.valid_signals()]
        return threading.enumerate(), handlers, len(psutil.Process().net_connections())

    before = state()
    random.seed(1)
    np.random.seed(1)
    build_engine(checkpoint)
    drawn = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    assert drawn == (random.random(), np.random.random())
    assert before == state()


def test_two_engines_of_one_checkpoint_do_not_share_its_config(checkpoint: Path, model: nnx.Module) -> None:
    """More devices than key-value heads repeats heads in the first engine only."""
    build_engine(checkpoint, model, tensor=4)
    specs = Engine.build(checkpoint, engine_mesh(jax.devices()[:1]), engine_options()).weight_specs
    assert specs["model.layers.0.self_attn.k_proj.weight"].shape == (64, 2 * 16)


def test_programs_lowered_without_weights_are_those_that_run(checkpoint: Path, model: nnx.Module) -> None:
    options = engine_options(max_running_requests=64)
    described = Engine.build(checkpoint, engine_mesh(jax.devices()[:1]), options)
    built = build_engine(checkpoint, model, max_running_requests=64)
    assert built.weights
    assert not described.weights
    lowered, run = described.lower("decode", 64), built.lower("decode", 64)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.in_avals) == jax.tree.map(
        lambda x: (x.shape, x.dtype), run.in_avals
    )
    assert lowered.out_info == run.out_info
