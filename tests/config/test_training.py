"""What is trained when not everything is: ranges of layers, and what is refused."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_grpo.config import load_config, parse_layers
from tpu_grpo.errors import ConfigError

RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 8)), min_size=1, max_size=6)


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("5", (5,)),
        ("20-22", (20, 21, 22)),
        ("0-1,28-29", (0, 1, 28, 29)),
        (" 28 - 29, 0", (0, 28, 29)),
        ("3-5,4-6,4", (3, 4, 5, 6)),
        ("007", (7,)),
    ],
)
def test_layers_as_written(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@given(RANGES)
def test_a_layer_is_named_exactly_if_a_range_holds_it(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    layers = parse_layers(text)
    assert list(layers) == sorted(set(layers))
    assert [n for n in range(100) if n in layers] == [
        n for n in range(100) if any(first <= n <= first + more for first, more in ranges)
    ]


@given(RANGES, st.randoms())
def test_the_order_of_ranges_does_not_matter(ranges: list[tuple[int, int]], random: Random) -> None:
    parts = [f"{first}-{first + more}" for first, more in ranges]
    shuffled = random.sample(parts, len(parts))
    assert parse_layers(",".join(parts)) == parse_layers(",".join(shuffled))


@pytest.mark.parametrize("text", ["", "a", "1,", "-3", "1--2", "1.5", "2-", "1;2", "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must name layers like 20-31 or 0-3,28-31, got "):
        parse_layers(text)


def test_a_range_ascends() -> None:
    with pytest.raises(ValueError, match="from low to high, got '31-20'; write 20-31"):
        parse_layers("0, 31-20")
    assert message("model.train_layers=31-20") == (
        "model.train_layers must give ranges from low to high, got '31-20'; write 20-31"
    )


def test_a_single_layer_needs_no_quotes_and_survives_the_resolved_file(tmp_path: Path) -> None:
    config = load_config(None, ["model.lora.rank=4", "model.lora.layers=3"])
    assert config.model.lora.layers == "3"
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


def test_adapters_and_trained_layers_exclude_each_other() -> None:
    assert "model.train_layers=0-1 and model.lora.rank=4 exclude each other" in message(
        "model.train_layers=0-1", "model.lora.rank=4"
    )


@pytest.mark.parametrize("setting", ["layers=0", "path=somewhere"])
def test_settings_of_adapters_need_a_rank(setting: str) -> None:
    assert f"model.lora.{setting} needs model.lora.rank, got none" in message(f"model.lora.{setting}")


def test_targets_are_an_expression() -> None:
    assert "model.lora.targets must be a regular expression, got '(q'" in message(
        "model.lora.rank=4", "model.lora.targets=(q"
    )
