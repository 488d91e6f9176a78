"""Sizes and settings of an engine: shapes and lengths of launches by hand, and what is refused before it is built."""

from typing import Any

import pytest

from tests.engine.building import engine_options
from tpu_grpo.config import parse_config
from tpu_grpo.engine.options import (
    EngineOptions,
    choose_attention,
    choose_steps,
    ladder,
    pad_to,
    rows_left,
    splits_vocabulary,
)
from tpu_grpo.records.errors import ConfigError


def test_ladders_by_hand() -> None:
    assert ladder(8, 50, 2) == (8, 16, 32, 50)
    assert ladder(64, 64, 4) == (64,)
    assert ladder(64, 16, 4) == (16,)


def test_shapes_of_a_run() -> None:
    shapes = engine_options(context_tokens=286, page_size=16, max_running_requests=24, prefill_tokens=2048).shapes
    assert (shapes.batch, shapes.prefill, shapes.context) == ((8, 16, 24), (64, 256, 1024, 2048), 288)
    given = engine_options(
        context_tokens=9, page_size=1, max_running_requests=24, prefill_tokens=8, batch_paddings=(4, 24, 100)
    ).shapes
    assert (given.batch, given.prefill, given.context) == ((4, 24), (24,), 9)  # a step of 24 rows needs 24 tokens


def test_padding_takes_the_first_rung_that_holds() -> None:
    assert [pad_to((8, 16, 50), n) for n in (1, 8, 9, 50)] == [8, 8, 16, 50]
    with pytest.raises(ValueError, match="51 is beyond the largest compiled size 50"):
        pad_to((8, 16, 50), 51)


@pytest.mark.parametrize(
    ("gigabytes", "platform", "steps"),
    [
        (1.2, "tpu", 32),  # 1.2 ms a step; 42 would take 50 ms
        (4, "tpu", 16),  # 4 ms: 12.5
        (6.25, "tpu", 8),  # exactly 8
        (16, "tpu", 4),
        (60, "tpu", 4),
        (0.001, "cpu", 32),
        (0.2, "cpu", 8),  # 10 ms: 5
    ],
)
def test_smaller_models_get_longer_launches(gigabytes: float, platform: str, steps: int) -> None:
    assert choose_steps(int(gigabytes * 1e9), platform) == steps


@pytest.mark.parametrize(
    ("rows", "waiting", "left"),
    [
        (50, False, 32),  # 32 rows fit a smaller program
        (32, False, 16),
        (9, False, 8),
        (8, False, 0),
        (8, True, 7),  # a place for one
        (50, True, 47),  # 3 of 50
        (33, True, 32),
    ],
)
def test_a_launch_ends_when_rows_fit_a_smaller_program_or_places_are_free(rows: int, waiting: bool, left: int) -> None:
    assert rows_left((8, 16, 32, 50), rows, waiting=waiting) == left


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "split"),
    [
        (151_936, 8, True),
        (151_936, 64, True),
        (151_936, 3, False),
        (300, 1, False),  # nothing to split
    ],
)
def test_a_vocabulary_is_split_where_it_divides(vocabulary: int, tensor: int, split: bool) -> None:
    assert splits_vocabulary(vocabulary, tensor) is split


def test_flash_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="rollout.attention=flash needs a TPU"):
        choose_attention("flash", "cpu")
    assert [choose_attention("auto", platform) for platform in ("cpu", "tpu")] == ["gather", "flash"]


@pytest.mark.parametrize(
    ("changes", "prefixes"),
    [
        ({}, 1 + 3),  # prompts of 20 rows in groups of 8
        ({"environment": {"name": "calculator"}}, None),
    ],
)
def test_prompts_of_started_groups_are_counted(changes: dict[str, Any], prefixes: int | None) -> None:
    config = parse_config({"rollout": {"max_running_requests": 20}, "algorithm": {"group_size": 8}} | changes)
    assert EngineOptions.from_config(config, [1], replicas=1, platform="cpu").prefixes == prefixes


def test_options_take_it_from_the_config() -> None:
    assert engine_options().kv_dtype == "auto"
    config = parse_config({"rollout": {"kv_dtype": "fp8"}})
    assert EngineOptions.from_config(config, [1], replicas=1, platform="cpu").kv_dtype == "fp8"
