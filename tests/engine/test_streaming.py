"""Tokens as they come: the same as at once, and an engine that goes on when somebody stops listening."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.building import PROMPTS, SAMPLED, build_engine, requests
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.sampler import stream
from tpu_grpo.records.errors import RequestError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build_engine(write_random_qwen3(tmp_path_factory.mktemp("model"), scale=0.3), steps_per_launch=4)


@pytest.fixture(autouse=True)
def from_an_empty_cache(engine: Engine) -> Iterator[None]:
    yield
    engine.forget_prefixes()  # asserts that nothing is left running


def test_tokens_come_as_they_are_sampled_and_are_those_of_a_rollout(engine: Engine) -> None:
    asked = requests(group=2)
    expected = [completion.token_ids.tolist() for completion in engine.generate(asked)]
    engine.forget_prefixes()
    so_far: list[list[int]] = [[] for _ in asked]
    looks = 0
    for answers in stream(engine, asked, lambda: False):
        looks += 1
        for row, answer in enumerate(answers):
            assert list(answer.token_ids[: len(so_far[row])]) == so_far[row]
            assert len(answer.token_ids) - len(so_far[row]) <= 8  # a launch, and one that was made ahead
            so_far[row] = list(answer.token_ids)
            assert (answer.completion is not None) == (len(answer.token_ids) == SAMPLED.max_new_tokens)
    assert so_far == expected
    assert looks >= 4


def test_a_reader_who_cancels_or_leaves_gets_what_there_is_and_the_engine_goes_on(engine: Engine) -> None:
    asked = requests(group=3)  # 12 requests for 8 rows: some have not been started
    expected = [completion.token_ids.tolist() for completion in engine.generate(asked)]
    engine.forget_prefixes()
    looks: list[int] = []
    ended = []
    for answers in stream(engine, asked, lambda: len(looks) >= 3):
        looks.append(sum(len(answer.token_ids) for answer in answers))
        ended = answers
    assert 0 < looks[-1] < 12 * SAMPLED.max_new_tokens
    for answer, whole in zip(ended, expected, strict=True):
        assert list(answer.token_ids) == whole[: len(answer.token_ids)]
    engine.forget_prefixes()
    for _ in stream(engine, asked, lambda: False):
        break
    engine.forget_prefixes()
    assert [completion.token_ids.tolist() for completion in engine.generate(asked)] == expected


def test_a_reader_who_cancels_before_anything_ran_gets_nothing(engine: Engine) -> None:
    asked = requests(PROMPTS[:1])
    assert [len(answers[0].token_ids) for answers in stream(engine, asked, lambda: True)] == [0]


def test_an_engine_for_one_short_answer_takes_the_whole_prompt(engine: Engine) -> None:
    """The library would put a single token in the place of a prompt that leaves it fewer than seven cache tokens."""
    sampling = replace(SAMPLED, max_new_tokens=2, temperature=0.0)
    asked = requests(PROMPTS[:1], sampling)
    small = build_engine(engine.checkpoint, max_running_requests=1, context_tokens=len(PROMPTS[0]) + 2)
    assert small.options.cache_tokens == len(PROMPTS[0]) + 2 - 1 + 7
    [expected] = engine.generate(asked)
    [found] = small.generate(asked)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert len(found.token_ids) == 2
    tight = build_engine(engine.checkpoint, max_running_requests=1, kv_tokens=len(PROMPTS[0]) + 6)
    with pytest.raises(RequestError, match="need 17 cache tokens, the cache has 16; raise rollout.kv_tokens"):
        tight.generate(asked)
